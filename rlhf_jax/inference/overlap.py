"""Inference beside the tail of generation: slices with nothing left to decode score what is done.

(Inter-stage fusion: RLHFuse, Zhong et al. 2024, section 4.) A sample's numbers are those of the
order without overlap within rounding: the same functions over other shapes. What no slice had time
for is left to `rlhf.score`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from typing import cast as typed

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.requests import Sample, as_rollout, is_ready
from rlhf_jax.inference.logprobs import score_packed
from rlhf_jax.inference.packing import Packed, pack, padding_share, unpack
from rlhf_jax.inference.values import value_packed
from rlhf_jax.mesh import Layout
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.rewards.combination import Response, failure
from rlhf_jax.rewards.models import RewardModel, ScoredRows, start_scoring
from rlhf_jax.runtime import messages, to_host
from rlhf_jax.runtime.compilation import Execute, run_now
from rlhf_jax.types import Model, Rollout

T = TypeVar("T")

# The scores of a sample's tokens: fields of `Scored`, in the order in which `dispatch_scores` gives
# them.
PER_TOKEN_SCORES = ("logprobs", "reference_logprobs", "values")
# The calls of a plan that compute them.
CALLS_OF_SCORES = ("policy_inference", "reference_inference", "critic_inference")


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Hold the models that score, laid out as generation's weights are, and say how they score."""

    # None: the update's own forward pass gives its log-probs
    policy: Model | None
    reference: Model | None
    critic: Model | None
    temperature: float
    rows: int  # scored at one time on a slice
    length_bucket: int
    max_length: int  # tokens of the longest sample, prompt included
    rewards: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)  # by their names


@messages.register
@dataclasses.dataclass(frozen=True)
class Scored:
    """Hold one sample's scores on the host: [T] float32 each, or None without such a model."""

    logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None
    values: np.ndarray | None
    # By name, of the reward models that could read the sample.
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PendingScores:
    """Hold scores of a rollout that are on their way, and where they belong."""

    # (a packed batch, its scores [S, W] in the order of `PER_TOKEN_SCORES`, None without a model)
    parts: list[tuple[Packed, tuple[jax.Array | None, ...]]]
    shape: tuple[int, int]  # of the rollout's tokens
    present: tuple[bool, ...]  # whether there is a model of each kind

    @property
    def padding(self) -> float:
        """Return the share of the tokens that are padding; 0 where no model reads them."""
        return padding_share([part for part, _ in self.parts])

    def fetch(self, read: Callable[[Any], Any] = to_host.fetch) -> tuple[np.ndarray | None, ...]:
        """Wait for the scores: of each kind [B, T] float32, 0 off the mask, or None.

        read: to the host; by default all processes take part.
        """
        on_host = read([scores for _, scores in self.parts])
        found = []
        for kind, present in enumerate(self.present):
            pairs = [
                (part, scores[kind])
                for (part, _), scores in zip(self.parts, on_host, strict=True)
                if scores[kind] is not None
            ]
            found.append(unpack(pairs, self.shape) if present else None)
        return tuple(found)


@dataclasses.dataclass
class _Batch:
    """Hold samples that a slice was given to score, and the results that are on their way."""

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
    """Hold finished samples that wait to be scored, and those that were.

    It is generation's idle work. Processes that share a slice hold the same.
    """

    def __init__(self, scoring: Scoring):
        self.scoring = scoring
        self.waiting: collections.deque[tuple[Sample, Response | None]] = collections.deque()
        self.batches: list[_Batch] = []
        # policy, reference and critic, and reward models, as each slice holds them
        self._models: dict[Layout, tuple[list, dict[str, RewardModel]]] = {}

    def add(self, sample: Sample, response: Response | None = None) -> None:
        """Add a finished sample; reward models, where there are some, read its `response`."""
        self.waiting.append((sample, response))

    @property
    def tokens(self) -> int:
        """Count the tokens, prompts included, of samples that wait to be scored."""
        return sum(sample.length for sample, _ in self.waiting)

    @property
    def waits(self) -> bool:
        """Say whether as many samples wait as a slice scores at one time."""
        return len(self.waiting) >= self.scoring.rows

    def feed(self, number: int, layout: Layout) -> jax.Array:
        """Let slice `number` score the next samples; return an array that is ready when it has."""
        self._note_ended()
        rows = [self.waiting.popleft() for _ in range(self.scoring.rows)]
        samples, responses = zip(*rows, strict=True)

        scoring = self.scoring
        if layout not in self._models:
            weights = {name: model.model for name, model in scoring.rewards.items()}
            *models, weights = meshes.on_slice(
                (scoring.policy, scoring.reference, scoring.critic, weights), layout
            )
            reward_models = {
                name: dataclasses.replace(scoring.rewards[name], model=weights[name])
                for name in weights
            }
            self._models[layout] = (models, reward_models)
        models, reward_models = self._models[layout]

        rollout = as_rollout(samples, scoring.max_length)
        how = (scoring.temperature, scoring.rows, scoring.length_bucket, layout)
        pending = dispatch_scores(models, rollout, *how)
        parts = [(part, _readable(scores, layout)) for part, scores in pending.parts]
        results = dataclasses.replace(pending, parts=parts)
        rewards = {}
        for name, model in reward_models.items():
            parts, _ = start_scoring(model, responses, layout)
            rewards[name] = [(indices, _readable(scores, layout)) for indices, scores in parts]
        batch = _Batch(samples, results, rewards, slice=number, began=time.perf_counter())
        for leaf in batch.arrays:
            leaf.copy_to_host_async()
        self.batches.append(batch)
        return batch.arrays[-1]

    def scored(self) -> dict[int, Scored]:
        """Return what slices have scored, by sample id; wait for what is still on its way."""
        found = {}
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
                own = (leaf if leaf is None else leaf[row] for leaf in numbers)
                found[sample.sample_id] = Scored(*own, rewards=rewards[row])
        return found

    def _note_ended(self) -> None:
        """Note the time at which batches that have become ready were first seen to be."""
        for batch in self.batches:
            if batch.ended is None and all(is_ready(leaf) for leaf in batch.arrays):
                batch.ended = time.perf_counter()

    def spans(self) -> list[Span]:
        """Return when each slice scored, once all results are there."""
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


def dispatch_scores(
    models: Sequence[Model | None],
    rollout: Rollout,
    temperature: float,
    rows: int,
    length_bucket: int,
    layout: Layout,
    execute: Execute = run_now,
    progress: PhaseParts | None = None,
) -> PendingScores:
    """Start to score the response tokens of a rollout of host arrays, and do not wait.

    models: policy, reference and critic, each as the layout has it, or None. A forward pass has
    room for `rows` of the longest samples. `execute` calls jitted programs, or only compiles them.
    `progress` is told of each pass.
    """
    present = tuple(model is not None for model in models)
    parts = []
    if any(present):
        parts = pack(rollout, rollout.mask, rows, length_bucket, layout.row_shards)
    found = []
    for part in parts:
        batch, support = meshes.place_rows((part.batch, part.take(rollout.support)), layout)
        scores = []
        for call, model in zip(CALLS_OF_SCORES, models, strict=True):
            began = time.perf_counter()
            if model is None:
                scores.append(None)
            elif call == "critic_inference":
                scores.append(execute(value_packed, model, batch, layout=layout))
            else:
                how = dict(temperature=temperature, layout=layout)
                scores.append(execute(score_packed, model, batch, support, **how))
            if progress is not None and model is not None:
                progress.hand(call, began, scores[-1], part.batch)
        found.append((part, tuple(scores)))
    return PendingScores(found, typed(tuple[int, int], rollout.mask.shape), present)
