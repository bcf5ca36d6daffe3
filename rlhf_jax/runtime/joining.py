"""Join the processes of a run, and leave them: ranks, listening addresses, exit codes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from rlhf_jax.runtime import distributed, jax_internals
from rlhf_jax.runtime.lost_ranks import LOST, guard

HEARTBEAT = 30  # seconds of silence after which a rank is lost, by default
FOREVER = 86_400.0  # seconds: the heartbeat ends it sooner
FAILED = (1, 2)  # exit codes of an error, which may be one rank's alone
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of a coordinator on this machine

# Of XLA on CPUs, at least. A device needs one for a program that waits for other devices and one
# for the next program's start; with fewer than twice its devices a process may wait for a thread
# forever (seen with jax 0.10.2).
THREADS = 32


class Place(NamedTuple):
    """Hold the place of this process among all; `size` None: the cluster provides it."""

    coordinator: str | None = None  # HOST:PORT of rank 0
    size: int | None = 1
    rank: int | None = 0


def start(
    place: Place, heartbeat: int | None = None, workdir: Path | None = None, sends: bool = False
) -> None:
    """Join the others, before any device is used.

    heartbeat: seconds of silence after which a rank is lost, equal for all; None if this one could
    not read them. Output of libraries goes to the workdir, once it exists. sends: arrays go from
    process to process, for which those of one machine without accelerators listen on its loopback.
    Raises ValueError in one sentence if the others cannot be found.
    """
    virtual = "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if place.size != 1 or virtual:
        os.environ["NPROC"] = str(max(THREADS, os.cpu_count() or 1))
    if place.size == 1:
        return
    seconds = heartbeat or HEARTBEAT
    guard().begin(seconds, workdir)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # it would take SIGTERM, which `stopping` handles
    jax.config.update("jax_enable_preemption_service", False)
    # If the command line sets everything, the cluster must not: SLURM's rule would leave a process
    # one device of its node.
    how = None if place.size is None else "deactivate"
    try:
        jax.distributed.initialize(
            *place,
            cluster_detection_method=how,
            heartbeat_timeout_seconds=seconds,
            coordinator_bind_address=None if place.rank else _bind_address(place.coordinator or ""),
        )
    except (RuntimeError, ValueError) as error:
        guard().discard_log()
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The {place.size or ''} processes of the run did not meet ({reason})."
        ) from error
    distributed.signer()
    guard().listen()
    _check_alike(heartbeat)
    if _host(place.coordinator or "") in LOCAL:
        jax_internals.keep_local(sends)


def _check_alike(heartbeat: int | None) -> None:
    """Raise ValueError if rank 0 has another heartbeat: it would take this rank for lost.

    Nothing is compared if a rank could not read its own: it is about to report why.
    """
    word = "heartbeat_seconds"
    if distributed.leads():
        distributed.publish(word, heartbeat or 0)
    first = distributed.wait_published(word, int, distributed.MEETING)
    if heartbeat and first and heartbeat != first:
        raise ValueError(
            f"heartbeat_seconds is {heartbeat} on rank {distributed.rank()} and {first} on rank"
            f" {distributed.LEADER}: give all the same."
        )


def _host(coordinator: str) -> str:
    return coordinator.rpartition(":")[0]


def _bind_address(coordinator: str) -> str | None:
    """Return where rank 0 must listen: only on the addresses of the coordinator's name.

    None, which is everywhere, if the name does not resolve to this machine's interfaces: if it is
    that of another address (of a gateway), or only here of the loopback.
    """
    host = _host(coordinator)
    if host in LOCAL:
        return coordinator
    if not host or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in addresses:
            with socket.socket(family, kind) as trial:
                trial.bind((address[0], 0))
    except OSError:
        return None
    loopback = all(str(address[0]).startswith(("127.", "::1")) for *_, address in addresses)
    return None if loopback else coordinator


def leave(code: int, sentence: str, place: Place) -> int:
    """Return the exit code of a process that ends, after its last sentence on stderr.

    The sentence is printed once if all have the same. If this process ends alone the others are
    notified, and end as well.
    """
    if not distributed.started():
        if sentence and not place.rank:
            print(sentence, file=sys.stderr)
        return code
    of_leader = None
    rank = distributed.rank()
    # A leader that is gone takes the exchange of messages with it.
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
        distributed.publish(f"last words of {rank}", sentence)
        if sentence and rank != distributed.LEADER:
            word = f"last words of {distributed.LEADER}"
            of_leader = distributed.wait_published(word, str, distributed.PATIENCE / 2)
    if sentence and sentence != of_leader:
        print(f"rank {rank}: {sentence}" if rank else sentence, file=sys.stderr)
    if sentence:
        guard().speak_for_itself(code)
    if distributed.all_here("the end", distributed.PATIENCE if code in FAILED else FOREVER):
        guard().end()
        jax.distributed.shutdown()
        return code
    code = code or LOST  # it has finished, and a lost one will not
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
        guard().leave_alone(code)
    guard().discard_log()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit would wait for the others
