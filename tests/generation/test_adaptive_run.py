"""Adaptive drafting in real, tiny runs: noise that training repeats is replayed, and probes cost
next to nothing.
"""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import tiny_run
from places import ROOT
from tiny_run import lines

from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.predict import Choice, Situation
from rlhf_jax.generation.strategy.select import Selector

launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.mark.slow
def test_noise_that_training_repeats_is_replayed(tmp_path, one_device):
    """Eight prompts, four a step: from the third step on two of each one's four samples repeat
    earlier noise.
    """
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    changes = dict(generation__strategy="replay-chain-2", generation__repeated_noise=2, steps=4)
    changes |= dict(evaluation__every=0, training__learning_rate=1e-5)
    assert launch["main"](tiny_run.arguments(tmp_path, model, **changes)) == 0
    first = lines(tmp_path / "run" / "metrics.jsonl")[:2]
    again = lines(tmp_path / "run" / "metrics.jsonl")[2:]
    assert all(step["generation/tokens_per_round"] == 1.0 for step in first)
    # half the samples, three at best
    assert all(1.2 < step["generation/tokens_per_round"] < 2.5 for step in again)
    texts = [
        {
            sample["response"]
            for sample in lines(tmp_path / "run" / "samples.jsonl")
            if sample["step"] == step
        }
        for step in range(4)
    ]
    assert len((texts[0] | texts[1]) & (texts[2] | texts[3])) >= 8


class Counting(Selector):
    """Counts its probes."""

    probes = 0

    def choose(self, situation: Situation) -> Choice:
        choice = super().choose(situation)
        self.probes += choice.reason == "probe"
        return choice


@pytest.mark.slow
def test_probes_of_a_real_stage_cost_no_more_than_one_per_cent(target, drafter):
    """A draft model that nobody has had read a text is known by probes alone."""
    choices = candidates.build(map(trees.parse, ("plain", "lookup-chain-2", "model-chain-2")))
    how = GenerationConfig(
        Sampling(1.0),
        choices.strategies,
        (),
        max_rows=4,
        max_length=64,
        seed=3,
        history=64,
        min_rows=4,
    )
    work = roofline.ModelWork(1e5, 1e3, 1e5, 1e3)
    # by predicted seconds: those measured here are those of whatever else runs
    selector = Counting(choices, cost.prior("cpu", work, work), frozen_costs=True)
    rng = np.random.default_rng(0)
    wanted = [
        Request(rng.integers(0, 300, 8).astype(np.int32), (4 * i, 4 * i + 1), 48) for i in range(12)
    ]
    assert len(list(generate(target, drafter, wanted, how, selector=selector))) == 24
    assert selector.probes > 0
    assert selector.metrics()["strategy/probe_share"] <= 0.01
