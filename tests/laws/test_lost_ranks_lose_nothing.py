"""A rank that dies, stops or is cut off ends the others in one sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from places import SUPPORT
from processes import arguments, environment, left_by, ranks_of

from rlhf_jax.command import train
from rlhf_jax.runtime.jax_internals import Verdict
from rlhf_jax.runtime.joining import Place
from rlhf_jax.runtime.lost_ranks import LOST, sentence

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
KINDS = ("compiling", "generation", "move", "inference", "training", "saving")
IN_CI = (7,)  # moments


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


def finish(place: Path, name: str, **changes) -> list[str]:
    with started(place, name, **changes) as ranks:
        assert [process.wait(300) for process in ranks.processes] == [0, 0], ranks.words()
    return ranks.words()


@pytest.fixture(scope="module")
def whole(place) -> tuple[dict, list[dict[str, int]]]:
    """What an uninterrupted run leaves, and how often each event happens on each rank."""
    words = finish(place, "whole")
    return left_by(place / "whole"), [json.loads(said.splitlines()[-1]) for said in words]


def moments(events: list[dict[str, int]], count: int, seed: int) -> list[Moment]:
    """Random moments, of every kind of event in turn; half come a little later than the event."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        rank = draw.randrange(2)
        # how often a process notes that it waits for rewards is the clock's
        sure = {"move": 2, "inference": events[rank]["inference"] // 2}
        number = draw.randrange(sure.get(kind) or events[rank][kind])
        seconds = draw.choice([0.0, draw.uniform(0.0, 0.1)])
        found.append(Moment(kind, number, seconds, rank))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[pytest.mark.long] * (i not in IN_CI)) for i in range(10)]
)
def test_a_rank_killed_at_ten_moments_ends_the_other_and_loses_nothing(index, place, whole):
    left, events = whole
    moment = moments(events, 10, seed=0)[index]
    exact = moment.event != "move"  # with `deterministic` none moves between processes
    name = f"killed-{index}"
    print(moment)
    with started(place, name, moment, deterministic=exact) as ranks:
        killed = ranks.processes[moment.rank].wait(300)
        assert killed == -signal.SIGKILL, ("the moment has not come", moment, ranks.words())
        sentence = ranks.ended(1 - moment.rank)
        assert AGAIN not in ranks.words()[moment.rank]
    how = "no heartbeat for 10 s" if moment.rank else "the connection has closed"
    assert sentence.startswith(f"error: rank {moment.rank} is gone ({how}): look at ")
    assert str(place / name / "log" / f"rank-{moment.rank}.txt") in sentence
    finish(place, name, deterministic=exact)
    for part, value in left_by(place / name).items():
        assert value == left[part] or not (exact or part == "samples.jsonl"), part


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_for_longer_than_the_heartbeat_is_lost_and_knows_it(rank, place):
    with started(place, f"stopped-{rank}", steps=1000) as ranks:
        ranks.until(2)
        ranks.processes[rank].send_signal(signal.SIGSTOP)
        how = "no heartbeat for" if rank else "no answer within"
        said = ranks.ended(1 - rank)
        assert said.startswith(f"error: rank {rank} is gone ({how} {HEARTBEAT} s): look at ")
        ranks.processes[rank].send_signal(signal.SIGCONT)
        said = ranks.ended(rank)
    assert re.match(rf"error: rank {rank} itself stood still for \d+\.\d s, too long for ", said)


@pytest.mark.slow
def test_a_rank_that_is_cut_off_from_the_coordinator_ends_and_so_does_the_other(place):
    port = free_port()
    with Proxy(port) as proxy, started(place, "cut", ports=[port, proxy.port], steps=1000) as ranks:
        ranks.until(2)
        proxy.forwards.clear()
        said = [ranks.ended(rank) for rank in range(2)]
    for own, how in enumerate(("no heartbeat for", "no answer within")):
        gone = f"error: rank {1 - own} is gone ({how} {HEARTBEAT} s): look at "
        assert said[own].startswith(gone)


@pytest.mark.slow
def test_a_python_that_stands_still_is_not_lost():
    """The heartbeat is no thread of Python's: a long call that lets none run is no death."""
    codes, errors = ranks_of("ranks.py", "busy", devices=1)
    assert codes == [0, 0], errors


