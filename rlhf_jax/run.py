"""The constants of a run, and the report of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_jax.config.schema import Config
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.placement.plan import ONE_LANE, Lanes
from rlhf_jax.rewards.combination import Response, Scorer, Scores
from rlhf_jax.rewards.samples import Rewards
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sources.drawn import SampleSource
from rlhf_jax.training.distill import Distillation
from rlhf_jax.training.gradients import Learner
from rlhf_jax.types import Memory, Model


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Hold the report of a finished step."""

    # by the names of metrics.jsonl
    metrics: dict[str, float]
    # one row per sample: prompt, response and reward
    samples: list[dict[str, Any]]
    # work of each slice and call, in seconds since the step began
    spans: list[Span]
    # one row for each strategy at each number of live rows
    strategies: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Hold the settings of the evaluation on held-out prompts."""

    prompts: Prompts
    tokenizer: Tokenizer
    # with its own noise
    decoding: GenerationConfig
    samples_per_prompt: int
    rewards: Rewards
    # by name, never trained on
    measures: Mapping[str, Scorer]

    def scores(self, responses: Sequence[Response], memory: Memory) -> dict[str, Scores]:
        """Return the scores of responses by measure, the reward first; memory: of the reward."""
        scores: dict[str, Scores] = {}
        if function := self.rewards.function:
            learned = self.rewards.learned
            known = {learned.name: learned.results(responses, memory)} if learned else {}
            scores["reward"] = function(responses, known)[0]
        return scores | {name: measure(responses) for name, measure in self.measures.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold the constants of a run: source of samples, settings, frozen models."""

    config: Config
    source: SampleSource
    # None: nothing is generated
    generation: GenerationSettings | None
    scoring: ScoringSettings
    # by role, the trained models, in the order of their gradients
    learners: Mapping[str, Learner]
    # by role, the frozen models: the KL "reference", a "drafter", and the initial state of a
    # "student" that learns during the run
    frozen: Mapping[str, Model]
    # of (KL coefficient, KL of a response, samples): the next coefficient
    next_kl_coefficient: Callable[[float, float, int], float]
    # lanes of each call in a timeline
    lanes: Lanes = ONE_LANE
    # None: there is no student, or it is frozen
    distillation: Distillation | None = None
    # None: there are no held-out prompts
    evaluation: EvaluationSettings | None = None
    # held-out samples on which losses are measured, if samples are given
    held_out: Sequences | None = None
