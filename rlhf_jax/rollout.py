"""Roll-outs: samples of a step's prompts and their rewards, drawn again where all are alike."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlhf_jax.data.batches import Batches
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.history import requests
from rlhf_jax.generation.requests import GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.stage import (
    GenerationSettings,
    StageRecord,
    by_group,
    end_stage,
    generate_samples,
)
from rlhf_jax.inference.overlap import Scored, ScoringQueue
from rlhf_jax.monitoring.trace import Span, idle_share, since
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.samples import Rewards, compute_rewards, responses_of
from rlhf_jax.runtime.slice_groups import slice_group_of
from rlhf_jax.state import HostState, Observer, RolloutStats
from rlhf_jax.training.batching import groups_with_signal
from rlhf_jax.training.experience import AdvantageConfig, penalise_and_clip


@dataclasses.dataclass(frozen=True)
class RewardedRollout:
    """Hold finished samples in the order they were asked for, and what they were worth."""

    samples: list[Sample]
    responses: list[Response]
    rewards: np.ndarray  # [B] float32
    ended: np.ndarray  # [B] bool: the response ends with a stop token, and was not cut off
    # by sample id, what slices had time to score beside generation; None where they do not score
    scored: dict[int, Scored] | None
    stats: RolloutStats
    # in the order of the prompts, after those that were drawn
    position: dict[str, int]
    # when the first roll-out began, by the clock of `time.perf_counter`
    began: float
    # what the slices of all processes did, in seconds since then
    spans: list[Span]
    metrics: dict[str, float]


def roll_out(
    models: ModelPair,
    host: HostState,
    step: int,
    prompts: Prompts,
    batches: Batches,
    settings: GenerationSettings,
    rewards: Rewards,
    advantage: AdvantageConfig,
    *,
    queue: ScoringQueue | None,
    observe: Observer,
) -> RewardedRollout:
    """Roll out `prompts_per_step` prompts, and compute the rewards of their samples.

    `queue` scores what is finished beside generation, on slices with nothing left to decode. With
    `resample`, prompts whose samples all have one reward are set aside and others drawn, up to that
    many more roll-outs; those set aside fill what is still missing (dynamic sampling: DAPO, Yu et
    al. 2025, 3.2). Sample ids count on from step to step, so that a run uses no noise twice unless
    it is asked to repeat some.
    """
    group = settings.samples_per_prompt
    selector = copy.deepcopy(host.training.selector)
    record = StageRecord()
    seconds = {"generation": 0.0, "inference": 0.0}
    position = host.position
    repeated_ids = set[int]()
    samples: list[Sample] = []
    responses: list[Response] = []
    values = np.zeros(0, np.float32)
    signalled = np.zeros(0, np.float32)  # rewards as the advantages will see them
    ended = np.zeros(0, bool)
    reward_metrics = []
    scored: dict[int, Scored] = {}

    for attempt in range(settings.resample + 1):
        with _timed("generation", seconds, observe):
            rows, position = batches.take(position)
            first_id = (step * (settings.resample + 1) + attempt) * len(rows) * group
            wanted = requests(
                [prompts.tokens[row] for row in rows],
                group,
                settings.max_new_tokens,
                first_id=first_id,
                history=host.training.history,
                repeated=settings.repeated_noise,
                used=repeated_ids,
            )
            lengths = host.training.lengths
            drawn = generate_samples(
                models,
                wanted,
                settings.decoding,
                settings,
                assignment_policy_of(settings, lengths, f"step {step} attempt {attempt}", queue),
                selector=selector,
                observe=functools.partial(_note, record, observe),
                finished=functools.partial(_enqueue, queue, wanted, rows, prompts, rewards),
                idle_work=queue,
            )
        with _timed("inference", seconds, observe):
            if queue and rewards.models:
                scored = _scored_by_all(queue, settings)
            asked = np.repeat(rows, group)
            fresh = responses_of(drawn, prompts, asked, rewards.tokenizer)
            known = [
                scored[one.sample_id].rewards if one.sample_id in scored else {} for one in drawn
            ]
            earned, metrics = compute_rewards(fresh, rewards, known)
        own_ended = np.array([one.tokens[-1] in settings.decoding.stop_tokens for one in drawn])
        samples += drawn
        responses += fresh
        values = np.append(values, earned)
        ended = np.append(ended, own_ended)
        signalled = np.append(signalled, penalise_and_clip(earned, own_ended, advantage))
        reward_metrics.append(metrics)
        kept, enough = choose_groups(signalled, group, settings.prompts_per_step)
        if enough:
            break

    counts = sum(by_group(record.counts, GenerationCounts(), settings), GenerationCounts())
    chosen_metrics = selector.metrics() if selector else {}
    with _timed("generation", seconds, observe):
        selector = end_stage(selector, models[1], samples, settings.decoding, settings)
    if queue:
        scored = scored or _scored_by_all(queue, settings)
        record.spans += queue.spans()
    of_groups = by_group(since(record.spans, record.began), [], settings)
    spans = [span for own in of_groups for span in own]
    metrics = counts.metrics(seconds["generation"]) | chosen_metrics | _joined(reward_metrics)
    metrics |= {
        "inference/seconds": seconds["inference"],
        "generation/attempts": len(reward_metrics),
        "generation/idle_share": idle_share(spans, settings.layout.slices),
        "generation/groups_without_signal": float(1 - groups_with_signal(signalled, group).mean()),
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std()),
        "response/length_mean": float(np.mean([len(one.tokens) for one in samples])),
        "response/unfinished": float(1 - ended.mean()),
    }
    return RewardedRollout(
        samples=[samples[index] for index in kept],
        responses=[responses[index] for index in kept],
        rewards=values[kept],
        ended=ended[kept],
        scored=scored if queue else None,
        stats=RolloutStats(counts, selector),
        position=position,
        began=record.began,
        spans=spans,
        metrics=metrics,
    )


def assignment_policy_of(
    settings: GenerationSettings, lengths: Lengths, name: str, queue: ScoringQueue | None = None
) -> AssignmentPolicy:
    """Say where the samples of the stage of this name run, beside which slices may score."""
    assignment_policy = AssignmentPolicy(
        settings.plan_reallocation, lengths, settings.in_turn, name
    )
    if queue is None:
        return assignment_policy
    groups = slice_group_of(settings.layout.mesh).slice_groups  # each has finished about as much
    return dataclasses.replace(
        assignment_policy, scoring=settings.scoring_seconds, unscored=lambda: groups * queue.tokens
    )


def choose_groups(rewards: np.ndarray, group: int, wanted: int) -> tuple[np.ndarray, bool]:
    """Choose the samples [wanted * group] of prompts whose rewards differ.

    Returns their indices, in order, and whether there are so many prompts; where there are not,
    the first of the others fill up.
    """
    differ = groups_with_signal(rewards, group)
    chosen = np.sort(np.argsort(~differ, kind="stable")[:wanted])
    indices = (chosen[:, None] * group + np.arange(group)).reshape(-1)
    return indices, int(differ.sum()) >= wanted


def _note(record: StageRecord, observe: Observer, report: RoundReport) -> None:
    """Record a round of generation, and pass it on."""
    record.add(report)
    observe("generation", report)


def _enqueue(
    queue: ScoringQueue | None,
    wanted: Sequence,
    rows: np.ndarray,
    prompts: Prompts,
    rewards: Rewards,
    sample: Sample,
) -> None:
    """Have a finished sample scored where a slice has time; reward models read its response."""
    if queue is None:
        return
    if not rewards.models:
        queue.add(sample)
        return
    row = rows[next(i for i, request in enumerate(wanted) if request is sample.request)]
    (response,) = responses_of([sample], prompts, np.array([row]), rewards.tokenizer)
    queue.add(sample, response)


def _scored_by_all(queue: ScoringQueue, settings: GenerationSettings) -> dict[int, Scored]:
    """Return what the slices of all processes have scored, by sample id."""
    parts = by_group(queue.scored(), {}, settings)
    return {sample: scored for part in parts for sample, scored in part.items()}


def _joined(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of several roll-outs: failures add up, the rest are means."""
    names = dict.fromkeys(name for metrics in attempts for name in metrics)
    found = {name: [metrics[name] for metrics in attempts if name in metrics] for name in names}
    return {
        name: float((np.sum if name.endswith("/failed") else np.mean)(values))
        for name, values in found.items()
    }


@contextlib.contextmanager
def _timed(phase: str, seconds: dict[str, float], observe: Observer) -> Iterator[None]:
    """Say that a phase begins, and add the seconds that it takes."""
    observe(phase, None)
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start
