"""What stays the same from step to step, and what a step reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_jax.config.schema import Config
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.placement.lanes import ONE_LANE, Lanes
from rlhf_jax.placement.transfer import bytes_moved
from rlhf_jax.rewards.combination import Scorer
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sources.drawn import SampleSource
from rlhf_jax.state import RunState
from rlhf_jax.training.distill import Distillation
from rlhf_jax.training.gradients import Learner
from rlhf_jax.types import Model


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
    tokenizer: Tokenizer
    # of noise of its own
    decoding: GenerationConfig
    samples_per_prompt: int
    # by name; the first one stands in the table of samples
    measures: Mapping[str, Scorer]


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold what stays the same from step to step: source of samples, settings, frozen models."""

    config: Config
    source: SampleSource
    # None: nothing is generated
    generation: GenerationSettings | None
    scoring: ScoringSettings
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
    # held-out samples that losses are measured on, where samples are given
    held_out: Sequences | None = None


def changes_of_place(state: RunState, run: Run) -> dict[str, float]:
    """Count the 10^6 bytes that devices receive from others as weights come to other calls.

    Say also where the plan is another than that of the step before.
    """
    models = state.models
    moved = {"generation": ("policy", run.generation.layout)} if run.generation else {}
    moved |= {f"{role}_inference": (role, own) for role, own in run.scoring.layouts.items()}
    changed = {"plan/changed": 1.0} if state.host.plan_changed else {}
    return changed | {
        f"weights/{call}": bytes_moved(models[role].weights, layout, layout.dtype).received / 1e6
        for call, (role, layout) in moved.items()
        if layout.mesh is not None and role in models
    }
