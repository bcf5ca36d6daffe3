"""Several processes as one run: which is this one, what they tell each other, and how the host
reads their arrays.

Rank 0 leads: it writes the files, shows the progress and decides what only one can. With one
process every function here is the plain thing, and costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

HEARTBEAT = 30  # seconds of silence after which a process counts as dead, and the others end
PATIENCE = 10.0  # seconds in which ranks that fail alike come to the same place
FOREVER = 86_400.0  # seconds: what ends it sooner is the heartbeat
FAILED = (1, 2)  # exit codes of an error, which may be one rank's alone
LEADER = 0
# How an error of the runtime begins. Where results are read on the host it comes as a ValueError,
# as do tensorstore's.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED"
    "|UNAVAILABLE|UNKNOWN): "
)
OF_FILES = re.compile(r" \[(tensorstore|source|os_error)")  # in what tensorstore says
FIRST = 1024  # bytes of a message that travel with its length
PIECE = 1 << 28  # bytes of an array that travel to the leader at one time

# Of XLA on CPUs, at least. A device needs one for a program that waits for other processes and one
# for the next program's start; with fewer than twice its devices a process may wait for a thread
# forever (seen with jax 0.10.2).
THREADS = 32

T = TypeVar("T")


class Place(NamedTuple):
    """Where this process stands among all, as the command line says it; `size` None: the cluster is
    asked.
    """

    coordinator: str | None = None  # HOST:PORT of rank 0
    size: int | None = 1
    rank: int | None = 0


def start(place: Place) -> None:
    """Join the others, before any device is touched. Raises ValueError in one sentence where they
    cannot be found.
    """
    if place.size == 1:
        return
    _keep_stdout()
    os.environ["NPROC"] = str(max(THREADS, os.cpu_count() or 1))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # it would take SIGTERM, which `stopping` hears
    jax.config.update("jax_enable_preemption_service", False)
    # Where the command line says all, the cluster must not: SLURM's rule would leave a process one
    # device of its node.
    how = None if place.size is None else "deactivate"
    try:
        jax.distributed.initialize(
            *place, cluster_detection_method=how, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The {place.size or ''} processes of the run did not meet ({reason})."
        ) from error


def _keep_stdout() -> None:
    """Leave standard output to Python: gloo writes a line there for each of its connections."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)


def started() -> bool:
    """Whether this is one of several processes."""
    return distributed.global_state.client is not None


def count() -> int:
    """The number of processes."""
    return distributed.global_state.num_processes if started() else 1


def rank() -> int:
    """This process among them, from 0."""
    return distributed.global_state.process_id if started() else 0


def leads() -> bool:
    """Whether this is the process that writes and shows."""
    return rank() == LEADER


def share(items: Sequence[T]) -> list[T]:
    """This process's items, dealt out in turn."""
    return list(items[rank() :: count()])


def gather(value: T) -> list[T]:
    """The value of every rank, by rank; all call it, in the same order. Values are pickled: any
    size, any kind.
    """
    if not started():
        return [value]
    message = np.frombuffer(pickle.dumps(value), np.uint8)
    first = np.zeros(FIRST + 4, np.uint8)
    first[:4] = np.frombuffer(np.uint32(len(message)).tobytes(), np.uint8)
    first[4 : 4 + min(len(message), FIRST)] = message[:FIRST]
    heads = multihost_utils.process_allgather(first)
    sizes = np.ascontiguousarray(heads[:, :4]).view(np.uint32)[:, 0].tolist()
    bodies = heads[:, 4:]
    if max(sizes) > FIRST:  # padded to a power of two: few programs
        rest = np.zeros(1 << (max(sizes) - FIRST - 1).bit_length(), np.uint8)
        rest[: max(0, len(message) - FIRST)] = message[FIRST:]
        bodies = np.concatenate([bodies, multihost_utils.process_allgather(rest)], axis=1)
    return [pickle.loads(body[:size].tobytes()) for body, size in zip(bodies, sizes, strict=True)]


def broadcast(value: T) -> T:
    """The leader's value, on all ranks; the others' is not looked at."""
    return gather(value if leads() else None)[LEADER]  # pyright: ignore[reportReturnType]


