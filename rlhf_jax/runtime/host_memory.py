"""Know how much memory the processes of this host may have."""

from __future__ import annotations

import os
from pathlib import Path

# Where a control group says how much memory it may have: of version 1, and of version 2.
CGROUPS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    "": ("sys/fs/cgroup", "memory.max"),
}


def host_memory(root: Path = Path("/")) -> float:
    """Return the bytes that this process may have: its host's, or what a control group leaves.

    root: where `proc` and `sys` are. Groups of version 1 and 2 are known, and those around them.
    """
    known = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        mount, file = CGROUPS["memory" if kinds else ""]
        inner = Path(name.strip("/"))
        for group in (inner, *inner.parents):
            limit = root / mount / group / file
            text = limit.read_text().strip() if limit.is_file() else ""
            known += [float(text)] if text.isdigit() else []
    return min(known)
