"""Work as one of several processes: ranks, collectives of host values, published values.

Rank 0 leads: it writes the files, shows the progress and makes decisions that must be made once.
With one process every function here is trivial, and costs nothing. The processes exchange the
values of `messages.py`, signed by `signing.py`: they are never executed, and unsigned ones are
ignored.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hmac
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlhf_jax.runtime import jax_internals, messages, signing
from rlhf_jax.runtime.signing import Signer

MEETING = 30.0  # seconds in which ranks that have met prove to each other that they have the key
PATIENCE = 10.0  # seconds in which ranks that fail alike arrive at the same point
LEADER = 0
# Prefixes of an error of the runtime. When results are read on the host it is a ValueError, as are
# tensorstore's.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED"
    "|UNAVAILABLE|UNKNOWN): "
)
OF_FILES = re.compile(r" \[(tensorstore|source|os_error)")  # in messages of tensorstore
FIRST = 1024  # bytes of a message that travel with its length
EXCHANGE = "the exchange of ranks"
FRESH = "fresh bytes"
RETRY = 0.05  # seconds until a name with a forged value is read again
ASK_AGAIN = 10.0  # seconds until a missing value is requested again

T = TypeVar("T")

messages.register_error(jax.errors.JaxRuntimeError)


def started() -> bool:
    """Return whether this is one of several processes."""
    return jax_internals.coordination().client is not None


@functools.cache
def signer() -> Signer:
    """Return this process's signer, after all ranks have made a key of this attempt.

    The key is made from the run's secret and fresh random bytes of every rank, so that no message
    of another run, or of an earlier attempt of this one, is valid. Raises ValueError if a rank has
    no secret, or another one.
    """
    secret = signing.read_secret()
    if secret is None and count() > 1:
        raise ValueError(
            "The messages between processes are signed: give all of them the same"
            f" {signing.KEY}, of openssl rand -hex 32, or {signing.KEY_FILE} (launch/*.sh do)."
        )
    first = Signer(secret or secrets.token_bytes(32), rank())
    nonce = secrets.token_bytes(32)
    _lay(f"{FRESH} of {rank()}", nonce, first)
    if leads():
        words = [_wait(f"{FRESH} of {other}", bytes, MEETING, first) for other in range(count())]
        _lay(FRESH, words, first)
    fresh = _wait(FRESH, list, 2 * MEETING, first) or []
    others = [other for other, its in enumerate(fresh) if its is None]
    if others or len(fresh) != count() or fresh[rank()] != nonce:
        who = f"ranks {others}" if others else f"rank {LEADER}"
        raise ValueError(
            f"{who} does not have the key of rank {rank()} has: give all processes of the run the"
            f" same {signing.KEY} or {signing.KEY_FILE}."
        )
    return Signer(hmac.digest(first.key, b"".join(fresh), "sha256"), rank())


def count() -> int:
    """Count the processes."""
    return jax_internals.coordination().num_processes if started() else 1


def rank() -> int:
    """Return the number of this process among them, from 0."""
    return jax_internals.coordination().process_id if started() else 0


def leads() -> bool:
    """Return whether this is the process that writes and shows."""
    return rank() == LEADER


def gather(value: T) -> list[T]:
    """Return the value of every rank, by rank; all call it, in the same order.

    Raises ValueError for a value of an unsupported type, or if others sent bytes that are not a
    message.
    """
    return _exchange(messages.encode(value)) if started() else [value]


# Of each thread, by its name: all ranks have had the same number of exchanges.
_exchanges: collections.Counter[str] = collections.Counter()
_divided = threading.Event()


def divide() -> None:
    """Declare that from now on a call may run on the devices of some processes alone.

    Ranks then exchange values through the coordination service: a program over all devices would
    wait for each call that is at work somewhere.
    """
    _divided.set()


def is_divided() -> bool:
    """Return whether a call may run on the devices of some processes alone."""
    return _divided.is_set()


def _exchange(message: bytes) -> list[Any]:
    """Return the message of every rank, by rank."""
    thread = threading.current_thread().name
    number = _exchanges[thread]
    _exchanges[thread] += 1
    folder = f"{EXCHANGE} in {thread}"
    if not is_divided():
        return _exchange_by_devices(f"{folder}/{number}", message)

    publish(f"{folder}/{number}/{rank()}", message)
    if leads():
        words = [f"{folder}/{number}/{other}" for other in range(count())]
        publish(f"{folder}/{number}/all", [_await(word, bytes) for word in words])
        delete_published(f"{folder}/{number - 1}")  # all have read it, since they sent the next one
    replies = _await(f"{folder}/{number}/all", list)
    return [messages.decode(reply, EXCHANGE) for reply in replies]


def _exchange_by_devices(name: str, message: bytes) -> list[Any]:
    """Return the message of every rank, gathered by a program over all devices.

    The lengths come with the first bytes of each; the rest is padded to a power of two, so that
    there are few programs.
    """
    own = np.frombuffer(signer().sign(name, message), np.uint8)
    first = np.zeros(FIRST + 4, np.uint8)
    first[:4] = np.frombuffer(np.uint32(len(own)).tobytes(), np.uint8)
    first[4 : 4 + min(len(own), FIRST)] = own[:FIRST]
    heads = multihost_utils.process_allgather(first)
    sizes = np.ascontiguousarray(heads[:, :4]).view(np.uint32)[:, 0].tolist()
    if max(sizes) > messages.LARGEST_MESSAGE:
        raise ValueError(f"What came over {EXCHANGE} claims to be of {max(sizes):,} bytes.")
    bodies = heads[:, 4:]
    if max(sizes) > FIRST:
        rest = np.zeros(1 << (max(sizes) - FIRST - 1).bit_length(), np.uint8)
        rest[: max(0, len(own) - FIRST)] = own[FIRST:]
        bodies = np.concatenate([bodies, multihost_utils.process_allgather(rest)], axis=1)
    values = []
    for sender, (body, size) in enumerate(zip(bodies, sizes, strict=True)):
        try:
            signed = signer().check(name, body[:size].tobytes(), sender)
        except signing.ForgedWord as error:
            raise ValueError(f"What came as {name} is not of rank {sender}: {error}.") from None
        values.append(messages.decode(signed, EXCHANGE))
    return values


def broadcast(value: T, root: int = LEADER) -> T:
    """Return one rank's value on all, the leader's by default; the others' is ignored."""
    return gather(value if rank() == root else None)[root]  # pyright: ignore[reportReturnType]


