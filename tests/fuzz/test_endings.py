"""Whatever a reward returns or raises, its call ends in results that travel, and names are kept."""

from __future__ import annotations

import asyncio
import math
import posixpath
import re

import endings
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlhf_jax.monitoring import sinks
from rlhf_jax.monitoring.metrics import _event
from rlhf_jax.rewards.children import RewardResults
from rlhf_jax.rewards.combination import Response, Term, as_scores, weighted
from rlhf_jax.rewards.functions import Form, call, call_async, metric_name
from rlhf_jax.runtime import messages

QUICK = hypothesis.settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(hypothesis.HealthCheck.too_slow,),
)
MORE = hypothesis.settings(QUICK, max_examples=5000)
RESPONSES = [Response("p", [], {"prompt": "p"}, text, [1]) for text in "ab"]


def results(form, is_async, value, error):
    """What comes of a call of a function that returns or raises so."""

    def give(**_):
        if error is not None:
            raise error
        return value

    async def give_async(**_):
        return give()

    asked = RESPONSES[: 1 if form is Form.ONE else 2]
    if is_async:
        return asyncio.run(call_async(give_async, form, asked, 60.0))
    return call(give, form, asked)


def check_results(form, is_async, value, error):
    found = results(form, is_async, value, error)
    assert found is not None, "it took no time"
    responses = RESPONSES[: 1 if form is Form.ONE else 2]
    sent = messages.decode(messages.encode(RewardResults(0, found)), "here", RewardResults)
    assert len(sent.results) == len(found) == len(responses)
    reasons = [one for one in found if isinstance(one, str)]
    assert all(one.encode() and "\n" not in one and len(one) < 300 for one in reasons)
    scores, metrics = weighted([Term("f", 1.0, lambda _: as_scores(found))], responses)
    assert all(map(math.isfinite, metrics.values()))
    _event({"step": 0, **metrics})
    if error is not None:
        assert len(scores.failures) == len(responses)
    elif form is Form.ONE and not issubclass(type(value), tuple | dict | np.ndarray):
        right = endings.right(value)
        assert (None if scores.failures else scores.values[0]) == (
            None if right is None else np.float32(right)
        )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("form", Form)
def test_every_ending_is_results_that_travel(form, is_async):
    @QUICK
    @hypothesis.given(endings.VALUES, st.none() | endings.ERRORS)
    def try_one(value, error):
        check_results(form, is_async, value, error)

    try_one()


def read_again(name):
    """The name that was escaped."""
    found = "_x([0-9A-F]{8}|[0-9A-F]{4})_"
    return re.sub(found, lambda one: chr(int(one[1], 16)), name)


def accepted_by_mlflow(name):
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(name)
    validation._validate_length_limit("name", validation.MAX_ENTITY_KEY_LENGTH, name)


def accepted_by_trackio(name):
    reserved = pytest.importorskip("trackio.utils").RESERVED_KEYS
    assert name not in reserved and not name.startswith("__")


def accepted_by_wandb(name):
    assert name.encode() and name not in ("_step", "_timestamp", "_runtime", "_wandb")


# What makes a name fit for a tracker, and what refuses it there: the tracker's own check, if any.
TRACKERS = {
    "wandb": (lambda name: sinks.escaped(name, sinks.REFUSED_BY_WANDB), accepted_by_wandb),
    "trackio": (lambda name: sinks.escaped(name, sinks.REFUSED_BY_TRACKIO), accepted_by_trackio),
    "mlflow": (
        lambda name: sinks.escaped(name, sinks.REFUSED_BY_MLFLOW, sinks.LONGEST_NAME),
        accepted_by_mlflow,
    ),
    "mlflow's files": (
        lambda name: sinks.escaped(f"a/{name}", sinks.REFUSED_BY_FILES, sinks.LONGEST_NAME),
        accepted_by_mlflow,
    ),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_names_are_taken_apart_from_each_other_and_read_again(tracker):
    fit, accept = TRACKERS[tracker]

    @QUICK
    @hypothesis.given(st.sets(endings.NAMES.filter(bool), min_size=1, max_size=6))
    def try_some(names):
        fitting = {name: fit(name) for name in names}
        assert len(set(fitting.values())) == len(names)
        for name, found in fitting.items():
            accept(found)
            cut = tracker.startswith("mlflow") and len(found.encode()) > sinks.LONGEST_NAME - 4
            assert cut or read_again(found) in (name, f"a/{name}")
        if tracker == "mlflow's files":
            folders = {posixpath.dirname(found) for found in fitting.values()}
            assert not folders & set(fitting.values())
            assert all(len(part.encode()) < 256 for one in folders for part in one.split("/"))

    try_some()


@QUICK
@hypothesis.given(st.sets(endings.NAMES, max_size=6))
def test_numbers_have_names_that_hide_nothing(names):
    found = {metric_name(name) for name in names}
    assert len(found) == len({name.encode("utf-8", "backslashreplace") for name in names})
    assert not found & {"mean", "failed", ""}
    assert not any(f"{name}/failed" in found for name in found)


@pytest.mark.long
@pytest.mark.parametrize("form", Form)
def test_more_endings_are_results_that_travel(form):
    @MORE
    @hypothesis.given(endings.VALUES, st.none() | endings.ERRORS, st.booleans())
    def try_one(value, error, is_async):
        check_results(form, is_async, value, error)

    try_one()
