"""Which sockets of some processes listen, as Linux tells it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

# 127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel writes words of four bytes
LOOPBACK = ("0100007F", f"{'0' * 24}01000000", f"{'0' * 16}FFFF00000100007F")
LISTENS = "0A"


def sockets(processes: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports on which these processes listen."""
    own = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            _, address, _, state, *words = line.split()
            if state == LISTENS and f"socket:[{words[5]}]" in own:
                host, _, port = address.partition(":")
                found.add((host, int(port, 16)))
    return found


def session(leader: int) -> list[int]:
    """The processes of a session, which `leader` began."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found
