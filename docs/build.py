"""Build the docs as a site; the reference pages are generated from the code.

python docs/build.py          # into site/
python docs/build.py serve    # and show it
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import rlhf_jax
from rlhf_jax.command.config import keys
from rlhf_jax.config.schema import Config
from rlhf_jax.monitoring.meanings import MEANINGS

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("train", "default_config", "Result", "Callback")  # of the public names
REFERENCE = ROOT / "docs" / "reference"


def main(words: list[str]) -> NoReturn:
    """Write the pages and become zensical, so that signals reach it; SystemExit without it."""
    if importlib.util.find_spec("zensical") is None:
        sys.exit("error: zensical, which builds the site, is missing: pip install -e '.[docs]'")
    write_reference()
    os.chdir(ROOT)
    command = [sys.executable, "-m", "zensical", *(words or ["build", "--strict", "--clean"])]
    os.execv(sys.executable, command)


def write_reference() -> None:
    """Write the pages of config keys, metrics and public names."""
    pages = {"config": config_keys(), "metrics": metrics(), "api": public_names()}
    for name, content in pages.items():
        (REFERENCE / f"{name}.md").write_text(content)


def config_keys() -> str:
    """Return the page of all config keys: a table for each section."""
    lines = [
        "# Config keys",
        "",
        "All keys of a run, with their defaults. A config file changes them in the result of"
        " `rlhf_jax.default_config()`, the command line with `--config.any.key=value`."
        " `rlhf-jax config 'generation.*'` prints the same table.",
    ]
    sections: dict[str, list[str]] = {"The run": []}  # keys without a section are between sections
    for key in keys():
        section, _, _ = key.name.rpartition(".")
        default = key.default.to_dict() if isinstance(key.default, Config) else key.default
        row = f"| {_key(key.name)} | `{default!r}` | {_cell(key.comment)} |"
        sections.setdefault(section or "The run", []).append(row)
    for section, rows in sections.items():
        lines += ["", f"## {section}", "", "| key | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of all metrics."""
    lines = [
        "# Metrics",
        "",
        "The metrics of `metrics.jsonl` (one line per step) and, from `eval/` on, of"
        " `evaluations.jsonl`; trackers receive the same. NAME stands for a reward term, a metric"
        " or a drafter. The healthy ranges are typical values, not limits.",
        "",
        "| key | meaning | unit | healthy |",
        "|---|---|---|---|",
    ]
    for one in MEANINGS:
        lines.append(f"| {_key(one.key)} | {_cell(one.text)} | {one.unit} | {_cell(one.healthy)} |")
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """Return the page of the names that `rlhf_jax` exports, the most used ones first."""
    lines = ["# Python", "", "The public names of `import rlhf_jax`."]
    for name in dict.fromkeys([*FIRST, *rlhf_jax.__all__]):
        lines += ["", f"::: rlhf_jax.{name}"]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    """Return the name of a key as code, with possible line breaks after each part."""
    return f"<code>{re.sub('(?<=[./_])', '<wbr>', name)}</code>"


def _cell(text: str) -> str:
    """Return text with the characters escaped that break a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main(sys.argv[1:])
