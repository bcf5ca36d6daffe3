"""A page in a headless browser, where one is installed: as wide as a phone's or a desk's window."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "google-chrome", "chrome")
# A window cannot be as narrow as a phone's; a frame in it can.
FRAME = """<!doctype html>
<iframe id="page" style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.getElementById("page").contentDocument;
  document.title = "scrolls " + page.documentElement.scrollWidth;
}});
</script>"""


def shown(page: Path, profile: Path, width: int = 1240) -> subprocess.CompletedProcess:
    """What a browser makes of a page (stdout) and says of it (stderr); skips without one."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on PATH")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    options += [f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom"]
    asked = [browser, *options, page.as_uri()]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)


def width_needed(page: Path, profile: Path, width: int) -> int:
    """How many pixels wide a page is in a frame of this width: more, where it scrolls."""
    frame = page.with_name(f"frame-{page.name}")
    text = page.read_text(encoding="utf-8")
    frame.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
    try:
        seen = shown(frame, profile)
    finally:
        frame.unlink()
    found = re.search(r"<title>scrolls (\d+)</title>", seen.stdout)
    assert found is not None, seen.stdout[:500]
    return int(found[1])
