"""How a config asks for drafts: which drafters, which strategies, and what they cost before
anything is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from rlhf_jax.config.schema import Config, ModelConfigs
from rlhf_jax.generation.strategy import candidates, cost, roofline
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.model.transformer import weight_shapes
from rlhf_jax.types import ModelConfig

ADAPTIVE = "adaptive"


def adaptive(config: Config) -> bool:
    """Whether the strategy is chosen round by round."""
    return config.generation.strategy == ADAPTIVE


def strategies(config: Config) -> Candidates:
    """The strategies that may be chosen: one that is named, or all that the run's drafters have."""
    longest = max(1, min(candidates.LONGEST_CHAIN, config.generation.max_new_tokens // 2))
    return candidates.parse(config.generation.strategy, _drafters(config), longest)


def _drafters(config: Config) -> list[str]:
    """Only evaluation and training with repeated noise replay; under rejection, texts depend on the
    drafts.
    """
    repeats = config.evaluation.every or config.generation.repeated_noise
    replay = ["replay"] if repeats and config.generation.acceptance == "replayable" else []
    return ["lookup", *replay, *(["model"] if config.drafter.path or config.drafter.layers else [])]


def uses_drafter(config: Config, drafter: str) -> bool:
    """Whether a strategy that may be chosen drafts by 'lookup', 'replay' or 'model'."""
    return drafter in strategies(config).drafters


def drafts(config: Config) -> bool:
    """Whether a run has a model that drafts, or teaches one."""
    return config.objective == "distill" or uses_drafter(config, "model")


def trains_drafter(config: Config) -> bool:
    """Whether a run has a student that learns."""
    return drafts(config) and config.drafter.layers > 0 and config.drafter.learning_rate > 0


def costs(
    models: ModelConfigs,
    platform: str,
    itemsize: int,
    does: Mapping[str, float],
    rows: int,
    slots: int,
) -> cost.Costs:
    """What rounds are taken to cost before any is measured; weights and cache have `itemsize` bytes
    a number.

    `does` is what the compiler says of a plain round of the policy over so many rows and slots: it
    moves and multiplies more than the weights and the cache that a round cannot do without, and a
    draft model's calls as much more.
    """
    policy = work(models.policy, itemsize)
    moved = does.get("bytes accessed", 0.0) / (
        policy.weight_bytes + rows * slots * policy.context_bytes
    )
    done = does.get("flops", 0.0) / (rows * (policy.token_flops + slots * policy.context_flops))
    scale = functools.partial(scaled, moved=max(moved, 1.0), done=max(done, 1.0))
    drafter = models.drafter and scale(work(models.drafter, itemsize))
    return cost.prior(platform, scale(policy), drafter)


def work(model: ModelConfig, itemsize: int) -> roofline.ModelWork:
    """What a call of a model cannot do without: weights, but for the embedding, are read, and
    multiplied a token.
    """
    layers = sum(math.prod(shape) for shape in vars(weight_shapes(model).layers).values() if shape)
    weights = layers + model.width * model.vocab_size
    context = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    attention = 4 * model.num_layers * model.num_heads * model.head_dim
    return roofline.ModelWork(weights * itemsize, context * itemsize, 2 * weights, attention)


def scaled(needed: roofline.ModelWork, moved: float, done: float) -> roofline.ModelWork:
    """Work whose bytes and flops are so many times what is needed."""
    factors = (moved, moved, done, done)
    return roofline.ModelWork(
        *(
            figure * factor
            for figure, factor in zip(dataclasses.astuple(needed), factors, strict=True)
        )
    )
