"""TPUs that are not here, to compile for: their compiler comes with the extra `pod`."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.compiled import CHIPS, EIGHT, devices, one

__all__ = ["CHIPS", "EIGHT", "devices", "needs_libtpu", "one"]

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU needs its compiler: pip install -e '.[pod]'",
)
