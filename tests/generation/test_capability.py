"""Dynamic sampling: prompts that the policy has mastered have fewer or hotter samples."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run

from rlhf_jax import trainer
from rlhf_jax.config import command_line
from rlhf_jax.generation.capability import DynamicSampling, after_visit, capabilities
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.types import ModelConfig

nan = np.nan


def test_capability_is_the_share_of_the_range_that_a_prompt_has_reached():
    rows = np.array([7, 3, 5])
    assert capabilities({}, rows).tolist() == [0.0, 0.0, 0.0]
    rewards = np.array([[1.0, 1.0, nan], [0.0, 1.0, 0.5], [nan, nan, nan]])
    memory = after_visit({}, rows, rewards)
    assert capabilities(memory, rows).tolist() == [1.0, 0.5, 0.0], "5 has no reward yet"
    memory = after_visit(memory, np.array([3, 5]), np.array([[1.0, 1.0], [3.0, -1.0]]))
    # of the range -1 .. 3: 7 as before, 3 halfway from 0.5 to 1, 5 for the first time
    assert capabilities(memory, rows).tolist() == [0.5, 1.75 / 4, 0.5]
    assert after_visit({}, rows, np.full((3, 2), nan)) == {}


def test_samples_and_temperatures_follow_capability():
    shares = DynamicSampling(most=8, fewest=2, temperature=0.7, hottest=1.3)
    known = np.array([0.0, 0.5, 1.0])
    assert shares.samples(known).tolist() == [8, 5, 2]
    np.testing.assert_allclose(shares.temperatures(known), [0.7, 1.0, 1.3])


def test_log_probabilities_are_of_each_samples_own_temperature(tiny: ModelConfig):
    model = init(jax.random.key(0), tiny)
    tokens = np.random.default_rng(0).integers(1, tiny.vocab_size, (4, 16)).astype(np.int32)
    mask = np.arange(16) >= np.array([4, 4, 6, 6])[:, None]
    tokens[1, :4] = tokens[0, :4]
    batch = Sequences(tokens, mask, np.array([0, 0, 1, 2], np.int32))
    warm = np.array([0.5, 1.0, 1.3, 2.0], np.float32)
    own = batch.with_columns(temperatures=np.broadcast_to(warm[:, None], mask.shape))
    found = score_sequences(model, own, rows=2, temperature=0.9)
    for row, temperature in enumerate(warm.tolist()):
        alone = score_sequences(model, batch, rows=2, temperature=temperature)
        np.testing.assert_allclose(found[row], alone[row], atol=1e-5)


@pytest.mark.slow
def test_a_run_draws_fewer_samples_of_what_it_has_mastered(tmp_path, one_device):
    tiny_run.make_files(tmp_path)
    model = tiny_run.make_model(tmp_path / "tiny")
    (tmp_path / "reward.py").write_text(
        "def vowels(prompt, response, row):\n"
        "    return float(row['prompt'] in ('Say a', 'Say b'))\n"
    )
    config = command_line.read(
        tiny_run.arguments(
            tmp_path,
            model,
            steps=4,
            evaluation__every=0,
            generation__fewest_samples=2,
            generation__hottest=1.5,
        )
    )
    trainer.do_run(config)
    steps = tiny_run.lines(Path(config.workdir) / "metrics.jsonl")
    assert [step["capability/mean"] for step in steps[:1]] == [0.0]
    assert steps[-1]["capability/mean"] > 0
    # sampled and recomputed log-probabilities are of one law
    assert max(step["mismatch/max"] for step in steps) < 1e-3
    samples = tiny_run.lines(Path(config.workdir) / "samples.jsonl")
    counts = {
        prompt: [
            sum(row["prompt"] == prompt and row["step"] == step for row in samples)
            for step in range(4)
        ]
        for prompt in ("Say a", "Say h")
    }
    assert set(counts["Say a"]) - {0} == {4, 2}, json.dumps(counts)
    assert set(counts["Say h"]) - {0} == {4}
