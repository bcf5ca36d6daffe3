"""A rank that dies, stops or is cut off ends the others in one sentence, and nothing is lost."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path

import pytest
from processes import arguments, left_by, ranks_of
from two_ranks import AGAIN, HEARTBEAT, Moment, Proxy, free_port, started

from rlhf_jax.command import train
from rlhf_jax.runtime.jax_internals import Verdict
from rlhf_jax.runtime.joining import Place
from rlhf_jax.runtime.lost_ranks import LOST, sentence

KINDS = ("compiling", "generation", "move", "inference", "training", "saving")
IN_CI = (7,)  # moments


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
