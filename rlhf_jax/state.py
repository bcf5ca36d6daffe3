"""The state of a run from step to step: the trained models, and the host state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.history import History
from rlhf_jax.generation.reallocation import forecasts
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts, PromptLengths
from rlhf_jax.generation.requests import GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.types import Memory, Models

# The factor on the weight of earlier response lengths after each policy update.
KEPT_LENGTHS = 0.5

# Beyond all ids used by runs of an earlier version, whose checkpoints do not record them.
UNUSED_ID = 1 << 31

# of (phase, the finished round, or None if the phase begins or goes on)
Observer = Callable[[str, RoundReport | PhaseParts | None], None]


def ignore(phase: str, report: RoundReport | PhaseParts | None) -> None:
    """Ignore the event."""


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """Hold the results of a stage's roll-outs besides their samples."""

    counts: GenerationCounts
    # for the start of the next stage; None if the strategy is fixed
    selector: Selector | None


def lengths_by_prompt(samples: Sequence[Sample]) -> list[PromptLengths]:
    """Return the lengths of finished samples, and those of earlier responses to their prompts."""
    by_request: dict[int, list[Sample]] = {}
    for sample in samples:
        by_request.setdefault(sample.request.id, []).append(sample)
    lengths = []
    for own in by_request.values():
        request = own[0].request
        tokens = np.array([len(sample.tokens) for sample in own])
        earlier = np.array([len(text) for text in request.history])
        limit = request.max_new_tokens
        lengths.append(PromptLengths(earlier, tokens, tokens < limit, limit))
    return lengths


@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """Hold the state that roll-outs of training or of evaluation leave for later ones."""

    history: History
    selector: Selector | None = None
    # of all roll-outs so far
    counts: GenerationCounts = dataclasses.field(default_factory=GenerationCounts)
    # the model of response lengths
    lengths: LengthForecasts = dataclasses.field(default_factory=LengthForecasts)

    def after(self, samples: Sequence[Sample], stats: RolloutStats) -> SpeculationState:
        """Return the state after a finished stage."""
        return SpeculationState(
            history=self.history.with_samples(samples),
            selector=stats.selector,
            counts=self.counts + stats.counts,
            lengths=forecasts.after_stage(self.lengths, lengths_by_prompt(samples), KEPT_LENGTHS),
        )

    @property
    def strategies(self) -> list[dict[str, Any]]:
        """Return the statistics of the last stage, a row per strategy and number of live rows."""
        return self.selector.last_stage if self.selector else []

    def document(self) -> dict[str, Any]:
        """Return the content of a checkpoint: JSON values and numpy arrays."""
        kept = {
            "history": self.history.state(),
            "tally": dataclasses.asdict(self.counts),
            "lengths": forecasts.state(self.lengths),
        }
        return kept | ({"selector": self.selector.state()} if self.selector else {})

    def restored(self, document: dict[str, Any]) -> SpeculationState:
        """Return the state restored from `document`; a new selector starts fresh."""
        self.history.restore(document["history"])
        if self.selector and "selector" in document:
            self.selector.restore(document["selector"])
        lengths = forecasts.restore(document.get("lengths", {}))
        counts = GenerationCounts(**document["tally"])
        return dataclasses.replace(self, counts=counts, lengths=lengths)


@dataclasses.dataclass(frozen=True)
class GenerationState:
    """Hold the state that generation leaves for later, for training and for evaluation."""

    training: SpeculationState
    evaluation: SpeculationState
    # the next sample's id: beyond all used ones
    next_id: int = 0
    # of an evaluation since the last step; applied with the next step, so that a run that is
    # resumed in between evaluates again
    evaluated: tuple[Sequence[Sample], RolloutStats] | None = None
    # the prefetched samples of the next step, if any
    ahead: SamplesAhead | None = None

    def selectors(self) -> list[Selector]:
        """Return the selectors of strategies: none if the strategy is fixed."""
        return [kind.selector for kind in (self.training, self.evaluation) if kind.selector]

    def with_selectors(self, selectors: Sequence[Selector]) -> GenerationState:
        """Return the state with others in place of `selectors()`, in the same order."""
        if not selectors:
            return self
        training, evaluation = selectors
        return dataclasses.replace(
            self,
            training=dataclasses.replace(self.training, selector=training),
            evaluation=dataclasses.replace(self.evaluation, selector=evaluation),
        )

    def after(
        self, samples: Sequence[Sample], stats: RolloutStats, next_id: int
    ) -> GenerationState:
        """Return the state after a finished roll-out."""
        evaluation = self.evaluation
        return dataclasses.replace(
            self,
            training=self.training.after(samples, stats),
            evaluation=evaluation.after(*self.evaluated) if self.evaluated else evaluation,
            next_id=next_id,
            evaluated=None,
            ahead=None,
        )

    def document(self) -> dict[str, Any]:
        """Return the content of a checkpoint: JSON values and numpy arrays."""
        return {
            "drafting": self.training.document(),
            "evaluation": self.evaluation.document(),
            "next_id": self.next_id,
        } | ({"ahead": self.ahead.document()} if self.ahead else {})

    def restored(self, document: dict[str, Any]) -> GenerationState:
        """Return the state restored from `document`, without prefetched samples."""
        return GenerationState(
            training=self.training.restored(document["drafting"]),
            evaluation=self.evaluation.restored(document["evaluation"]),
            next_id=int(document.get("next_id", UNUSED_ID)),
        )


