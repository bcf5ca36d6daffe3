"""Compilers for chips that are not here: they come with the extras `pod` and `gpu-pod`."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.compiled import CHIPS, EIGHT, devices, one
from rlhf_jax.runtime.jax_internals import cuda_plugin

__all__ = ["CHIPS", "EIGHT", "devices", "needs_cuda", "needs_libtpu", "one"]

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU needs its compiler: pip install -e '.[pod]'",
)
needs_cuda = pytest.mark.skipif(
    not cuda_plugin(), reason="compiling for a GPU needs its compiler: pip install -e '.[gpu-pod]'"
)