@pytest.mark.slow
def test_a_library_that_ends_a_process_is_named_with_the_file_of_its_words():
    """The other ends, too, and says so of the one that is gone."""
    codes, errors = ranks_of("ranks.py", "aborts", devices=1)
    (said,) = [line for line in errors[1].splitlines() if "error:" in line]
    found = re.fullmatch(rf"error: rank 1 was ended by a library, .* (/.*\.txt); {AGAIN}", said)
    assert found and "past Python" in Path(found[1]).read_text()
    assert "past Python" not in errors[1]
    assert codes == [LOST, -signal.SIGABRT]
    assert errors[0].count("error: rank 1 is gone (no heartbeat for 5 s)") == 1
    Path(found[1]).unlink()


@pytest.mark.parametrize(
    ("verdict", "away", "said"),
    [
        (Verdict(unheard=(2, 3)), 0, {0: "ranks 2 and 3 are gone", 1: "", 2: "rank 2 itself sent"}),
        (Verdict(unheard=(0,)), 0, {1: "rank 0 is gone (no heartbeat for 10 s)", 2: ""}),
        (
            Verdict(unheard=(1,)),
            40,
            {0: "rank 0 itself stood", 1: "rank 1 itself stood still for 40.0"},
        ),
        (
            Verdict(unheard=(1,)),
            0,
            {0: "rank 1 is gone", 1: "rank 1 itself sent no heartbeat", 2: ""},
        ),
        (Verdict(closed=True), 0, {1: "rank 0 is gone (the connection has closed)", 2: ""}),
        (Verdict(closed=True), 40, {1: "rank 1 itself stood still", 2: "rank 2 itself stood"}),
        (Verdict(), 0, {1: "rank 0 is gone (no answer within 10 s)", 2: "rank 0 is gone"}),
        (Verdict(unmet=True), 0, {2: "rank 2 did not meet all 4 processes", 0: "rank 0 did not"}),
    ],
    ids=[
        "two",
        "the first",
        "stopped",
        "cut off",
        "closed",
        "closed while away",
        "silent",
        "unmet",
    ],
)
def test_the_lowest_rank_that_is_left_speaks_and_none_blames_others_for_its_own_absence(
    verdict, away, said
):
    def file_of(rank: int) -> Path:
        return Path(f"log/rank-{rank}.txt")

    for rank, begins in said.items():
        found = sentence(verdict, rank, 4, HEARTBEAT, stood_still=away, file_of=file_of)
        assert found.startswith(begins) and (begins or not found), found
    lost = sentence(Verdict(unheard=(1,)), 0, 2, HEARTBEAT, stood_still=0, file_of=file_of)
    assert "and in log/rank-1.txt; the same command" in lost


@pytest.mark.parametrize("mistake", [(), ("--config.heartbeat_seconds=1",), ("--config.no=1",)])
def test_where_the_cluster_knows_the_place_the_config_is_read_before_processes_meet(
    mistake, place, monkeypatch, capsys
):
    """A mistake is told once all have met, for only then it is known who speaks."""
    heard = []
    monkeypatch.setattr(train.joining, "start", lambda *given, **_: heard.append(given))
    monkeypatch.setattr(train, "do_run", lambda _: None)
    words = arguments(place, "auto", heartbeat_seconds=12)
    code = train.main(["train.py", "--processes", "auto", *words, *mistake])
    auto = Place(None, None, None)
    assert heard == [(auto,) if mistake else (auto, 12, place / "auto")]
    assert code == (2 if mistake else 0) and capsys.readouterr().err.count("error") == len(mistake)


@pytest.mark.slow
def test_ranks_with_other_heartbeats_are_refused(place):
    """Else the one that sends fewer would be taken for lost."""
    codes, errors = ranks_of("ranks.py", "unlike", devices=1)
    assert codes == [2, 2], errors
    assert "heartbeat_seconds is 6 on rank 1 and 5 on rank 0: give all the same." in errors[1]
    assert "Ended with rank 1, whose last message has the reason." in errors[0]


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
