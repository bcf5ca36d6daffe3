"""A process with limits of memory and time in which foreign files are read."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

SECONDS = 10.0  # that reading one small file may take
ROOT = Path(__file__).resolve().parents[2]


class Child:
    """Read files in another process; one that hangs or dies is replaced."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def outcome(self, name: str, file: Path) -> str:
        """What is wrong with how a file was read; '' where nothing is."""
        if self._process is None:
            environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("readers.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            # The first answer waits for the imports.
            return self._ask(name, file, 120.0)
        return self._ask(name, file, SECONDS)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, name: str, file: Path, seconds: float) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write((json.dumps([name, str(file)]) + "\n").encode())
        process.stdin.flush()
        if not select.select([process.stdout], [], [], seconds)[0]:
            self.close()
            return f"read for over {seconds:g} s"
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self.close()
            return f"the process ended with {code}"
        return json.loads(line)
