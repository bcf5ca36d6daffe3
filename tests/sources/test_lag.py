"""One step off-policy: samples of the next step are drawn while this one trains."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import runpy
import shutil
import signal
import threading

import jax
import numpy as np
import placed_runs
import pytest
import resuming
import soon
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax import iteration
from rlhf_jax.config import default, schema
from rlhf_jax.config.command_line import read
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.requests import Request, Sample, as_sequences
from rlhf_jax.memory import estimate
from rlhf_jax.placement.presets import plan_of
from rlhf_jax.runtime.background import Abandoned, BackgroundTask
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.session import Session
from rlhf_jax.setup import sample_checks
from rlhf_jax.setup.run_spec import date_of_run, prepare, register_own
from rlhf_jax.sources import rollouts
from rlhf_jax.sources.ahead import RolloutsAhead, samples_ahead
from rlhf_jax.training.prepare import importance_weights, truncated_importance_sampling
from rlhf_jax.types import ModelConfigs

launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


LAGGED = {"plan": "disaggregated", "training__lag": 1, "deterministic": True}
RESUMED = placed_runs.RESUMED | {"training__lag": 1, "generation__resample": 0, "steps": 5}


def experience(sampled: np.ndarray, now: np.ndarray, mask: np.ndarray) -> Sequences:
    samples = [
        Sample(i, Request(np.array([1], np.int32), (i,), 9), [], [2] * len(row), list(row))
        for i, row in enumerate(sampled)
    ]
    drawn = as_sequences(samples, 1 + sampled.shape[1])
    wide = [(0, 0), (1, 0)]
    advantages = np.ones(drawn.mask.shape, np.float32)
    trained = dataclasses.replace(drawn, mask=np.pad(mask, wide))
    return trained.with_columns(logprobs=np.pad(now, wide), advantages=advantages)


def test_weights_are_the_ratio_and_at_most_the_clip():
    sampled = np.log(np.array([[0.5, 0.25, 0.1], [0.2, 0.2, 0.2]], np.float32))
    now = np.log(np.array([[0.1, 0.5, 0.9], [0.2, 0.9, 0.2]], np.float32))
    mask = np.array([[True, True, True], [True, False, True]])
    weights = importance_weights(now, sampled, mask, clip=2.0)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, [[0.2, 2.0, 2.0], [1.0, 1.0, 1.0]], rtol=1e-6)
    weighed, metrics = truncated_importance_sampling(experience(sampled, now, mask), clip=2.5)
    assert weighed.columns["advantages"][:, 1:] == pytest.approx(
        np.where(mask, [[0.2, 2.0, 2.5], [1, 0, 1]], 0)
    )
    ratios = np.array([0.2, 2.0, 9.0, 1.0, 1.0])
    assert metrics == pytest.approx(
        {
            "lag/kl": np.mean(ratios - 1 - np.log(ratios)),
            "lag/weight": np.mean([0.2, 2.0, 2.5, 1.0, 1.0]),
            "lag/truncated": 0.2,
        },
        rel=1e-5,
    )


def test_weights_are_one_where_nothing_moved():
    """Exactly, whatever the log-probs; where masked out, too; and one is no more than a clip of
    one.
    """
    logprobs = np.random.default_rng(0).normal(-3, 2, (4, 7)).astype(np.float32)
    mask = np.random.default_rng(1).random((4, 7)) < 0.7
    for clip in (1.0, 2.0):
        weighed, metrics = truncated_importance_sampling(experience(logprobs, logprobs, mask), clip)
        assert (weighed.columns["advantages"][:, 1:] == mask).all()
        assert metrics == {"lag/kl": 0.0, "lag/weight": 1.0, "lag/truncated": 0.0}


def test_of_no_token_there_is_nothing_to_weigh():
    logprobs = np.zeros((2, 3), np.float32)
    nothing = np.zeros((2, 3), bool)
    weighed, metrics = truncated_importance_sampling(
        experience(logprobs, logprobs - 1, nothing), clip=2.0
    )
    assert metrics == {"lag/kl": 0.0, "lag/weight": 1.0, "lag/truncated": 0.0}
    assert not weighed.columns["advantages"].any()


@pytest.mark.parametrize("top_k", [0, 3])
def test_samples_ahead_are_in_the_checkpoint_as_they_are(top_k):
    draw = np.random.default_rng(2)

    tokens = [np.arange(3, 3 + n, dtype=np.int32) for n in (2, 4, 3)]
    prompts = Prompts(tokens, [""] * 3, [[]] * 3, [{}] * 3, {})

    rows = np.array([2, 0])
    requests = [Request(prompts.tokens[row], (10 * row, 7 + row), 9) for row in rows]
    samples = [
        Sample(
            sample_id,
            request,
            [],
            tokens=draw.integers(0, 99, length).tolist(),
            logprobs=draw.normal(size=length).astype(np.float32).tolist(),
            top_k_ids=list(draw.integers(0, 99, (length, top_k)).astype(np.int32)) if top_k else [],
        )
        for request, lengths in zip(requests, [(3, 1), (9, 4)], strict=True)
        for sample_id, length in zip(request.sample_ids, lengths, strict=True)
    ]
    ahead = SamplesAhead(samples, rows, drawn_at=4, metrics={"generation/tokens": 17.0})
    found = SamplesAhead.restore(ahead.document(), prompts, max_new_tokens=9)
    assert (found.drawn_at, found.metrics) == (4, {"generation/tokens": 17.0})
    pair = (as_sequences(found.samples, 16), as_sequences(samples, 16))
    jax.tree.map(np.testing.assert_array_equal, *pair)
    assert [one.request.id for one in found.samples] == [one.request.id for one in samples]


def test_work_beside_reports_to_the_thread_that_waits():
    heard = []
    begun = threading.Event()

    def work(report):
        report("early")
        begun.set()
        report(threading.current_thread() is not threading.main_thread())
        return "done"

    with BackgroundTask(work, "a test") as beside:
        assert begun.wait(10)
        assert beside.result(heard.append) == "done"
    assert set(heard) <= {True}


def test_work_beside_ends_where_nobody_waits():
    began = threading.Event()
    ended = []

    def work(report):
        began.set()
        try:
            while True:
                report(0)
        except Abandoned:
            ended.append("abandoned")
            raise

    with pytest.raises(KeyError), BackgroundTask(work, "a test"):
        assert began.wait(10)
        raise KeyError("the caller's own")
    assert ended == ["abandoned"]


def test_what_work_beside_raises_is_raised_where_it_is_asked_for():
    def work(report):
        raise OSError("gone")

    with BackgroundTask(work, "a test") as beside:
        with pytest.raises(OSError, match="gone"):
            beside.result(lambda report: None)
        with pytest.raises(OSError, match="gone"):
            beside.check()


# It reads no advantages, which a lag would weigh.
ONLINE_DPO = ROOT / "docs" / "examples" / "new_algorithm.py:ONLINE_DPO"


def lagged(**changes) -> schema.Config:
    config = default()
    changes = {"plan": "disaggregated", "training.lag": 1} | changes
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training__lag": 2}, "training.lag is 2; it must be 0, or 1"),
        ({"training__lag_clip": 0.0}, "training.lag_clip"),
        ({"plan": ""}, "generation has no devices of its own: policy_inference"),
        ({"plan": "colocated"}, "set plan to 'disaggregated', or the lag to 0"),
        ({"plan": "interleaved"}, "policy_training"),
        ({"generation__resample": 1}, "generation.resample waits for the rewards"),
        ({"generation__fuse_inference": True}, "leave fuse_inference out"),
        ({"algorithm__name": "distill"}, "'distill' does not weigh samples of older weights"),
        ({"algorithm__name": f"{ONLINE_DPO}"}, "as it reads no advantages; set it to 0"),
    ],
)
def test_a_lag_that_cannot_be_is_told_in_a_sentence(changes, words):
    config = lagged(**changes)
    register_own(config)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as error:
        sample_checks.check_lag(config, plan_of(config, 8))
    assert "\n" not in str(error.value)


def test_a_lag_that_can_be_is_accepted():
    config = lagged()
    sample_checks.check_lag(config, plan_of(config, 8))


@pytest.fixture
def run(folder, tmp_path) -> placed_runs.Runner:
    tiny_run.make_files(tmp_path)
    return placed_runs.Runner(tmp_path, folder)


def unmeasured(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.endswith(resuming.MEASURED)} for row in rows]


@pytest.mark.slow
def test_samples_are_one_update_behind_and_replayed(run):
    """Two runs are bit-equal; the first step's weights are 1 within rounding; the text of a step is
    what the weights before the last update draw alone.
    """
    changes = LAGGED | {"steps": 4, "checkpoint__every": 1, "checkpoint__keep": 9}
    changes |= {"training__learning_rate": 1e-2}
    metrics, samples = run("one", **changes)
    again, texts = run("two", **changes)
    assert unmeasured(again) == unmeasured(metrics) and texts == samples
    assert [row["lag/updates"] for row in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert metrics[0]["lag/weight"] == pytest.approx(1.0, abs=1e-3)
    assert metrics[0]["lag/kl"] <= 1e-6 < min(row["lag/kl"] for row in metrics[1:])
    assert ["mismatch/kl" in row for row in metrics] == [True, False, False, False]
    assert "lag/waited_seconds" in metrics[0] and "lag/waited_seconds" not in metrics[3]

    # of the weights after the first update, with nothing beside
    workdir = run.place / "one"
    for number in ("2", "3", "4"):
        shutil.rmtree(workdir / "checkpoints" / number)
    config = read(run.command("one", **changes))
    config.data.date = date_of_run(config)
    opened = prepare(config)
    with contextlib.suppress(SystemExit), Session(opened) as session:
        state = session.restore()
        assert state is not None and state.step == 1
        assert samples_ahead(state.host).drawn_at == 0
        asked = session.start(state)
        source = asked.source
        assert isinstance(source, RolloutsAhead)
        drawn = source.prefetch(source.models(state), state.host, lambda report: None)
        drawn = samples_ahead(drawn)
        decode = source.rewards.tokenizer.decode
        alone = [decode(sample.tokens) for sample in drawn.samples]
        raise SystemExit
    assert alone == [row["response"] for row in samples if row["step"] == 2]


@pytest.mark.long
def test_three_quarters_train_as_one_half_does(run):
    """The texts are equal and losses within rounding, samples drawn ahead on the other quarter."""
    changes = LAGGED | {"steps": 3}
    metrics, samples = run("half", **changes)
    path = placed_runs.write_plan(run.place / "plan.json", calls=placed_runs.QUARTERS)
    own, texts = run("quarters", **changes | {"plan": path})
    assert [row["lag/updates"] for row in own] == [0.0, 1.0, 1.0]
    assert [row["response"] for row in texts] == [row["response"] for row in samples]
    for one, other in zip(own, metrics, strict=True):
        for key in (*placed_runs.TRAINED, "lag/weight"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_generation_holds_the_weights_once_as_is_foreseen(run, monkeypatch, lag):
    """Those of a step are gone when the next one's come: its devices then hold nothing else.

    Without a lag they are gone before the update, which others' memory is foreseen for.
    """
    changes = LAGGED | {"steps": 3, "training__lag": lag}
    config = read(run.command("run", **changes))
    place = rollouts.decoding_models
    update = iteration.learn
    left = jax.live_arrays()  # by tests before; held, so that none of them goes meanwhile
    found = []
    devices_of_generation = []

    def measured(train, frozen, layout):
        devices_of_generation[:] = layout.devices.flat
        before = held_by(layout.devices.flat, left)
        models = jax.block_until_ready(place(train, frozen, layout))
        parts = estimate.plan(config, ModelConfigs(models[0].config), {"generation": layout}, True)
        foreseen = next(part.bytes for part in parts if part.name == "policy, for generation")
        found.append((before, held_by(layout.devices.flat, left), foreseen))
        return models

    def updated(*given, **how):
        assert lag or held_by(devices_of_generation, left) == 0
        return update(*given, **how)

    monkeypatch.setattr(rollouts, "decoding_models", measured)
    monkeypatch.setattr(iteration, "learn", updated)
    run("run", **changes)
    assert len(found) == 3
    for before, after, foreseen in found:
        # the head's rows are filled up to whole blocks of the vocabulary, which is small here
        assert before == 0 and foreseen <= after < 1.5 * foreseen, found


def held_by(devices, left) -> int:
    """The bytes of all arrays but those left on the fullest of some devices."""
    numbers = {device.id for device in devices}
    held = dict.fromkeys(numbers, 0)
    others = set(map(id, left))
    for array in jax.live_arrays():
        if id(array) in others:
            continue
        for shard in array.addressable_shards:
            if shard.device.id in numbers:
                held[shard.device.id] += shard.data.nbytes
    return max(held.values())


@pytest.fixture
def whole(place, monkeypatch) -> dict:
    """What an uninterrupted run leaves, with generation on two devices and all else on two."""
    monkeypatch.setattr(resuming, "CHANGES", RESUMED)
    monkeypatch.setitem(resuming.ENVIRONMENT, "XLA_FLAGS", soon.environment(4)["XLA_FLAGS"])
    if not (place / "whole").exists():
        done = resuming.run(place, "whole", "none", -1)
        assert done.returncode == 0, done.stderr
    return resuming.left_by(place / "whole")


def moments(count: int) -> list[tuple[str, int, float]]:
    """Random moments of steps that draw ahead; half come a little later than the event."""
    draw = random.Random(3)
    ends = {"waiting": 4, "training": 16, "inference": 10, "unfinished": 2, "samples": 4}
    kinds = list(ends)
    return [
        (kind, draw.randrange(ends[kind]), draw.choice([0.0, draw.uniform(0.0, 0.05)]))
        for kind in (kinds * count)[:count]
    ]


@pytest.mark.long
@pytest.mark.parametrize("index", range(10))
def test_killed_with_samples_ahead_and_resumed_is_uninterrupted(index, place, whole):
    """Bit for bit."""
    assert [row["lag/updates"] for row in whole["metrics"]] == [0.0, 1.0, 1.0, 1.0, 1.0]
    resuming.kill_and_resume(place, f"moment-{index}", moments(10)[index], whole)


@pytest.mark.long
def test_a_signal_ends_the_run_once_the_samples_beside_are_there(place, whole):
    stopped = resuming.run(place, "stopped", "training:SIGHUP", 7)
    assert stopped.returncode == 128 + signal.SIGHUP, stopped.stderr
    assert "the same command resumes" in stopped.stderr
    written = len(lines(place / "stopped" / "metrics.jsonl"))
    done = resuming.run(place, "stopped", "none", 0)
    assert f"Resuming from step {written}" in done.stdout, done.stderr
    resuming.check_equal(place / "stopped", whole)
