"""A call of a reward fails alone, with its reason, however it ends: in processes and threads."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest
import reward_endings as endings

from rlhf_jax.config import default
from rlhf_jax.rewards import children, sources, workers
from rlhf_jax.rewards.children import ProcessChild, start_thread
from rlhf_jax.rewards.combination import Response, Score, Term, as_scores, load_reward, weighted
from rlhf_jax.rewards.workers import Workers

FILE = Path(endings.__file__)
DEATHS = {
    "death": "ended its process with exit code 3",
    "a crash": "ended its process with signal SIGSEGV",
}
EXITS = "exits in a task of its own"
OWN_TASKS = {EXITS: "", "cancels itself": "raised CancelledError: "}
PLACES = [(place, name) for place in ("process", "thread") for name in ("ended", "ended_async")]


def responses(*texts, prompt="p", group=1):
    return [
        Response(prompt, [], {"prompt": prompt}, text, [1], index // group)
        for index, text in enumerate(texts)
    ]


@contextlib.contextmanager
def opened(place, name, seconds=20.0, observe=lambda: None, **settings):
    """The pool of a reward of the file of endings, which has worked."""
    if place == "thread":
        settings["start"] = lambda spec: start_thread(spec, getattr(endings, name))
    with Workers(f"{FILE}:{name}", 1, seconds, observe, 8, **settings) as pool:
        yield pool


def check(scores, rights):
    """Each response has its right score, or its reason."""
    wrong = {}
    for index, (name, right) in enumerate(rights):
        found = scores.failures.get(index, scores.values[index])
        fits = found.startswith(right) if isinstance(right, str) else found == pytest.approx(right)
        if not fits or "\n" in str(found):
            wrong[name] = (found, right)
    assert not wrong


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_every_value_and_every_error_fails_alone(place, name, capfd):
    with opened(place, name) as pool:
        scores = pool(responses(*endings.ENDINGS, "fine"))
        check(scores, [*endings.ENDINGS.items(), ("fine", 1.0)])
        (child,) = pool._children
        assert not child.gone() and pool(responses("fine")).values == [1.0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("place", ["process", "thread"])
def test_every_value_of_several_responses_fails_alone(place):
    with opened(place, "ended_group") as pool:
        for name, (_, rights) in endings.GROUPS.items():
            pool._works = True
            scores = pool(responses("a", "b", prompt=name, group=2))
            check(scores, [(name, right) for right in rights])


# A thread that keeps the interpreter to itself for ever cannot be left: the run stands still.
NEVER = {
    ("process", "ended"): [["never"], ["never, under the lock"]],
    ("thread", "ended"): [["never"]],
    **{
        (place, "ended_async"): [
            ["never", "never, and not to be cancelled"],
            ["never, in the loop"],
        ]
        for place in ("process", "thread")
    },
}


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_call_that_never_returns_is_late_and_no_other_is(place, name, monkeypatch):
    monkeypatch.setattr(workers, "GRACE", 0.1)
    monkeypatch.setattr(children, "LEAVE_SECONDS", 0.05)
    for late in NEVER[place, name]:
        with opened(place, name, 0.3) as pool:
            pool(responses("fine"))
            scores = pool(responses(*late, "fine", "a time-out of its own", "fine"))
            assert scores.failures == {
                **dict.fromkeys(range(len(late)), "took longer than 0.3 s"),
                len(late) + 1: "raised TimeoutError: ",
            }
            assert pool(responses("fine")).values == [1.0]


@pytest.mark.parametrize("place", ["process", "thread"])
def test_time_outs_of_its_own_are_no_hang(place):
    with opened(place, "ended_async") as pool:
        names = ["a time-out of its own"] * (2 * workers.HANGS)
        scores = pool(responses(*names, "fine"))
        assert len(scores.failures) == len(names) and scores.values[-1] == 1.0


@pytest.mark.parametrize(
    ("place", "name", "reasons"),
    [
        ("process", "ended", DEATHS),
        ("process", "ended_async", {**DEATHS, **OWN_TASKS, EXITS: "exit code 5"}),
        ("thread", "ended_async", {**OWN_TASKS, EXITS: "ended its event loop"}),
    ],
)
def test_an_end_of_all_calls_fails_the_one_that_brought_it_about(place, name, reasons):
    with opened(place, name) as pool:
        scores = pool(responses("fine", *reasons, "fine"))
    assert list(scores.failures) == [*range(1, len(reasons) + 1)]
    for found, reason in zip(scores.failures.values(), reasons.values(), strict=True):
        assert reason in found


def test_ctrl_c_in_a_call_is_a_failure_and_between_calls_nothing(capfd):
    with opened("process", "ended") as pool:
        scores = pool(responses("fine", "interrupted"))
        assert scores.failures == {1: "raised KeyboardInterrupt: "}
        (child,) = pool._children
        assert isinstance(child, ProcessChild)
        for _ in range(3):
            child.process.send_signal(endings.signal.SIGINT)
            time.sleep(0.05)
        assert pool(responses("fine")).values == [1.0] and pool._children == [child]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("place", "name"), PLACES[::3])
def test_a_silence_without_a_limit_is_told_and_may_be_stopped(place, name, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE", 0.05)
    told = []

    def observe():
        if any("stands still" in str(one.message) for one in told):
            raise InterruptedError

    with (
        opened(place, name, math.inf, observe, silence=0.1) as pool,
        warnings.catch_warnings(record=True) as caught,
    ):
        pool(responses("fine"))  # a process may take its time to start, and that is told as well
        told = caught
        told.clear()
        with pytest.raises(InterruptedError):
            pool(responses("never"))
    assert f"reward {FILE}:{name} stands still: nothing has happened" in str(told[-1].message)


def test_a_thread_that_is_left_to_itself_holds_up_nothing():
    before = set(threading.enumerate())
    began = time.monotonic()
    with opened("thread", "ended", 0.2) as pool:
        pool(responses("fine"))
        assert pool(responses("never")).failures == {0: "took longer than 0.2 s"}
    assert time.monotonic() - began < 5
    left = set(threading.enumerate()) - before
    assert [(one.name, one.daemon) for one in left] == [(f"reward {FILE}:ended", True)]


def test_scalars_of_jax_are_scores():
    values = {"a": jnp.float32(0.5), "b": jnp.asarray(2, jnp.int32), "c": jnp.ones(1)}
    spec = sources.offer(lambda response: values[response], "jax")
    with sources.CALLERS.open(spec, default(), lambda: None) as pool:
        scores = pool(responses(*values))
    check(scores, [("a", 0.5), ("b", 2.0), ("c", endings.of_type("ArrayImpl"))])


def test_the_packages_own_rewards_work_in_a_thread():
    pytest.importorskip("math_verify")
    spec = sources.offer(load_reward("math_verify"), "math_verify")
    row = {"answer": "\\frac{1}{2}"}
    asked = [Response("p", [], row, text) for text in ("It is $0.5$", "$\\frac{2}{4}$", "3.")]
    with sources.CALLERS.open(spec, default(), lambda: None) as pool:
        scores = pool(asked)
    assert not scores.failures and scores.values.tolist() == [1, 1, 0]


NUMBERS = """
import math

