"""Inference beside the tail of generation: slices that have nothing left to decode score what is
finished.

(Inter-stage fusion: RLHFuse, Zhong et al. 2024, section 4.) A sample's numbers are those of the
unfused order within rounding: the same functions over other shapes. What nobody had time for is
left to `rlhf.infer`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.history import as_rollout
from rlhf_jax.generation.requests import Sample
from rlhf_jax.inference.logprobs import score_rollout
from rlhf_jax.inference.values import score_values
from rlhf_jax.model.attention import causal_on
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.rewards.combination import Response, failure
from rlhf_jax.rewards.models import Read, RewardModel, read
from rlhf_jax.runtime import messages
from rlhf_jax.types import Array, Model

SCORED = ("logprobs", "reference_logprobs", "values")  # of a sample's tokens


class ScoringModels(NamedTuple):
    """The models that score beside the policy."""

    reference: Model | None = None  # None: the policy is its own
    critic: Model | None = None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The models that score, laid out as generation's weights are, and how."""

    policy: Model
    reference: Model | None
    critic: Model | None
    temperature: float
    rows: int  # scored at one time on a slice
    slots: int  # tokens of the longest sample
    rewards: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)  # by their names


@messages.register
@dataclasses.dataclass(frozen=True)
class Scored:
    """Numbers of one sample under each model, [T] float32 each, on the host; None where there is no
    such model.
    """

    logprobs: Array
    reference_logprobs: Array | None
    values: Array | None
    # of the reward models that could read it
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)


def scored_row(
    numbers: Sequence[Array | None], row: int, rewards: Mapping[str, float] = {}
) -> Scored:
    """One sample of a batch: a row of (log-probs, reference's, values), [rows, T] each."""
    found = {
        name: leaf if leaf is None else leaf[row]
        for name, leaf in zip(SCORED, numbers, strict=True)
    }
    return Scored(**found, rewards=rewards)


@dataclasses.dataclass
class _Batch:
    samples: tuple[Sample, ...]
    results: tuple[Array, Array | None, Array | None]
    rewards: dict[str, list[Read]]
    slice: int
    began: float
    ended: float | None = None

    @property
    def arrays(self) -> list[Array]:
        """All that is on its way."""
        return [
            *jax.tree.leaves(self.results),
            *(scores for parts in self.rewards.values() for _, scores in parts),
        ]


class ScoringQueue:
    """Finished samples that wait to be scored, and those that were. Processes that share a slice
    hold the same.
    """

    def __init__(self, scoring: Scoring):
        self.scoring = scoring
        self.waiting: collections.deque[tuple[Sample, Response | None]] = collections.deque()
        self.batches: list[_Batch] = []
        self._models: dict[Any, tuple] = {}

    def add(self, sample: Sample, answer: Response | None = None) -> None:
        """A sample has finished; `answer` is what reward models, where there are some, read of
        it.
        """
        self.waiting.append((sample, answer))

    @property
    def tokens(self) -> int:
        """Of samples that wait to be scored."""
        return sum(len(sample.prompt) + len(sample.tokens) for sample, _ in self.waiting)

    @property
    def waits(self) -> bool:
        """Whether there are as many as a slice scores at one time."""
        return len(self.waiting) >= self.scoring.rows

    def feed(self, number: int, mesh: jax.sharding.Mesh | None) -> Array:
        """Have a slice score the next samples: an array that is ready when it has."""
        self._look()
        scoring = self.scoring
        samples, answers = zip(*(self.waiting.popleft() for _ in range(scoring.rows)), strict=True)
        *models, judges = self._on(mesh)
        results = _readable(score(models, place(samples, scoring, mesh), scoring, mesh), mesh)
        rewards = {
            name: [
                (rows, _readable(scores, mesh)) for rows, scores in read(judge, answers, mesh)[0]
            ]
            for name, judge in judges.items()
        }
        batch = _Batch(samples, results, rewards, number, time.perf_counter())
        for leaf in batch.arrays:
            leaf.copy_to_host_async()
        self.batches.append(batch)
        return batch.arrays[-1]

    def _on(self, mesh) -> tuple[Model, Model | None, Model | None, dict[str, RewardModel]]:
        """The models as a slice holds them."""
        if mesh not in self._models:
            scoring = self.scoring
            weights = {name: judge.model for name, judge in scoring.rewards.items()}
            *models, weights = meshes.on_slice(
                (scoring.policy, scoring.reference, scoring.critic, weights), mesh
            )
            judges = {
                name: dataclasses.replace(scoring.rewards[name], model=weights[name])
                for name in weights
            }
            self._models[mesh] = (*models, judges)
        return self._models[mesh]

    def scored(self) -> dict[int, Scored]:
        """What slices have scored, by sample id; what is still on its way is waited for."""
        found = {}
        for batch in self.batches:
            numbers = jax.device_get(batch.results)
            rewards = {name: _by_row(parts) for name, parts in batch.rewards.items()}
            self._look()
            for row, sample in enumerate(batch.samples):
                own = {name: scores[row] for name, scores in rewards.items() if row in scores}
                found[sample.sample_id] = scored_row(numbers, row, own)
        return found

    def _look(self) -> None:
        """Note when what has become ready did."""
        for batch in self.batches:
            if batch.ended is None and all(leaf.is_ready() for leaf in batch.arrays):
                batch.ended = time.perf_counter()

    def spans(self) -> list[Span]:
        """What slices did here, once all of it is there."""
        return [
            Span(
                b.slice,
                "inference",
                b.began,
                b.ended or b.began,
                len(b.samples),
                "inference",
                tokens,
            )
            for b in self.batches
            for tokens in [sum(len(sample.tokens) for sample in b.samples)]
        ]


def _by_row(parts: list[Read]) -> dict[int, float]:
    """The scores of a batch by row; one that could not be read, or is no finite number, has
    none.
    """
    found = (
        one
        for rows, scores in parts
        for one in zip(rows, np.asarray(scores).tolist(), strict=False)
    )
    return {row: score for row, score in found if not failure(score)}


def _readable(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Results as each host of a slice can read them."""
    return meshes.repeat(tree, mesh=mesh) if mesh is not None and mesh.is_multi_process else tree


def place(samples: Sequence[Sample], scoring: Scoring, mesh):
    """The samples as a rollout on a slice."""
    return meshes.place_rows(as_rollout(samples, scoring.slots), mesh)


def score(models, rollout, scoring: Scoring, mesh) -> tuple[Array, Array | None, Array | None]:
    """(log-probs, reference's, values) of a rollout, [rows, T] float32 each, dispatched and not
    waited for.
    """
    policy, reference, critic = models
    how = functools.partial(
        score_rollout, rollout=rollout, temperature=scoring.temperature, rows=scoring.rows
    )
    attend = causal_on(mesh, policy.config.num_kv_heads)
    logprobs = how(policy, attend=attend)
    referred = None if reference is None else how(reference, attend=attend)
    values = None
    if critic is not None:
        values = score_values(
            critic, rollout, rows=scoring.rows, attend=causal_on(mesh, critic.config.num_kv_heads)
        )
    return logprobs, referred, values
