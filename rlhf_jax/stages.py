"""What a run carries: what never changes, what is never trained, and what the host remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.data.iterator import Batches
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.experience import Shaping
from rlhf_jax.generation.programs import Ahead
from rlhf_jax.generation.rollout import History, Tally
from rlhf_jax.generation.samples import Decoding, RoundReport, Sample
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.reward_model import RewardModel
from rlhf_jax.inference.rewards import Answer, Scores
from rlhf_jax.model.attention import causal
from rlhf_jax.reallocation import lengths
from rlhf_jax.reallocation.lengths import Lengths
from rlhf_jax.reallocation.plan import Plan, View
from rlhf_jax.timeline import Timeline
from rlhf_jax.training.distill import Distillation
from rlhf_jax.training.update import Optimizers, UpdateConfig
from rlhf_jax.types import Model, TrainState

KEPT = 0.5  # what the lengths of earlier responses weigh once the policy has moved

Observer = Callable[[str, RoundReport | None], None]  # of (phase, the round that arrived in it)
# scores that answers have already, by the reward's term and their index
Known = Mapping[str, Mapping[int, float]]
Reward = Callable[[Sequence[Answer], Known], tuple[Scores, dict[str, float]]]  # and what to report
# of (KL coefficient, KL of a response, samples): the next one
Controller = Callable[[float, float, int], float]


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
    repeated_noise: int = 0  # samples of a prompt, at most, that repeat the noise of earlier ones
    ahead: Ahead | None = None  # compiles strategies before they are used
    draft_attend: Callable = causal  # attention of a draft model that reads whole texts
    distillation: Distillation | None = None  # None: there is no student, or it stays as it is
    # where samples run; None: they stay where they are dealt
    decide: Callable[[View], Plan] | None = None
    in_turn: bool = False  # slices are served one after the other, so that a run repeats itself
    # terms of the reward, by name
    reward_models: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)
    # seconds, about, in which a slice scores a token; 0: inference begins when all has ended
    scoring: float = 0.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The models that a run does not train."""

    reference: Model | None = None  # None: the policy is its own
    drafter: Model | None = None
    # as the one that is kept current began: what its learning is measured against
    student: Model | None = None


def drafter_of(state: TrainState, frozen: Frozen) -> Model | None:
    """The student of the state, stacked and without embedding and head, else the frozen drafter,
    unrolled.
    """
    return frozen.drafter if state.drafter is None else state.drafter


@dataclasses.dataclass(frozen=True)
class Learned:
    """What the roll-outs of a stage leave beside their samples."""

    tally: Tally
    selector: Selector | None


@dataclasses.dataclass
class Drafting:
    """What roll-outs of one kind, training's or evaluation's, leave for later ones."""

    history: History
    selector: Selector | None = None  # None where the strategy is fixed
    tally: Tally = dataclasses.field(default_factory=Tally)  # of all so far
    lengths: Lengths = dataclasses.field(default_factory=Lengths)  # the law of responses

    def add(self, samples: Sequence[Sample], learned: Learned) -> None:
        """Take in a finished stage."""
        self.history.add(samples)
        counts = np.array([len(sample.tokens) for sample in samples])
        ended = counts < np.array([sample.request.max_new_tokens for sample in samples])
        self.lengths = lengths.observe(lengths.faded(self.lengths, KEPT), counts, ended)
        self.selector, self.tally = learned.selector, self.tally + learned.tally

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and numpy arrays."""
        selector = {"selector": self.selector.state()} if self.selector else {}
        kept = {"history": self.history.state(), "tally": dataclasses.asdict(self.tally)}
        return kept | {"lengths": lengths.state(self.lengths)} | selector

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; a selector that is new since then begins anew."""
        self.history.restore(state["history"])
        self.tally = Tally(**state["tally"])
        self.lengths = lengths.restore(state["lengths"]) if "lengths" in state else Lengths()
        if self.selector and "selector" in state:
            self.selector.restore(state["selector"])


@dataclasses.dataclass
class Memory:
    """What the host remembers from step to step: with the `TrainState`, all of a run."""

    batches: Batches
    drafting: Drafting
    evaluation: Drafting
    kl_start: float  # the KL coefficient that the config asks for
    kl_coefficient: float  # what it is now
    taught: int = 0  # updates of the policy when the drafter last learned from it
    timeline: Timeline = dataclasses.field(default_factory=Timeline)  # of the step that is taken
    # since the last step: with the next one it is remembered
    evaluated: tuple[Sequence[Sample], Learned] | None = None

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

    def remember(self, samples: Sequence[Sample], learned: Learned, kl_coefficient: float) -> None:
        """Take in a finished step."""
        self.drafting.add(samples, learned)
        if self.evaluated is not None:  # until now a resumed run would have evaluated again
            self.evaluation.add(*self.evaluated)
            self.evaluated = None
        self.kl_coefficient = kl_coefficient
