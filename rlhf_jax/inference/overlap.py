"""Overlap inference with the tail of generation: idle slices score finished samples.

(Inter-stage fusion: RLHFuse, Zhong et al. 2024, section 4.) A sample's scores equal those without
overlap within rounding: the same functions over other shapes. `scoring.score` handles the samples
that no slice had time for.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.requests import Sample, as_sequences, is_ready
from rlhf_jax.inference.scoring import PendingScores, Scored, dispatch_scores
from rlhf_jax.mesh import Layout
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.rewards.combination import Response, failure
from rlhf_jax.rewards.models import RewardModel, ScoredRows, read_scores, start_scoring
from rlhf_jax.sequences.packing import Extent
from rlhf_jax.types import Model

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Hold the scoring models in generation's layout, and their settings."""

    models: Mapping[str, Model]  # by role
    temperature: float
    rows: int  # scored at a time on a slice
    max_length: int  # tokens of the longest sample, prompt included
    rewards: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)  # by their names


@dataclasses.dataclass
class _Batch:
    """Hold samples given to a slice for scoring, and their pending results."""

    samples: tuple[Sample, ...]
    results: PendingScores
    rewards: dict[str, list[ScoredRows]]
    slice: int
    began: float
    ended: float | None = None  # None until the results were seen to be ready

    @property
    def arrays(self) -> list[jax.Array]:
        """Return all results, those of reward models included."""
        return [
            *jax.tree.leaves([scores for _, scores in self.results.parts]),
            *(scores for parts in self.rewards.values() for _, scores in parts),
        ]


class ScoringQueue:
    """Hold finished samples that wait for scoring, and those that were scored.

    It is generation's idle work. Processes that share a slice hold the same.
    """

    def __init__(self, scoring: Scoring):
        self.scoring = scoring
        self.waiting: collections.deque[tuple[Sample, Response | None]] = collections.deque()
        self.batches: list[_Batch] = []
        # by role, and reward models by name, in the layout of each slice
        self._models: dict[Layout, tuple[dict[str, Model], dict[str, RewardModel]]] = {}

    def add(self, sample: Sample, response: Response | None = None) -> None:
        """Add a finished sample; reward models, if any, read its `response`."""
        self.waiting.append((sample, response))

    @property
    def tokens(self) -> int:
        """Count the tokens, prompts included, of samples that wait to be scored."""
        return sum(sample.length for sample, _ in self.waiting)

    @property
    def waits(self) -> bool:
        """Return whether enough samples wait to fill a slice's batch."""
        return len(self.waiting) >= self.scoring.rows

    def feed(self, number: int, layout: Layout) -> jax.Array:
        """Let slice `number` score the next samples; return an array that is ready once it has."""
        self._note_ended()
        rows = [self.waiting.popleft() for _ in range(self.scoring.rows)]
        samples, responses = zip(*rows, strict=True)

        scoring = self.scoring
        if layout not in self._models:
            weights = {name: model.model for name, model in scoring.rewards.items()}
            models, weights = meshes.on_slice((dict(scoring.models), weights), layout)
            reward_models = {
                name: dataclasses.replace(scoring.rewards[name], model=weights[name])
                for name in weights
            }
            self._models[layout] = (models, reward_models)
        models, reward_models = self._models[layout]

        sequences = as_sequences(samples, scoring.max_length)
        pending = dispatch_scores(
            models, sequences, scoring.temperature, Extent(scoring.rows), layout
        )
        parts = [(part, _readable(scores, layout)) for part, scores in pending.parts]
        results = dataclasses.replace(pending, parts=parts)
        rewards = {}
        for name, model in reward_models.items():
            parts, _ = start_scoring(model, responses, layout, read_scores)
            rewards[name] = [(indices, _readable(scores, layout)) for indices, scores in parts]
        batch = _Batch(samples, results, rewards, slice=number, began=time.perf_counter())
        for leaf in batch.arrays:
            leaf.copy_to_host_async()
        self.batches.append(batch)
        return batch.arrays[-1]

    def scored(self) -> dict[int, Scored]:
        """Return the scores from slices, by sample id; wait for pending ones."""
        scores_of = {}
        for batch in self.batches:
            numbers = batch.results.fetch(jax.device_get)
            rewards: list[dict[str, float]] = [{} for _ in batch.samples]
            for name, parts in batch.rewards.items():
                for rows, scores in parts:
                    # The last scores may be of padding.
                    for row, reward in zip(rows, np.asarray(scores).tolist(), strict=False):
                        if not failure(reward):
                            rewards[row][name] = reward
            self._note_ended()
            for row, sample in enumerate(batch.samples):
                own = {name: column[row] for name, column in numbers.items()}
                scores_of[sample.sample_id] = Scored(own, rewards[row])
        return scores_of

    def _note_ended(self) -> None:
        """Record the time at which batches were first seen to be ready."""
        for batch in self.batches:
            if batch.ended is None and all(is_ready(leaf) for leaf in batch.arrays):
                batch.ended = time.perf_counter()

    def spans(self) -> list[Span]:
        """Return when each slice scored, once all results are ready."""
        return [
            Span(
                batch.slice,
                "inference",
                batch.began,
                ended=batch.ended or batch.began,
                rows=len(batch.samples),
                label="inference",
                amount=sum(len(sample.tokens) for sample in batch.samples),
            )
            for batch in self.batches
        ]


def _readable(tree: T, layout: Layout) -> T:
    """Repeat results on each host of a slice of several, so that each can read them."""
    return meshes.repeat(tree, layout=layout) if layout.is_shared else tree
