"""The parts of jax that are not public are there, as `runtime/jax_internals.py` takes them."""

import inspect
import re

import pytest
from jax._src import lib, xla_bridge
from places import ROOT

from rlhf_jax.runtime import jax_internals
from rlhf_jax.runtime.jax_internals import FATAL, Verdict


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


def test_what_compiles_for_gpus_is_found_where_it_is():
    """A plugin is registered under its platform; without cuDNN's library there is no version."""
    assert jax_internals.cuda_plugin() in ("", "cuda12", "cuda13")
    assert jax_internals.xla_bridge.is_known_platform("cpu")
    assert not jax_internals.xla_bridge.is_known_platform("no platform")
    assert isinstance(jax_internals.cudnn_version(), int)


# as jax 0.10.2 and 0.12 write it; tests/laws/test_lost_ranks_lose_nothing.py has real ends
UNHEARD = """UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1
12
The tasks have crashed.

RPC: /xla.coordination.CoordinationService/PollForError"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (f"{FATAL}. absl::Status: {UNHEARD}", Verdict(unheard=(1, 12))),
        (f"{FATAL}. absl::Status: UNAVAILABLE: Failed to send RPC", Verdict(closed=True)),
        (f"{FATAL}. DEADLINE_EXCEEDED\n\nRPC: /CoordinationService/Heartbeat", Verdict()),
        (f"{FATAL}. DEADLINE_EXCEEDED\n\nRPC: /RegisterTask", Verdict(unmet=True)),
        (f"{FATAL}. {UNHEARD}\n{FATAL}. Socket closed UNAVAILABLE", Verdict(closed=True)),
        (f"E1124 Use error polling: {UNHEARD}", None),
        ("", None),
    ],
    ids=["unheard", "closed", "silent", "unmet", "the last", "not the end", "nothing"],
)
def test_what_xla_says_of_lost_ranks_is_read(words, found):
    assert jax_internals.read_verdict(words) == found
