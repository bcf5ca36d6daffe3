"""The settings of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.losses.aggregate import AGGREGATES, token_mean_weights
from rlhf_jax.losses.kl import KL, kl_k3
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.sequences.packing import Extent


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Say what an update does; static, so a change of it compiles anew."""

    epochs: int = 1
    minibatches: int = 1  # optimizer steps of an epoch
    microbatch_rows: int = 8  # the longest rows whose activations exist at one time
    minibatch_tokens: int = 0  # at most, each prompt once; 0 where nobody knows
    group_tokens: int = 0  # of a group of samples at most; 0 where nobody knows
    prompt_tokens: int = 0  # of a prompt at most; 0 where nobody knows
    temperature: float = 1.0
    options: Any = None  # of the algorithm, which its losses read
    clip_low: float = 0.2
    clip_high: float = 0.2
    critic_clip: float = 0.2  # A value moves at most so far from what it was before the update.
    aggregate: Callable = token_mean_weights  # one of `AGGREGATES`: how tokens are weighed
    max_new_tokens: int = 1  # of the longest response that may be; `constant_weights` divides by it
    # The divergence in the loss: of `KL`, but not k1, whose gradient has mean zero.
    kl_estimator: Callable = kl_k3
    entropy_coefficient: float = 0.0
    # The rest of an update is skipped once KL(old || now) of a minibatch exceeds it; 0 for never.
    target_kl: float = 0.0
    lag: int = 0  # updates that samples are behind: 1 draws the next step's while this one trains
    lag_clip: float = 2.0  # A token's importance weight is at most this, where samples are behind.
    max_skipped: int = 0  # minibatches in a row that may be skipped, as a number is not finite
    layout: Layout = ONE_DEVICE  # its dtype is the products'; weights are kept in float32
    remat: bool = True  # Only each layer's input is kept for the backward pass.
    chunk: int = CHUNK  # tokens whose logits exist at one time
    seed: int = 0

    @property
    def extent(self) -> Extent:
        """Return how much a minibatch has at most."""
        return Extent(
            self.microbatch_rows, self.minibatch_tokens, self.group_tokens, self.prompt_tokens
        )

    @classmethod
    def from_config(cls, config: Config, layout: Layout, remat: bool) -> TrainingSettings:
        """Settle how a model is updated there; `remat` was settled for all that is trained."""
        training = config.training
        return cls(
            epochs=training.epochs,
            minibatches=training.minibatches,
            microbatch_rows=derived.microbatch_rows(config),
            minibatch_tokens=derived.batch_tokens(config, training.minibatches),
            group_tokens=derived.group_tokens(config),
            prompt_tokens=config.data.max_prompt_tokens,
            temperature=config.generation.temperature,
            options=algorithm_of(config).options_of(config),
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            critic_clip=config.critic.clip,
            aggregate=AGGREGATES[derived.aggregate_name(config)],
            max_new_tokens=derived.response_tokens(config),
            kl_estimator=KL[config.kl.estimator],
            entropy_coefficient=training.entropy_coefficient,
            target_kl=training.target_kl,
            lag=training.lag,
            lag_clip=training.lag_clip,
            max_skipped=training.max_skipped,
            layout=layout,
            remat=remat,
            seed=config.seed,
        )
