"""Be one of two processes that try `rlhf_jax.runtime.distributed` on each other.

python tests/support/ranks.py PORT RANK [last act]
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys

import jax
import jax.numpy as jnp
import listening
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.mesh import Layout
from rlhf_jax.rewards.combination import Broken, Response, Scores, as_scores, refuse_broken
from rlhf_jax.rewards.samples import shared_out
from rlhf_jax.runtime import distributed, joining, messages, signing, to_host
from rlhf_jax.runtime.signals import Stopped

HEARTBEAT = 5  # seconds


def main(port: str, rank: int, act: str) -> int:
    """What each rank checks, and how it ends."""
    place = joining.Place(f"localhost:{port}", 2, rank)
    if act == "unlike":
        return meet(rank, place)
    joining.start(place, HEARTBEAT, sends=True)
    if act in ("busy", "aborts"):
        return fail(rank, act, place)
    tell(rank)
    distributed.divide()
    tell(rank)
    read_elsewhere(rank)
    listen(rank)
    if act == "forged":
        return forge(rank, place)
    agree(rank)
    read()
    score(rank)
    if act == "alone" and rank == 1:
        return joining.leave(2, "error: this rank alone.", place)
    if act == "alone":
        signal.pause()
    return joining.leave(2, "error: both alike.", place)


def meet(rank: int, place: joining.Place) -> int:
    """Each says another heartbeat than rank 0, which waits."""
    try:
        joining.start(place, HEARTBEAT + rank)
    except ValueError as error:
        return joining.leave(2, f"error: {error}", place)
    return signal.pause() or 1


def fail(rank: int, act: str, place: joining.Place) -> int:
    """Rank 1 lets no other thread of Python run for longer than a heartbeat, or is ended by C."""
    if rank and act == "busy":
        ctypes.PyDLL(None).sleep(2 * HEARTBEAT)
    if rank and act == "aborts":
        os.write(2, b"past Python\n")
        ctypes.CDLL(None).abort()
    if act == "aborts":
        signal.pause()
    return joining.leave(0, "", place)


def tell(rank: int) -> None:
    """Values of any size from all, in the order of the ranks, and words that wait for nobody."""
    for size in (0, 10, 5_000, 300_000):
        found = distributed.gather((rank, np.arange(size * (rank + 1))))
        assert [(who, len(values)) for who, values in found] == [(0, size), (1, 2 * size)]
        np.testing.assert_array_equal(found[1][1], np.arange(2 * size))
    assert distributed.broadcast(rank) == 0
    distributed.publish("word", "first")
    assert distributed.gather(distributed.read_published("word", str)) == ["first", "first"]
    assert distributed.read_published("no such word", str) is None


def read_elsewhere(rank: int) -> None:
    """All read what one has, and the leader gets it in the device's own way."""
    wanted = np.arange(12, dtype=np.float32).reshape(4, 3)
    for owner in (0, 1):
        own = [device for device in jax.devices() if device.process_index == owner]
        layout = Layout(meshes.make_mesh(fsdp=len(own), devices=own))
        there = meshes.place_rows(wanted, layout)
        assert (
            layout.is_here == (rank == owner)
            and len(there.addressable_shards) == len(own) * layout.is_here
        )
        doubled = jax.jit(lambda x: 2 * x)(there)
        np.testing.assert_array_equal(to_host.fetch({"a": doubled, "b": 1})["a"], 2 * wanted)
        found = to_host.to_leader([there])[0]
        assert (found is None) == bool(rank)
        assert rank or (found == wanted).all()


def listen(rank: int) -> None:
    """What listens of processes of one machine does so on the loopback alone."""
    found = listening.sockets([os.getpid()])
    assert len(found) >= 2 - rank, found  # gloo's, and of rank 0 the coordination service
    for host, port in found:  # 127.0.0.2 is this machine, too
        assert host in listening.LOOPBACK, found
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED, port


