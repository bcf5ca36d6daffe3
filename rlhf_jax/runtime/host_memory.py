"""Find the memory limit of this host's processes."""

from __future__ import annotations

import os
from pathlib import Path

# Files with the memory limit of a control group: of version 1, and of version 2.
CGROUPS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    "": ("sys/fs/cgroup", "memory.max"),
}


def host_memory(root: Path = Path("/")) -> float:
    """Return the usable bytes of this process: its host's, or the limit of a control group.

    root: parent of `proc` and `sys`. Groups of version 1 and 2, and their parents, are considered.
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
