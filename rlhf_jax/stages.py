"""What a run carries: what never changes, what is never trained, and what the host remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from rlhf_jax.data.iterator import Batches
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.experience import Shaping
from rlhf_jax.generation.engine import Decoding, RoundReport, Sample
from rlhf_jax.generation.rollout import History, Tally
from rlhf_jax.inference.rewards import Answer, Scores
from rlhf_jax.training.update import Optimizers, UpdateConfig
from rlhf_jax.types import Model

Observer = Callable[[str, RoundReport | None], None]  # of (phase, the round that arrived in it)
Reward = Callable[[Sequence[Answer]], tuple[Scores, dict[str, float]]]  # and what to report
Controller = Callable[[float, float, int], float]  # of (KL coefficient, KL of a response, samples): the next one


@dataclasses.dataclass(frozen=True)
class Stages:
    """Everything that stays the same from step to step."""

    decoding: Decoding
    shaping: Shaping
    training: UpdateConfig
    optimizers: Optimizers
    reward: Reward
    controller: Controller
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    dtype: Any  # of generation, inference and the products of training
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    failed: float = 0.0  # the reward of a sample whose scoring failed
    resample: int = 0  # more roll-outs, at most, in place of prompts without signal


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The models that a run does not train."""

    reference: Model | None = None  # None: the policy is its own
    drafter: Model | None = None


@dataclasses.dataclass
class Memory:
    """What the host remembers from step to step: with the `TrainState`, all of a run."""

    batches: Batches
    history: History
    kl_start: float  # the KL coefficient that the config asks for
    kl_coefficient: float  # what it is now
    tally: Tally = dataclasses.field(default_factory=Tally)  # of all roll-outs so far

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and numpy arrays."""
        return {
            "batches": self.batches.state(),
            "history": self.history.state(),
            "kl_start": self.kl_start,
            "kl_coefficient": self.kl_coefficient,
            "tally": dataclasses.asdict(self.tally),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; a KL coefficient that the config has changed since begins anew."""
        self.batches.restore(state["batches"])
        self.history.restore(state["history"])
        if state["kl_start"] == self.kl_start:
            self.kl_coefficient = float(state["kl_coefficient"])
        self.tally = Tally(**state["tally"])

    def remember(self, samples: Iterable[Sample], tally: Tally, kl_coefficient: float) -> None:
        """Take in a finished step."""
        self.history.add(samples)
        self.tally = self.tally + tally
        self.kl_coefficient = kl_coefficient