def forge(rank: int, place: joining.Place) -> int:
    """Rank 1 lays words past the signatures, as whoever reaches the coordinator's port could."""
    client = distributed._client()
    if rank:
        distributed.publish("replaced", "first")
        old = client.blocking_key_value_get_bytes("replaced", 1000)
        for name in ("stop", "late", "decided"):
            client.key_value_set_bytes(name, messages.encode(15), allow_overwrite=True)
        stranger = signing.Signer(b"another key", 1)
        client.key_value_set_bytes("by another", stranger.sign("by another", old))
        client.key_value_set_bytes("elsewhere", old)
    distributed.gather(None)
    if not rank:
        assert distributed.read_published("replaced", str) == "first"
        assert [distributed.read_published(name, int) for name in ("stop", "late")] == [None] * 2
        for name in ("by another", "elsewhere"):
            assert distributed.wait_published(name, str, 0.2) is None
    distributed.gather(None)
    if rank:
        distributed.publish("replaced", "second")
        distributed.publish("late", 7)
    distributed.gather(None)
    if not rank:
        assert distributed.read_published("replaced", str) == "second"
        assert distributed.wait_published("late", int, 1.0) == 7, "a true word takes the place"
    distributed.gather(None)
    if rank:
        client.key_value_set_bytes("replaced", old, allow_overwrite=True)
    distributed.gather(None)
    if not rank:
        assert distributed.read_published("replaced", str) is None
        try:
            distributed.publish_if_absent("decided", 1)
        except ValueError as error:
            assert "others wrote at" in str(error)
        else:
            raise AssertionError("a forged decision was taken")
    distributed.gather(None)
    return joining.leave(0, "", place)


def agree(rank: int) -> None:
    """An error of one rank, or of all, is the same on all."""
    for works, seen in ((lambda: 1 // rank, "division"), (lambda: 1 // (rank - 1), "division")):
        try:
            distributed.run_on_all(works)
        except ZeroDivisionError as error:
            assert seen in str(error)
        else:
            raise AssertionError("no error was raised")
    try:
        distributed.gather_results(lambda: stop() if rank else None)
    except Stopped as stopped:
        assert stopped.exit_code == 143
    assert distributed.run_on_leader(lambda: os.getpid()) == distributed.gather(os.getpid())[0]
    assert distributed.all_here("here", 10) and (
        rank or not distributed.all_here("the leader alone", 0.2)
    )


def stop() -> None:
    raise Stopped(signal.SIGTERM)


def read() -> None:
    """Arrays that lie over both, on the host: placed, fetched, and piece by piece on the leader."""
    layout = Layout(meshes.make_mesh(slices=2))
    (own,) = [part for part in layout.split() if part.is_here]
    assert own.devices.size == jax.local_device_count() and layout.owners == (0, 1)
    rows = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    placed = meshes.place_rows({"rows": rows, "one": np.float32(2)}, layout)
    found = to_host.fetch(jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))(placed))
    np.testing.assert_array_equal(found["rows"], rows + 1)
    assert found["one"] == 3
    to_host.LEADER_PIECE = 16  # bytes: as if it were large
    sent = to_host.to_leader(placed)
    assert (sent["rows"] is not None) == distributed.leads()
    np.testing.assert_array_equal(sent["rows"] if distributed.leads() else rows, rows)
    spread = jax.device_put(jnp.float32(1), meshes.row_shardings(jnp.float32(1), own))
    assert to_host.fetch(spread) == 1


def score(rank: int) -> None:
    """Each scores its share; it is broken only where nobody had a number."""
    answers = [Response("", [], {}, str(number), group=number) for number in range(5)]

    def reward(given, broken=()) -> Scores:
        scores = as_scores(
            ["failed" if rank in broken else float(answer.response) for answer in given]
        )
        refuse_broken("this", scores)
        return scores

    found = shared_out(reward)(answers)
    assert found.values.tolist() == [0, 1, 2, 3, 4] and not found.failures
    found = shared_out(lambda given: reward(given, broken=(1,)))(answers)
    assert found.failures == {1: "failed", 3: "failed"} and np.isnan(found.values).tolist() == [
        0,
        1,
        0,
        1,
        0,
    ]
    try:
        shared_out(lambda given: reward(given, broken=(0, 1)))(answers)
    except Broken:
        return
    raise AssertionError("a reward that nobody could compute is broken")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), (*sys.argv, "")[3]))
