"""One roll-out: samples of some prompts, their rewards, and the work of the slices."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.capability import capabilities
from rlhf_jax.generation.history import requests
from rlhf_jax.generation.reallocation import forecasts
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts
from rlhf_jax.generation.requests import GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.slice_groups import slice_group_of
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.stage import (
    GenerationSettings,
    StageRecord,
    by_group,
    end_stage,
    from_leader,
    generate_samples,
)
from rlhf_jax.inference.overlap import ScoringQueue
from rlhf_jax.inference.scoring import Scored
from rlhf_jax.monitoring.phases import timed
from rlhf_jax.monitoring.trace import Span, idle_share, since
from rlhf_jax.rewards.combination import Response, RewardResult, Score
from rlhf_jax.rewards.samples import Rewards, compute_rewards, responses_of
from rlhf_jax.runtime import distributed
from rlhf_jax.state import HostState, Observer, RolloutStats, lengths_by_prompt, remembered
from rlhf_jax.types import Memory, Model


@dataclasses.dataclass(frozen=True)
class RewardedSamples:
    """Hold finished samples in request order, with their rewards."""

    samples: list[Sample]
    responses: list[Response]
    places: np.ndarray  # [B] int, among samples_per_prompt rows for each prompt
    rewards: np.ndarray  # [B] float32, NaN where scoring failed and such samples are dropped
    clipped: np.ndarray  # [B] float32, the rewards as trained on
    ended: np.ndarray  # [B] bool: the response ends with a stop token, and was not cut off
    metrics: dict[str, float]
    # start and end of the reward computation, by the clock of `time.perf_counter`
    rewarded: tuple[float, float]

    def of_prompts(self, chosen: np.ndarray, group: int) -> RewardedSamples:
        """Return the samples of some prompts, with `group` places each; the metrics stay."""
        rows = np.flatnonzero(np.isin(self.places // group, chosen))
        prompts = np.searchsorted(chosen, self.places[rows] // group)
        return dataclasses.replace(
            self,
            samples=[self.samples[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            places=prompts * group + self.places[rows] % group,
            rewards=self.rewards[rows],
            clipped=self.clipped[rows],
            ended=self.ended[rows],
        )

    def by_prompt(self, group: int) -> np.ndarray:
        """Return the rewards as trained on, [P, group], NaN at places without a sample."""
        rewards = np.full((self.places[-1] // group + 1) * group, np.nan, np.float32)
        rewards[self.places] = self.clipped
        return rewards.reshape(-1, group)


@dataclasses.dataclass
class RollOut:
    """Hold the shared and accumulated data of a step's roll-outs."""

    host: HostState
    prompts: Prompts
    settings: GenerationSettings
    rewards: Rewards
    observe: Observer
    # scores finished samples during generation, on slices with no samples left
    queue: ScoringQueue | None = None

    def __post_init__(self) -> None:
        self.selector = copy.deepcopy(remembered(self.host).training.selector)
        self.record = StageRecord()
        # seconds by phase
        self.metrics = {"generation/seconds": 0.0, "inference/seconds": 0.0}
        # of earlier samples whose noise is repeated
        self.repeated_ids: set[int] = set()
        # by request id, the row of its prompt
        self.row_of: dict[int, int] = {}
        # of a reward that learns
        self.memory: Memory = self.host.memory.get("reward", {})
        # by sample id, scores that slices computed during generation
        self.scored: dict[int, Scored] = {}

    def generate(
        self, models: ModelPair, rows: np.ndarray, first_id: int, name: str
    ) -> list[Sample]:
        """Draw the samples of these rows' prompts, with ids from `first_id`, in a named stage."""
        settings = self.settings
        before = remembered(self.host).training
        with timed("generation", self.metrics, self.observe):
            known = capabilities(self.host.memory.get("capability", {}), rows)
            counts, temperatures = settings.shares(known)
            wanted = requests(
                [self.prompts.tokens[row] for row in rows],
                counts,
                settings.max_new_tokens,
                first_id=first_id,
                history=before.history,
                rule=settings.decoding.rule,
                repeated=settings.repeated_noise,
                used=self.repeated_ids,
                temperatures=temperatures,
            )
            self.row_of = {request.id: row for request, row in zip(wanted, rows, strict=True)}
            return generate_samples(
                models,
                wanted,
                settings.decoding,
                settings,
                assignment_policy_of(settings, before.lengths, name, self.queue),
                selector=self.selector,
                observe=self._note,
                finished=self._enqueue,
                idle_work=self.queue,
            )

    def reward(self, samples: list[Sample], rows: np.ndarray) -> RewardedSamples:
        """Compute the rewards of the samples of these rows' prompts."""
        settings = self.settings
        with timed("inference", self.metrics, self.observe):
            if self.queue and self.rewards.models:
                self.scored = self._scored_by_all(self.queue)
            groups = itertools.groupby(samples, key=lambda sample: sample.request.id)
            counts = [len(list(own)) for _, own in groups]
            prompt_rows = np.repeat(rows, counts)
            responses = responses_of(samples, self.prompts, prompt_rows, self.rewards.tokenizer)
            began = time.perf_counter()
            known = self._known_results(samples)
            learning = {}
            if learned := self.rewards.learned:
                found, self.memory, learning = learned.learn(responses, self.memory)
                for index, own in enumerate(known):
                    own[learned.name] = found[index]
            rewards, metrics = compute_rewards(responses, self.rewards, known)
            metrics |= learning
            rewarded = (began, time.perf_counter())
        ended = np.array([settings.decoding.ended_itself(sample.tokens) for sample in samples])
        clipped = self.rewards.clip(rewards, ended)
        most = settings.samples_per_prompt
        places = [index * most + place for index, own in enumerate(counts) for place in range(own)]
        return RewardedSamples(
            samples, responses, np.array(places), rewards, clipped, ended, metrics, rewarded
        )

    def close(
        self, samples: list[Sample], drafter: Model | None
    ) -> tuple[RolloutStats, list[Span], dict[str, float]]:
        """End the stage: gather the counts, selector and slice timelines of all processes."""
        settings = self.settings
        selector = self.selector
        record = self.record
        counts = sum(by_group(record.counts, GenerationCounts(), settings), GenerationCounts())
        chosen = from_leader(selector.metrics() if selector else {}, settings)
        with timed("generation", self.metrics, self.observe):
            selector = end_stage(selector, drafter, samples, settings.decoding, settings)
        if self.queue:
            self.scored = self.scored or self._scored_by_all(self.queue)
            record.spans += self.queue.spans()
        of_groups = by_group(since(record.spans, record.began), [], settings)
        spans = [span for own in of_groups for span in own]
        metrics = counts.metrics(self.metrics["generation/seconds"]) | chosen
        known = remembered(self.host).training.lengths
        metrics |= forecasts.coverage(known, lengths_by_prompt(samples))
        metrics |= {
            "inference/seconds": self.metrics["inference/seconds"],
            "generation/idle_share": idle_share(spans, settings.layout.slices),
            "response/length_mean": float(np.mean([len(sample.tokens) for sample in samples])),
        }
        return RolloutStats(counts, selector), spans, metrics

    def _note(self, report: RoundReport) -> None:
        """Record a round of generation, and pass it on."""
        self.record.add(report)
        for scorer in self.rewards.eager.values():
            scorer.advance()
        self.observe("generation", report)

    def _enqueue(self, sample: Sample) -> None:
        """Queue a finished sample for scoring: by functions, and on an idle slice."""
        rewards = self.rewards
        response = None
        if rewards.eager or (self.queue and rewards.models):
            row = np.array([self.row_of[sample.request.id]])
            (response,) = responses_of([sample], self.prompts, row, rewards.tokenizer)
        if self.queue is not None:
            self.queue.add(sample, response if rewards.models else None)
        if response is not None and slice_group_of(self.settings.layout).leads:
            for scorer in rewards.eager.values():
                scorer.begin(sample.sample_id, response, sample.request.sample_ids)

    def _known_results(self, samples: Sequence[Sample]) -> list[dict[str, RewardResult]]:
        """Return the results that are already known of each sample, by the reward's term.

        They come from models on idle slices, and from functions that began during generation.
        """
        known: dict[int, dict[str, RewardResult]] = {sample.sample_id: {} for sample in samples}
        for sample_id, scored in self.scored.items():
            if sample_id in known:
                known[sample_id] |= {name: Score(value) for name, value in scored.rewards.items()}
        eager = self.rewards.eager

        def collect() -> Mapping[str, Mapping[int, RewardResult]]:
            return {name: scorer.collect() for name, scorer in eager.items()}

        for part in distributed.gather_results(collect) if eager else ():
            for name, results in part.items():
                for sample_id, result in results.items():
                    known[sample_id][name] = result
        return [known[sample.sample_id] for sample in samples]

    def _scored_by_all(self, queue: ScoringQueue) -> dict[int, Scored]:
        """Return the scores that the slices of all processes computed, by sample id."""
        parts = by_group(queue.scored(), {}, self.settings)
        return {sample: scored for part in parts for sample, scored in part.items()}


def assignment_policy_of(
    settings: GenerationSettings,
    lengths: LengthForecasts,
    name: str,
    queue: ScoringQueue | None = None,
) -> AssignmentPolicy:
    """Return the assignment policy of a stage, whose slices may score when idle."""
    assignment_policy = AssignmentPolicy(
        settings.plan_reallocation, lengths, settings.in_turn, name
    )
    if queue is None:
        return assignment_policy
    groups = slice_group_of(settings.layout).slice_groups  # each has finished about as much
    return dataclasses.replace(
        assignment_policy, scoring=settings.scoring_seconds, unscored=lambda: groups * queue.tokens
    )