def gather_results(work: Callable[[], T]) -> list[T]:
    """Return the result of `work` on each rank, by rank.

    An error of one is raised on all, the lowest rank's if several fail, so that they leave in step.
    If its class cannot travel, the others raise the nearest that can, with the same message.
    """
    if not started():
        return [work()]
    raised: Exception | None = None
    try:
        message = messages.encode((work(), None))
    except Exception as error:
        raised = error
        message = messages.encode((None, messages.describe_error(error)))
    outcomes = _exchange(message)
    for place, (_, error) in enumerate(outcomes):
        if error is not None:
            raise (
                raised if raised is not None and place == rank() else messages.rebuild_error(error)
            )
    return [result for result, _ in outcomes]


def run_on_all(work: Callable[[], T]) -> T:
    """Return the result of `work` here, once it has ended on all; an error is raised on all."""
    results: list[T] = []
    gather_results(lambda: results.append(work()))
    return results[0]


def run_on_leader(work: Callable[[], T]) -> T:
    """Return the leader's result of `work`, which only it runs; its error is raised on all."""
    results = gather_results(lambda: work() if leads() else None)
    return results[LEADER]  # pyright: ignore[reportReturnType]


def is_of_device(error: BaseException) -> bool:
    """Return whether a device failed, or another process: neither input nor files."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    message = str(error)
    return (
        isinstance(error, ValueError)
        and bool(STATUS.match(message))
        and not OF_FILES.search(message)
    )


def publish(name: str, value: object) -> None:
    """Publish a value for every process to read; a later one of the same name replaces it."""
    if started():
        _lay(name, value, signer())


def _lay(name: str, value: object, signer: Signer) -> None:
    word = signer.sign(name, messages.encode(value))
    _client().key_value_set_bytes(name, word, allow_overwrite=True)


def read_published(name: str, kind: type[T]) -> T | None:
    """Return the value of a name now, without waiting; None if there is none.

    Values that no process of this run has signed are ignored, with a warning. Raises ValueError,
    which names the channel, for any other value.
    """
    try:
        signed = _client().key_value_try_get_bytes(name) if started() else None
    except jax.errors.JaxRuntimeError:  # the service reports absence only as an error
        return None
    return None if signed is None else _read(name, signed, kind, signer())


def _read(name: str, word: bytes, kind: type[T], signer: Signer) -> T | None:
    """Return the value of a message; None, after a warning, if it is not of this run."""
    try:
        body = signer.check(name, word)
    except signing.ForgedWord as error:
        warnings.warn(
            f"What lies at {_channel(name)} is ignored: {error}. Someone else reaches the"
            " coordinator's port; SECURITY.md has the firewall's rule.",
            stacklevel=1,
        )
        return None
    return messages.decode(body, _channel(name), kind)


def _await(name: str, kind: type[T]) -> T:
    """Return the value of a name once published; if a rank dies, this one is ended."""
    while (value := wait_published(name, kind, ASK_AGAIN)) is None:
        continue
    return value


def wait_published(name: str, kind: type[T], seconds: float) -> T | None:
    """Return the value of a name once published; None if it does not come in time."""
    return _wait(name, kind, seconds, signer())


def _wait(name: str, kind: type[T], seconds: float, signer: Signer) -> T | None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            word = _client().blocking_key_value_get_bytes(name, max(1, int(left * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        value = _read(name, word, kind, signer)
        if value is not None:
            return value
        time.sleep(RETRY)
    return None


def publish_if_absent(name: str, value: T) -> T:
    """Publish a value unless one of its name exists; return the one that does then.

    Raises ValueError if that one is not of this run: ranks that overwrote it could each believe to
    have been the first.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set_bytes(name, signer().sign(name, messages.encode(value)))
    word = _client().blocking_key_value_get_bytes(name, int(PATIENCE * 1000))
    present = _read(name, word, type(value), signer())
    if present is None:
        raise ValueError(f"The run ends, since others wrote at {_channel(name)}.")
    return present


def delete_published(folder: str) -> None:
    """Delete the values whose names begin with `folder/`."""
    if started():
        _client().key_value_delete(f"{folder}/")


def _channel(name: str) -> str:
    return f"the coordination service as {name!r}"


def all_here(name: str, seconds: float = PATIENCE) -> bool:
    """Return whether all processes reach the point of this name within a time in seconds.

    A name can be used once.
    """
    if not started():
        return True
    try:
        _client().wait_at_barrier(name, int(seconds * 1000))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _client() -> Any:
    return jax_internals.coordination().client
