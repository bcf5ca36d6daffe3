"""Whether processes that a test has started, or what it tests, have come to their end."""

from __future__ import annotations

import subprocess
import time


def ended(pid: int, patience: float = 10.0) -> bool:
    """Whether a process is gone, or a zombie that nobody collects, before patience is."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        # with "l" some of its threads still end, and its files are open until they have
        if not state.strip() or (state.startswith("Z") and "l" not in state):
            return True
        time.sleep(0.02)
    return False