def pairs(response):
    return 1.0, {"mean": 5.0, "failed": 7, "own/x": 1, "": 2, "a/failed": 3, 4: 4}

def logs(completions, log_metric, **kwargs):
    log_metric("mean", 5.0)
    log_metric("failed", 7)
    log_metric("twice", 1.0)
    log_metric("twice", 3.0)
    log_metric("none", None)
    return [math.nan, 1.0, 1.0]

def half(response):
    return 1.0, {"length": {"a": 2.0, "b": math.nan, "c": 10**400}[response], "none": "x"}
"""
MEANS = {
    "pairs": {
        **{"mean": 1.0, "failed": 0.0, "4": 4.0},
        **{"own/mean": 5.0, "own/failed": 7.0, "own/own/x": 1.0, "own/": 2.0, "own/a/failed": 3.0},
    },
    "logs": {
        **{"mean": 1.0, "failed": 1.0, "own/mean": 5.0, "own/failed": 7.0},
        **{"twice": 2.0, "none/failed": 1.0},
    },
    "half": {"mean": 1.0, "failed": 0.0, "length": 2.0, "length/failed": 2.0, "none/failed": 3.0},
}


@pytest.mark.parametrize("name", MEANS)
def test_numbers_beside_a_reward_hide_nothing_and_fail_alone(name, tmp_path):
    (tmp_path / "own.py").write_text(NUMBERS)
    with Workers(f"{tmp_path}/own.py:{name}", 1, 20.0) as pool:
        _, metrics = weighted([Term("f", 1.0, pool)], responses("a", "b", "c"))
    assert metrics == {f"reward/f/{key}": mean for key, mean in MEANS[name].items()}


def test_more_results_than_a_message_holds_are_reasons(tmp_path):
    (tmp_path / "much.py").write_text(
        "def much(response):\n    return 1.0, {response + str(i): 1.0 for i in range(80_000)}\n"
        "def many(completions, **_):\n    raise ValueError('x' * 199)\n"
    )
    with Workers(f"{tmp_path}/much.py:much", 1, 20.0) as pool:
        pool._works = True
        assert pool(responses("a")).failures[0].startswith("gave too much: A message of")
    with Workers(f"{tmp_path}/much.py:many", 1, 20.0) as pool:
        pool._works = True
        assert len(pool(responses(*["a"] * 9000)).failures) == 9000


def test_a_loop_that_is_blocked_blocks_nobody_who_sends_it_a_large_call(monkeypatch):
    monkeypatch.setattr(children, "PAUSE", 1)
    monkeypatch.setattr(workers, "GRACE", 0.1)
    with opened("thread", "ended_async", 0.3) as pool:
        pool(responses("fine"))
        scores = pool(responses("never, in the loop", *["x" * 1_000_000] * 3))
    assert scores.failures == {0: "took longer than 0.3 s"}


@pytest.mark.parametrize("place", ["process", "thread"])
def test_a_call_that_cannot_be_sent_fails_alone(place, monkeypatch):
    monkeypatch.setattr(children, "LARGEST_CALL", 10_000)
    with opened(place, "ended") as pool:
        scores = pool(responses("fine", "x" * 10_000, "fine"))
        assert list(pool(responses("x" * 10_000)).failures) == [0]
    assert list(scores.failures) == [1]
    assert scores.failures[1].startswith("could not be reached (A message of 10,")


def test_means_of_the_largest_rewards_are_finite():
    """The sum of two of them is beyond float32; the mean, by hand, is the number itself."""
    largest = 3.4028234663852886e38
    terms = [Term("f", 1.0, lambda _: as_scores([Score(largest, {"x": largest})] * 4))]
    _, metrics = weighted(terms, responses(*"abcd"))
    assert metrics["reward/f/mean"] == metrics["reward/f/x"] == largest
