"""What a run carries from step to step: what is trained, what the host remembers, what is fixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.config.objectives import Objective
from rlhf_jax.config.schema import Config
from rlhf_jax.data.batches import PromptStream
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.history import History
from rlhf_jax.generation.requests import GenerationConfig, GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.model.decoding import decoding_weights, student_for
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.placement.lanes import ONE_LANE, Lanes
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.placement.transfer import bytes_moved
from rlhf_jax.reallocation import length_model
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.rewards.combination import Scorer
from rlhf_jax.rewards.samples import Rewards
from rlhf_jax.training.distill import Distillation
from rlhf_jax.training.experience import AdvantageConfig
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, Models

# What the lengths of earlier responses weigh once the policy has moved, as a factor.
KEPT_LENGTHS = 0.5

# Beyond all ids that a run of an earlier version used, whose checkpoints do not say.
UNUSED_ID = 1 << 31

# of (phase, the round that arrived in it, or None where the phase begins or goes on)
Observer = Callable[[str, RoundReport | PhaseParts | None], None]


def ignore(phase: str, report: RoundReport | PhaseParts | None) -> None:
    """Observe nothing."""


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """Hold what the roll-outs of a stage leave beside their samples."""

    counts: GenerationCounts
    # as the next stage begins with it; None where the strategy is fixed
    selector: Selector | None


@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """Hold what roll-outs of one kind, training's or evaluation's, leave for later ones."""

    history: History
    selector: Selector | None = None
    # of all roll-outs so far
    counts: GenerationCounts = dataclasses.field(default_factory=GenerationCounts)
    # how long responses are
    lengths: Lengths = dataclasses.field(default_factory=Lengths)

    def after(self, samples: Sequence[Sample], stats: RolloutStats) -> SpeculationState:
        """Return the state after a finished stage."""
        tokens = np.array([len(sample.tokens) for sample in samples])
        ended = tokens < np.array([sample.request.max_new_tokens for sample in samples])
        faded = length_model.faded(self.lengths, KEPT_LENGTHS)
        return SpeculationState(
            history=self.history.with_samples(samples),
            selector=stats.selector,
            counts=self.counts + stats.counts,
            lengths=length_model.observe(faded, tokens, ended),
        )

    def document(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: JSON values and numpy arrays."""
        kept = {
            "history": self.history.state(),
            "tally": dataclasses.asdict(self.counts),
            "lengths": length_model.state(self.lengths),
        }
        return kept | ({"selector": self.selector.state()} if self.selector else {})

    def restored(self, document: dict[str, Any]) -> SpeculationState:
        """Return the state that `document` was made of; a selector that is new begins anew."""
        self.history.restore(document["history"])
        if self.selector and "selector" in document:
            self.selector.restore(document["selector"])
        lengths = length_model.restore(document["lengths"]) if "lengths" in document else Lengths()
        counts = GenerationCounts(**document["tally"])
        return dataclasses.replace(self, counts=counts, lengths=lengths)


