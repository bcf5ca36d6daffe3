"""What this package takes of jax that jax does not make public, all in one place.

jax 0.10.2 and 0.12 have it; `tests/test_jax_internals.py` says so of any other.
"""

from __future__ import annotations

import contextlib
from typing import Any

from jax._src import distributed, lib, xla_bridge


def coordination() -> Any:
    """Return the state of jax.distributed: `client` (None before it is joined), and the counts."""
    return distributed.global_state


def keep_collectives_local() -> None:
    """Have gloo listen on the loopback: by itself it takes the address of the machine's name.

    Where a version lacks a part, or takes other arguments, gloo listens where jax has it listen.
    """
    make_collectives = getattr(getattr(lib, "_jax", None), "make_gloo_tcp_collectives", None)
    make_cpu_client = getattr(xla_bridge, "make_cpu_client", None)
    register = getattr(xla_bridge, "register_backend_factory", None)
    if make_collectives is None or make_cpu_client is None or register is None:
        return

    def make_client() -> Any:
        """Make the client of the CPU's devices, with collectives on the loopback if possible."""
        try:
            local = make_collectives(coordination().client, hostname="127.0.0.1")
            return make_cpu_client(collectives=local)
        except TypeError:
            return make_cpu_client()

    with contextlib.suppress(TypeError):
        register("cpu", make_client, priority=0, fail_quietly=False)
