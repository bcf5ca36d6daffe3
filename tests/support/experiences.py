"""Random experience to learn from, the settings of an update, and a critic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from learning import sequences_of

from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.setup.models import critic_of
from rlhf_jax.training.settings import TrainingSettings

# One size holds eight rows of 30 tokens, so that tests share their programs.
CONFIG = TrainingSettings(microbatch_rows=8, chunk=32, max_new_tokens=26)
MANY = dataclasses.replace(
    CONFIG, epochs=2, minibatches=2, microbatch_rows=2, critic_clip=10.0, target_kl=1e6
)
KL_WEIGHT = 0.1


def random_support(tokens, mask, rng):
    """Six ids at each response token, its own among them."""
    ids = np.argsort(rng.random((*tokens.shape, 64)), axis=-1)[..., :6]
    ids[..., 0] = tokens
    return np.where(mask[..., None], ids, -1).astype(np.int32)


def random_experience(
    model, critic=None, rows=8, slots=30, seed=0, longest=None, top_k=False
) -> Sequences:
    """Rows of 8 tokens up to `longest`, scored under `model` and `critic`; the reference differs a
    little.
    """
    rng = np.random.default_rng(seed)
    length = rng.integers(8, (longest or slots) + 1, rows).astype(np.int32)
    length[0] = longest or slots
    at = np.arange(slots)[None]
    mask = (at >= 4) & (at < length[:, None])
    tokens = np.where(at < length[:, None], rng.integers(0, 64, (rows, slots)), 0).astype(np.int32)
    zeros = np.zeros((rows, slots), np.float32)
    top_k_ids = random_support(tokens, mask, rng) if top_k else None
    batch = sequences_of(tokens, mask, sampled_logprobs=zeros, top_k_ids=top_k_ids)
    logprobs = score_sequences(model, batch, rows=rows)
    reference = np.where(mask, logprobs + rng.normal(scale=0.2, size=mask.shape), 0.0).astype(
        np.float32
    )
    advantages = np.where(mask, rng.normal(size=(rows, 1)), 0.0).astype(np.float32)
    columns = {
        "logprobs": logprobs,
        "reference_logprobs": reference,
        "rewards": np.zeros(rows, np.float32),
        "advantages": advantages,
    }
    if critic is not None:
        columns["values"] = score_sequences(critic, batch, rows=rows)
        returns = np.where(mask, rng.normal(size=(rows, 1)), 0.0)
        columns["returns"] = returns.astype(np.float32)
    return jax.tree.map(jnp.asarray, batch.with_columns(**columns))


def random_critic(config):
    """A critic whose head is not of zeros."""
    critic = critic_of(init(jax.random.key(5), config))
    return dataclasses.replace(
        critic, head=jax.random.normal(jax.random.key(6), (config.width, 1)) / 6
    )
