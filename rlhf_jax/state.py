"""What a run carries: what never changes, what is never trained, and what the host remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.data.batches import Batches
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.history import History
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig, GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.model.attention import causal
from rlhf_jax.monitoring.trace import Timeline
from rlhf_jax.reallocation import length_model
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.reallocation.planner import ClusterView, Reallocation
from rlhf_jax.rewards.combination import Response, Scores
from rlhf_jax.rewards.models import RewardModel
from rlhf_jax.training.distill import Distillation
from rlhf_jax.training.experience import AdvantageConfig
from rlhf_jax.training.update import Optimizers, UpdateConfig
from rlhf_jax.types import Model, TrainState

KEPT = 0.5  # what the lengths of earlier responses weigh once the policy has moved

Observer = Callable[[str, RoundReport | None], None]  # of (phase, the round that arrived in it)
# scores that answers have already, by the reward's term and their index
Known = Mapping[str, Mapping[int, float]]
# and what to report
Reward = Callable[[Sequence[Response], Known], tuple[Scores, dict[str, float]]]
# of (KL coefficient, KL of a response, samples): the next one
Controller = Callable[[float, float, int], float]


@dataclasses.dataclass(frozen=True)
class Stages:
    """Everything that stays the same from step to step."""

    decoding: GenerationConfig
    shaping: AdvantageConfig
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
    repeated_noise: int = 0  # samples of a prompt, at most, that repeat the noise of earlier ones
    ahead: BackgroundCompiler | None = None  # compiles strategies before they are used
    draft_attend: Callable = causal  # attention of a draft model that reads whole texts
    distillation: Distillation | None = None  # None: there is no student, or it stays as it is
    # where samples run; None: they stay where they are dealt
    plan_reallocation: Callable[[ClusterView], Reallocation] | None = None
    in_turn: bool = False  # slices are served one after the other, so that a run repeats itself
    # terms of the reward, by name
    reward_models: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)
    # seconds, about, in which a slice scores a token; 0: inference begins when all has ended
    scoring: float = 0.0


@dataclasses.dataclass(frozen=True)
class FrozenModels:
    """The models that a run does not train."""

    reference: Model | None = None  # None: the policy is its own
    drafter: Model | None = None
    # as the one that is kept current began: what its learning is measured against
    student: Model | None = None


def drafter_of(state: TrainState, frozen: FrozenModels) -> Model | None:
    """The student of the state, stacked and without embedding and head, else the frozen drafter,
    unrolled.
    """
    return frozen.drafter if state.drafter is None else state.drafter


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """What the roll-outs of a stage leave beside their samples."""

    tally: GenerationCounts
    selector: Selector | None


@dataclasses.dataclass
class SpeculationState:
    """What roll-outs of one kind, training's or evaluation's, leave for later ones."""

    history: History
    selector: Selector | None = None  # None where the strategy is fixed
    tally: GenerationCounts = dataclasses.field(default_factory=GenerationCounts)  # of all so far
    lengths: Lengths = dataclasses.field(default_factory=Lengths)  # the law of responses

    def add(self, samples: Sequence[Sample], learned: RolloutStats) -> None:
        """Take in a finished stage."""
        self.history.add(samples)
        counts = np.array([len(sample.tokens) for sample in samples])
        ended = counts < np.array([sample.request.max_new_tokens for sample in samples])
        self.lengths = length_model.observe(length_model.faded(self.lengths, KEPT), counts, ended)
        self.selector, self.tally = learned.selector, self.tally + learned.tally

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and numpy arrays."""
        selector = {"selector": self.selector.state()} if self.selector else {}
        kept = {"history": self.history.state(), "tally": dataclasses.asdict(self.tally)}
        return kept | {"lengths": length_model.state(self.lengths)} | selector

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; a selector that is new since then begins anew."""
        self.history.restore(state["history"])
        self.tally = GenerationCounts(**state["tally"])
        self.lengths = length_model.restore(state["lengths"]) if "lengths" in state else Lengths()
        if self.selector and "selector" in state:
            self.selector.restore(state["selector"])


@dataclasses.dataclass
class HostState:
    """What the host remembers from step to step: with the `TrainState`, all of a run."""

    batches: Batches
    drafting: SpeculationState
    evaluation: SpeculationState
    kl_start: float  # the KL coefficient that the config asks for
    kl_coefficient: float  # what it is now
    taught: int = 0  # updates of the policy when the drafter last learned from it
    timeline: Timeline = dataclasses.field(default_factory=Timeline)  # of the step that is taken
    # since the last step: with the next one it is remembered
    evaluated: tuple[Sequence[Sample], RolloutStats] | None = None

    def selectors(self) -> list[Selector]:
        """Those that choose strategies: none where the strategy is fixed."""
        return [kind.selector for kind in (self.drafting, self.evaluation) if kind.selector]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and numpy arrays."""
        return {
            "batches": self.batches.state(),
            "drafting": self.drafting.state(),
            "evaluation": self.evaluation.state(),
            "kl_start": self.kl_start,
            "kl_coefficient": self.kl_coefficient,
            "taught": self.taught,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; a KL coefficient that the config has changed since
        begins anew.
        """
        self.batches.restore(state["batches"])
        self.drafting.restore(state["drafting"])
        self.evaluation.restore(state["evaluation"])
        if state["kl_start"] == self.kl_start:
            self.kl_coefficient = float(state["kl_coefficient"])
        self.taught = int(state["taught"])

    def remember(
        self, samples: Sequence[Sample], learned: RolloutStats, kl_coefficient: float
    ) -> None:
        """Take in a finished step."""
        self.drafting.add(samples, learned)
        if self.evaluated is not None:  # until now a resumed run would have evaluated again
            self.evaluation.add(*self.evaluated)
            self.evaluated = None
        self.kl_coefficient = kl_coefficient
