"""The parts of jax that are not public are there, as `runtime/jax_internals.py` takes them."""

import inspect
import re
from pathlib import Path

from jax._src import lib, xla_bridge

from rlhf_jax.runtime import jax_internals

ROOT = Path(__file__).resolve().parents[1]


def test_what_is_taken_is_there():
    state = jax_internals.coordination()
    assert state.client is None and state.num_processes == 1 and state.process_id == 0
    assert callable(lib._jax.make_gloo_tcp_collectives)  # pyright: ignore
    assert "collectives" in inspect.signature(xla_bridge.make_cpu_client).parameters
    register = inspect.signature(xla_bridge.register_backend_factory).parameters
    assert {"priority", "fail_quietly"} <= set(register)


def test_no_other_file_takes_any():
    found = [
        path.name
        for folder in ("rlhf_jax", "pallas_kernels", "launch")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bjax\._src\b", path.read_text())
    ]
    assert found == ["jax_internals.py"]