def together(work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, by rank. An error of one is raised on all, the lowest rank's
    where several fail, so that they leave in step.
    """
    if not started():
        return [work()]
    own: Exception | None = None
    try:
        outcome = work(), None
    except Exception as error:
        own = error
        outcome = (None, _portable(error))
    for place, (_, error) in enumerate(outcomes := gather(outcome)):
        if error is not None:
            raise own if own is not None and place == rank() else error
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]


def run_on_all(work: Callable[[], T]) -> T:
    """What `work` gives here, once it has ended on all; an error of one is raised on all."""
    own: list[T] = []
    together(lambda: own.append(work()))
    return own[0]


def run_on_leader(work: Callable[[], T]) -> T:
    """What `work` gives on the leader, which alone does it; its error is raised on all."""
    return together(lambda: work() if leads() else None)[LEADER]  # pyright: ignore[reportReturnType]


def is_of_device(error: BaseException) -> bool:
    """Whether a device failed, or another process of the run, and nothing that was asked or
    read.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    said = str(error)
    return isinstance(error, ValueError) and bool(STATUS.match(said)) and not OF_FILES.search(said)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same, as another process can have it."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def fetch(tree: Any) -> Any:
    """A tree of arrays on the host, whole on every rank; all ranks call it where parts lie with
    other processes.
    """
    return jax.device_get(jax.tree.map(_whole, tree) if started() else tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    return _repeated(NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _repeated(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(_same, out_shardings=everywhere)


def _same(leaf: jax.Array) -> jax.Array:
    return leaf


def to_leader(tree: Any) -> Any:
    """A tree of arrays as numpy arrays on the leader, and Nones elsewhere, a piece of a leaf after
    the other: no device holds a whole large one. All ranks call it.
    """
    return jax.tree.map(_sent, tree)


def _sent(leaf: jax.Array) -> np.ndarray | None:
    pieces = max(1, -(-leaf.nbytes // PIECE)) if leaf.ndim else 1
    if pieces == 1:
        found = fetch(leaf)
        return found if leads() else None
    out = np.empty(leaf.shape, leaf.dtype) if leads() else None
    step = -(-leaf.shape[0] // pieces)
    for start in range(0, leaf.shape[0], step):
        found = fetch(leaf[start : start + step])
        if out is not None:
            out[start : start + step] = found
    return out


def publish(name: str, value: str) -> None:
    """Lay a word where every process may read it at any time; a later one of the same name takes
    its place.
    """
    if started():
        _client().key_value_set(name, value, allow_overwrite=True)


def published(name: str) -> str | None:
    """The word that lies there now, from whichever process; None where there is none. It waits for
    nobody.
    """
    try:
        return _client().key_value_try_get(name) if started() else None
    except jax.errors.JaxRuntimeError:  # the service knows no other way to say that there is none
        return None


def awaited(name: str, seconds: float) -> str | None:
    """A published word, waited for; None where it has not come within so long."""
    try:
        return _client().blocking_key_value_get(name, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def first(name: str, value: str) -> str:
    """Lay a word unless one of that name lies there; the one that does then."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(name, value)
    return _client().blocking_key_value_get(name, int(PATIENCE * 1000))


def forget(folder: str) -> None:
    """Take back the words whose names begin with `folder/`."""
    if started():
        _client().key_value_delete(f"{folder}/")


def all_here(name: str, seconds: float = PATIENCE) -> bool:
    """Whether all processes come to the place of this name within so long; a name is good for one
    time.
    """
    if not started():
        return True
    try:
        _client().wait_at_barrier(name, int(seconds * 1000))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def leave(code: int, sentence: str, place: Place) -> int:
    """The end of a process with its exit code, after its last sentence on stderr, which is said
    once where all say the same. The others, where this one ends alone, are ended by the
    coordination service.
    """
    if not started():
        if sentence and not place.rank:
            print(sentence, file=sys.stderr)
        return code
    publish(f"last words of {rank()}", sentence)
    if sentence and (leads() or sentence != _last_words_of_leader()):
        print(sentence if leads() else f"rank {rank()}: {sentence}", file=sys.stderr)
    if all_here("the end", PATIENCE if code in FAILED else FOREVER):
        jax.distributed.shutdown()
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own end would wait for the others


def _last_words_of_leader() -> str | None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return awaited(f"last words of {LEADER}", PATIENCE / 2)
    return None


def _client() -> Any:
    return distributed.global_state.client
