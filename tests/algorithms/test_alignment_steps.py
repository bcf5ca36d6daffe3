"""SFT, DPO and a reward model take the steps of a loop in torch, written by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from places import GOLDEN
from safetensors.numpy import load_file, save_file

from rlhf_jax.algorithms.dpo import DPO, DPOOptions
from rlhf_jax.algorithms.reward_model import REWARD_MODEL, RewardModelOptions
from rlhf_jax.algorithms.sft import SFT
from rlhf_jax.config import default
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.transformer import stack
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.learn import learn, trained
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model

RATES = {"sft": 0.3, "dpo": 0.1, "reward_model": 0.1}
STEPS = 4


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "alignment_steps.safetensors")


def batch_of(golden: dict[str, np.ndarray], step: int, sides: int) -> Sequences:
    """The samples of a step: pairs, or the chosen ones alone."""
    count = len(golden["ends"]) // STEPS
    rows = np.arange(count * step, count * (step + 1)).reshape(-1, 2)[:, :sides].ravel()
    tokens = golden["tokens"][rows].astype(np.int32)
    begin, end = golden["ends"][rows].T
    places = np.arange(tokens.shape[1])
    mask = (places >= begin[:, None]) & (places < end[:, None])
    groups = np.repeat(np.arange(len(rows) // sides, dtype=np.int32), sides)
    batch = Sequences(tokens, mask, groups)
    if sides == 1:
        return batch
    signs = np.tile(np.array([1.0, -1.0], np.float32), len(rows) // 2)
    return batch.with_columns(preference=signs)


def after_torch(golden: dict[str, np.ndarray], name: str, folder: Path, place: Path) -> Model:
    """The model of a folder with the changes that the loop made."""
    shutil.copytree(folder, place)
    weights = load_file(folder / "model.safetensors")
    changed = {
        key: np.asarray(jnp.asarray(weight).astype(jnp.float32)) + golden[f"{name}/{key}"]
        for key, weight in weights.items()
    }
    save_file(changed, place / "model.safetensors")
    return huggingface.load(place, jnp.float32)


@pytest.mark.parametrize(
    ("name", "algorithm", "options", "folder"),
    [
        ("sft", SFT, None, "llama_tied"),
        ("dpo", DPO, DPOOptions(beta=0.3), "llama_tied"),
        ("reward_model", REWARD_MODEL, RewardModelOptions(), "llama_reward"),
    ],
)
def test_four_steps_of_sgd_are_those_of_a_loop_in_torch(
    golden, tmp_path, name, algorithm, options, folder
):
    (loss,) = algorithm.losses.values()
    settings = TrainingSettings(microbatch_rows=4, options=options, remat=False)
    learner = Learner("policy", loss, optax.sgd(RATES[name]), settings)
    first = huggingface.load(GOLDEN / folder, jnp.float32)
    reference = huggingface.load(GOLDEN / folder, jnp.float32)
    before = jax.tree.map(np.array, stack(first))
    models = {"policy": trained(first, learner.optimizer)}
    losses = []
    for step in range(STEPS):
        batch = batch_of(golden, step, 1 if name == "sft" else 2)
        if name == "dpo":
            batch = batch.with_columns(reference_logprobs=score_sequences(reference, batch, rows=6))
        batch, _ = algorithm.prepare(batch, default(name))
        models, metrics = learn(models, batch, {"policy": learner}, step=step)
        losses.append(metrics["loss/reward" if name == "reward_model" else "loss/policy"])
    np.testing.assert_allclose(losses, golden[f"{name}/losses"], atol=1e-5)
    wanted = stack(after_torch(golden, name, GOLDEN / folder, tmp_path / "after"))
    found = models["policy"].weights
    squares = [
        np.array([np.sum((np.array(now) - to) ** 2), np.sum((np.array(to) - was) ** 2)])
        for now, to, was in zip(*map(jax.tree.leaves, (found, wanted, before)), strict=True)
    ]
    difference, update = np.sqrt(np.sum(squares, axis=0))
    assert difference < 1e-4 * update
