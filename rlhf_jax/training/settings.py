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
    """Hold the settings of an update; static, so a change recompiles."""

    epochs: int = 1
    minibatches: int = 1  # optimizer steps of an epoch
    microbatch_rows: int = 8  # the longest rows whose activations exist at a time
    minibatch_tokens: int = 0  # at most, each prompt once; 0 if unknown
    group_tokens: int = 0  # most of a group of samples; 0 if unknown
    prompt_tokens: int = 0  # most of a prompt; 0 if unknown
    temperature: float = 1.0
    options: Any = None  # of the algorithm, which its losses read
    clip_low: float = 0.2
    clip_high: float = 0.2
    critic_clip: float = 0.2  # The largest change of a value from its value before the update.
    aggregate: Callable = token_mean_weights  # one of `AGGREGATES`: the weights of tokens
    max_new_tokens: int = 1  # of the longest possible response; `constant_weights` divides by it
    # The divergence in the loss: of `KL`, but not k1, whose gradient has mean zero.
    kl_estimator: Callable = kl_k3
    entropy_coefficient: float = 0.0
    # The rest of an update is skipped once KL(old || now) of a minibatch exceeds it; 0 for never.
    target_kl: float = 0.0
    lag: int = 0  # off-policy steps: 1 generates the next step's samples during training
    lag_clip: float = 2.0  # The largest importance weight of a token, with a lag.
    max_skipped: int = 0  # consecutive minibatches that may be skipped for a non-finite number
    layout: Layout = ONE_DEVICE  # its dtype is that of matrix products; weights are kept in float32
    remat: bool = True  # Only each layer's input is kept for the backward pass.
    chunk: int = CHUNK  # tokens whose logits exist at a time
    seed: int = 0

    @property
    def extent(self) -> Extent:
        """Return the maximum size of a minibatch."""
        return Extent(
            self.microbatch_rows, self.minibatch_tokens, self.group_tokens, self.prompt_tokens
        )

    @classmethod
    def from_config(cls, config: Config, layout: Layout, remat: bool) -> TrainingSettings:
        """Build the settings of a model's updates; `remat` was decided for all trained models."""
        training = config.training
        return cls(
            epochs=training.epochs,
            minibatches=training.minibatches,
            microbatch_rows=derived.microbatch_rows(config),
            minibatch_tokens=derived.batch_tokens(config, training.minibatches),
            group_tokens=derived.group_tokens(config),
            prompt_tokens=config.data.max_prompt_tokens,
            temperature=derived.temperature(config),
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
