"""Two processes of a run, each started by hand, which may die or lose their connection."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from places import SUPPORT
from processes import arguments, environment

from rlhf_jax.runtime.lost_ranks import LOST

HEARTBEAT = 10  # seconds
MOST_SECONDS = 60  # from the loss of a rank to the end of all others
RUN = {
    "mesh__slices": 2,
    "steps": 3,
    "heartbeat_seconds": HEARTBEAT,
    "checkpoint__every": 1,
    "evaluation__every": 0,
    "kl__coefficient": 0.0,
    "generation__strategy": "plain",
    "generation__max_rows": 4,
    "generation__min_rows": 4,
}
AGAIN = "the same command resumes from the last checkpoint."


class Moment(NamedTuple):
    """When a rank dies: so many seconds after an event has happened so often before."""

    event: str
    number: int
    seconds: float
    rank: int


class Ranks:
    """The two processes of a run, and what each says."""

    def __init__(self, place: Path, name: str):
        self.workdir = place / name
        self.said = [place / f"{name}-{rank}.txt" for rank in range(2)]
        self.processes: list[subprocess.Popen] = []

    def until(self, steps: int) -> None:
        """Wait until so many steps are taken."""
        metrics = self.workdir / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
            assert [process.poll() for process in self.processes] == [None, None], self.words()
            time.sleep(0.05)

    def words(self) -> list[str]:
        return [path.read_text() for path in self.said]

    def ended(self, rank: int) -> str:
        """The one sentence with which a rank ends by itself, within a minute."""
        began = time.monotonic()
        assert self.processes[rank].wait(MOST_SECONDS) == LOST, self.words()
        words = self.words()[rank]
        print(f"rank {rank} ends after {time.monotonic() - began:.1f} s")
        for stack in ("Traceback", "@     0x", "stack trace", "terminate called", "[Gloo]"):
            assert stack not in words
        (sentence,) = re.findall("^error: .*", words, re.MULTILINE)
        assert words.lower().count(AGAIN) == 1 and sentence.lower().endswith(AGAIN), words
        kept = (self.workdir / "log" / f"rank-{rank}.txt").read_text()
        assert "Check failure stack trace" in kept and "[Gloo]" in kept
        return sentence


@contextlib.contextmanager
def started(
    place: Path, name: str, moment: Moment | None = None, ports: Sequence[int] = (), **changes
) -> Iterator[Ranks]:
    """Two processes, each by hand, one of which dies at a moment; none is left.

    ports: at which each looks for the coordinator.
    """
    ranks = Ranks(place, name)
    options = RUN | {"deterministic": True} | changes
    ports = ports or [free_port()] * 2
    for rank, port in enumerate(ports):
        when = ["none", "-1", "0"]
        if moment is not None:
            number = moment.number if rank == moment.rank else 1_000_000
            when = [moment.event, str(number), str(moment.seconds)]
        words = [sys.executable, str(SUPPORT / "killed.py"), *when]
        where = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process", str(rank)]
        with ranks.said[rank].open("w") as said:
            ranks.processes.append(
                subprocess.Popen(
                    [*words, *where, *arguments(place, name, **options)],
                    env=environment(1),
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Proxy:
    """What passes connections on to a port of this machine, until it does no more."""

    def __init__(self, target: int):
        self.forwards = threading.Event()
        self.forwards.set()
        self._target = target
        self._listens = socket.create_server(("localhost", 0))
        self.port = self._listens.getsockname()[1]
        self._open: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listens, *self._open):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listens.accept()
                self._open.append(near)
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        """Pass on both ways, once rank 0 listens."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                far = socket.create_connection(("localhost", self._target))
                break
            time.sleep(0.1)
        self._open.append(far)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.forwards.is_set():
                    threading.Event().wait()
                target.sendall(data)
            target.close()