@dataclasses.dataclass(frozen=True)
class HostState:
    """Hold what the host remembers: with the models that are trained, all of a run."""

    # updates that were made
    step: int
    # in the order of the prompts, as `Batches.state` gives it
    position: dict[str, int]
    training: SpeculationState
    evaluation: SpeculationState
    # the KL coefficient that the config asks for, and what it is now
    kl_start: float
    kl_coefficient: float
    # of the next sample: beyond all that were used
    next_id: int = 0
    # minibatches that were skipped, the last ones, as a number was not finite
    skipped: int = 0
    # updates of the policy when the drafter last learned from it
    distilled_at: int = 0
    # whether the backward pass computes layers again, and the devices that this was chosen for:
    # none where the config says it
    remat: bool = True
    remat_devices: str = ""
    # the plan of calls, and whether the step before had another one
    plan: str | None = None
    plan_changed: bool = False
    # of an evaluation since the last step: remembered with the next step, as a run that is
    # resumed before it evaluates again
    evaluated: tuple[Sequence[Sample], RolloutStats] | None = None
    # what the next step trains on, where that is drawn ahead
    ahead: SamplesAhead | None = None
    # by call, what stages of pipelines take, as this process has measured it; not kept
    stage_times: Mapping[str, StageTimes] | None = None

    def selectors(self) -> list[Selector]:
        """Return those that choose strategies: none where the strategy is fixed."""
        return [kind.selector for kind in (self.training, self.evaluation) if kind.selector]

    def with_selectors(self, selectors: Sequence[Selector]) -> HostState:
        """Return the state with others in place of `selectors()`, in the same order."""
        if not selectors:
            return self
        training, evaluation = selectors
        return dataclasses.replace(
            self,
            training=dataclasses.replace(self.training, selector=training),
            evaluation=dataclasses.replace(self.evaluation, selector=evaluation),
        )

    def after_rollout(
        self, samples: Sequence[Sample], stats: RolloutStats, position: dict[str, int], next_id: int
    ) -> HostState:
        """Return the state after a finished roll-out, from which nothing is learned yet."""
        evaluation = self.evaluation
        return dataclasses.replace(
            self,
            position=position,
            training=self.training.after(samples, stats),
            evaluation=evaluation.after(*self.evaluated) if self.evaluated else evaluation,
            next_id=next_id,
            plan_changed=False,
            evaluated=None,
        )

    def document(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: JSON values and numpy arrays."""
        return {
            "batches": self.position,
            "drafting": self.training.document(),
            "evaluation": self.evaluation.document(),
            "kl_start": self.kl_start,
            "kl_coefficient": self.kl_coefficient,
            "next_id": self.next_id,
            "skipped": self.skipped,
            "taught": self.distilled_at,
            "remat": self.remat,
            "remat_devices": self.remat_devices,
            "plan": self.plan,
        } | ({"ahead": self.ahead.document()} if self.ahead else {})

    def restored(self, step: int, document: dict[str, Any]) -> HostState:
        """Return the state after so many updates that `document` was made of.

        A KL coefficient that the config has changed since begins anew. What was chosen for the same
        devices stays, so that rounding does.
        """
        as_before = document["kl_start"] == self.kl_start
        chosen = self.remat_devices and document.get("remat_devices") == self.remat_devices
        return HostState(
            step=step,
            position=document["batches"],
            training=self.training.restored(document["drafting"]),
            evaluation=self.evaluation.restored(document["evaluation"]),
            kl_start=self.kl_start,
            kl_coefficient=float(document["kl_coefficient"]) if as_before else self.kl_coefficient,
            next_id=int(document.get("next_id", UNUSED_ID)),
            skipped=int(document.get("skipped", 0)),
            distilled_at=int(document["taught"]),
            remat=document["remat"] if chosen else self.remat,
            remat_devices=self.remat_devices,
            plan=self.plan,
            plan_changed=document.get("plan") != self.plan,
        )


class RunState(NamedTuple):
    """Hold all of a run that changes: what devices hold and what the host remembers."""

    models: Models
    host: HostState

    @property
    def step(self) -> int:
        """Count the updates that were made."""
        return self.host.step


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Hold what there is to tell of a finished step."""

    # by the names of metrics.jsonl
    metrics: dict[str, float]
    # one row a sample: prompt, response and reward
    samples: list[dict[str, Any]]
    # what each slice and call did and when, in seconds since the step began
    spans: list[Span]
    # one row for each strategy at each number of live rows
    strategies: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Say how the policy is measured on held-out prompts."""

    prompts: Prompts
    # of noise of its own
    decoding: GenerationConfig
    samples_per_prompt: int
    # by name; the first one stands in the table of samples
    measures: Mapping[str, Scorer]


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold what stays the same from step to step: settings of each stage, data, frozen models."""

    config: Config
    objective: Objective
    prompts: PromptStream
    generation: GenerationSettings
    rewards: Rewards
    scoring: ScoringSettings
    advantage: AdvantageConfig
    training: TrainingSettings
    # by role: what is trained on the samples of a step, in the order in which gradients are taken
    learners: Mapping[str, Learner]
    # by role, the models that are not trained: the "reference" that KL is measured from, a
    # "drafter", and the "student" that is kept current, as it began
    frozen: Mapping[str, Model]
    # of (KL coefficient, KL of a response, samples): the next coefficient
    next_kl_coefficient: Callable[[float, float, int], float]
    # where a timeline shows what each call does
    lanes: Lanes = ONE_LANE
    # None: there is no student, or it stays as it is
    distillation: Distillation | None = None
    # None: there are no held-out prompts
    evaluation: EvaluationSettings | None = None


def decoding_models(models: Models, run: Run) -> tuple[Model, Model | None]:
    """Return policy and drafter as generation wants them: unrolled, cast, laid out.

    The drafter is the student that is trained, with the policy's embedding and head, else the
    frozen drafter.
    """
    target = decoding_weights(models["policy"].weights, run.generation.layout)
    drafter = models["drafter"].weights if "drafter" in models else run.frozen.get("drafter")
    return target, student_for(target, drafter, run.generation.layout)


def scorers(models: Models, run: Run) -> dict[str, Model]:
    """Return the models that score, by role."""
    there = {**run.frozen, **{role: one.weights for role, one in models.items()}}
    return {role: there[role] for role in run.scoring.layouts}


def weights_received(models: Models, run: Run) -> dict[str, float]:
    """Count the 10^6 bytes that devices receive from others as weights come to other calls."""
    moved = {"generation": ("policy", run.generation.layout)}
    moved |= {f"{role}_inference": (role, own) for role, own in run.scoring.layouts.items()}
    return {
        f"weights/{call}": bytes_moved(models[role].weights, layout, layout.dtype).received / 1e6
        for call, (role, layout) in moved.items()
        if layout.mesh is not None and role in models
    }