@dataclasses.dataclass(frozen=True)
class HostState:
    """Hold the host state: with the trained models, the whole state of a run."""

    # the number of updates
    step: int
    # in the order of the prompts, as `Batches.state` gives it
    position: dict[str, int]
    # None if nothing is generated
    generation: GenerationState | None
    # the configured KL coefficient, and its current value
    kl_start: float
    kl_coefficient: float
    # consecutive minibatches that were skipped for a non-finite value
    skipped: int = 0
    # updates of the policy when the drafter last learned from it
    distilled_at: int = 0
    # whether the backward pass recomputes layers, and the devices this was chosen for: none if the
    # config sets it
    remat: bool = True
    remat_devices: str = ""
    # the plan of calls, and whether the previous step had another one
    plan: str | None = None
    plan_changed: bool = False
    # what the algorithm and others keep from step to step, by their names
    memory: Mapping[str, Memory] = dataclasses.field(default_factory=dict)
    # by call, times of pipeline stages as measured by this process; not saved
    stage_times: Mapping[str, StageTimes] | None = None

    def after_draw(
        self, position: dict[str, int], generation: GenerationState | None = None
    ) -> HostState:
        """Return the state after samples were drawn, before anything is learned from them."""
        return dataclasses.replace(
            self, position=position, generation=generation, plan_changed=False
        )

    def after_update(
        self,
        metrics: Mapping[str, float],
        kl_coefficient: float,
        stage_times: Mapping[str, StageTimes] | None,
    ) -> HostState:
        """Return the state after a step with these metrics."""
        step = self.step + 1
        return dataclasses.replace(
            self,
            step=step,
            kl_coefficient=kl_coefficient,
            distilled_at=step if "drafter/seconds" in metrics else self.distilled_at,
            skipped=int(metrics.get("training/skipped_in_row", 0)),
            stage_times=stage_times,
        )

    def remember(self, name: str, memory: Memory) -> HostState:
        """Return the state with another memory of that name."""
        return dataclasses.replace(self, memory={**self.memory, name: memory})

    def document(self) -> dict[str, Any]:
        """Return the content of a checkpoint: JSON values and numpy arrays."""
        return {
            "batches": self.position,
            "kl_start": self.kl_start,
            "kl_coefficient": self.kl_coefficient,
            "skipped": self.skipped,
            "taught": self.distilled_at,
            "remat": self.remat,
            "remat_devices": self.remat_devices,
            "plan": self.plan,
            "memory": dict(self.memory),
        } | (self.generation.document() if self.generation else {})

    def restored(self, step: int, document: dict[str, Any]) -> HostState:
        """Return the state after a number of updates, restored from `document`.

        A KL coefficient that was changed in the config starts fresh. Choices made for the same
        devices are kept, so that rounding does not change.
        """
        as_before = document["kl_start"] == self.kl_start
        chosen = self.remat_devices and document.get("remat_devices") == self.remat_devices
        return HostState(
            step=step,
            position=document["batches"],
            generation=self.generation and self.generation.restored(document),
            kl_start=self.kl_start,
            kl_coefficient=float(document["kl_coefficient"]) if as_before else self.kl_coefficient,
            skipped=int(document.get("skipped", 0)),
            distilled_at=int(document["taught"]),
            remat=document["remat"] if chosen else self.remat,
            remat_devices=self.remat_devices,
            plan=self.plan,
            plan_changed=document.get("plan") != self.plan,
            memory=document.get("memory", {}),
        )


def remembered(host: HostState) -> GenerationState:
    """Return the state of generation, which must exist."""
    assert host.generation is not None, "Something is generated."
    return host.generation


class RunState(NamedTuple):
    """Hold the whole changing state of a run: on devices and on the host."""

    models: Models
    host: HostState

    @property
    def step(self) -> int:
        """Return the number of updates."""
        return self.host.step
