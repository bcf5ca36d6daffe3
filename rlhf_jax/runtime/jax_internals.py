"""All uses of non-public parts of jax, in one place.

jax 0.10.2 and 0.12 have it; `tests/runtime/test_jax_internals.py` says so of any other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import socket
from typing import Any, NamedTuple

import jax
from jax._src import distributed, lib, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn

LOOPBACK = "127.0.0.1"
# XLA's messages before it ends a process, and then for missed heartbeats of tasks.
FATAL = "Terminating process because the JAX distributed service detected fatal errors"
UNHEARD = re.compile(r"stopped sending heartbeats\):\n((?:\d+\n)+)")


class Verdict(NamedTuple):
    """Hold why XLA ends a process of several: missing heartbeats, or a problem of rank 0.

    All False if rank 0 has the service and does not answer.
    """

    unheard: tuple[int, ...] = ()  # ranks
    closed: bool = False  # the connection to rank 0, by its end
    unmet: bool = False  # the processes have not all come


def read_verdict(words: str) -> Verdict | None:
    """Return why XLA ends this process, from its output; None if that is something else."""
    _, fatal, words = words.rpartition(FATAL)
    if not fatal:
        return None
    if unheard := UNHEARD.search(words):
        return Verdict(unheard=tuple(map(int, unheard[1].split())))
    return Verdict(closed="UNAVAILABLE" in words, unmet="RegisterTask" in words)


def coordination() -> Any:
    """Return the state of jax.distributed: `client` (None before it is joined), and the counts."""
    return distributed.global_state


def keep_local(sends: bool) -> None:
    """Make gloo listen on the loopback: by default it uses the address of the machine's name.

    sends: CPUs of several processes send each other arrays, and listen there for those as well. If
    a version lacks a part, or takes other arguments, gloo listens where jax has it listen.
    """
    make_collectives = getattr(getattr(lib, "_jax", None), "make_gloo_tcp_collectives", None)
    make_cpu_client = getattr(xla_bridge, "make_cpu_client", None)
    register = getattr(xla_bridge, "register_backend_factory", None)
    if make_collectives is None or make_cpu_client is None or register is None:
        return

    def make_client() -> Any:
        """Make the client of the CPU's devices, with collectives on the loopback if possible."""
        if sends:
            with socket.socket() as trial:  # others receive the port, which must not be 0
                trial.bind((LOOPBACK, 0))
                port = trial.getsockname()[1]
            jax.config.update("jax_cross_host_transfer_socket_address", f"{LOOPBACK}:{port}")
            jax.config.update("jax_cross_host_transport_addresses", f"{LOOPBACK}:0")
        try:
            local = make_collectives(coordination().client, hostname=LOOPBACK)
            return make_cpu_client(collectives=local)
        except TypeError:
            return make_cpu_client()

    with contextlib.suppress(TypeError):
        register("cpu", make_client, priority=0, fail_quietly=False)


def cuda_plugin() -> str:
    """Return which of jax's plugins for NVIDIA's GPUs is installed; '' without one."""
    for name in ("cuda13", "cuda12"):
        if importlib.util.find_spec(f"jax_{name}_plugin") is not None:
            return name
    return ""


def load_cuda_plugin() -> None:
    """Register the compiler of NVIDIA's GPUs without a GPU or its libraries."""
    # else the plugin requires all of CUDA's libraries, of which a compiler needs none
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()  # registers all plugins, once
    if not xla_bridge.is_known_platform("cuda"):
        importlib.import_module(f"jax_plugins.xla_{cuda_plugin()}").initialize()


@functools.cache
def cudnn_version() -> int:
    """Return the version of cuDNN that jax finds, such as 91000; 0 if it finds none."""
    with contextlib.suppress(RuntimeError):
        return cudnn.check_cudnn_version()
    return 0
