"""Roll-outs: samples of a step's prompts and their rewards, drawn again where all are alike."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlhf_jax.data.batches import PromptStream
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.history import requests
from rlhf_jax.generation.requests import GenerationCounts, RoundReport, Sample
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.stage import (
    GenerationSettings,
    StageRecord,
    by_group,
    end_stage,
    from_leader,
    generate_samples,
)
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.overlap import ScoringQueue
from rlhf_jax.inference.scoring import Scored
from rlhf_jax.losses.advantages import groups_with_signal
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.trace import Span, idle_share, since
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.rewards.combination import Response, RewardResult, Score
from rlhf_jax.rewards.samples import Rewards, compute_rewards, responses_of
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.slice_groups import slice_group_of
from rlhf_jax.state import HostState, Observer, RolloutStats, RunState
from rlhf_jax.types import Model

__all__ = [
    "RewardedRollout",
    "assignment_policy_of",
    "choose_groups",
    "draw_ahead",
    "reward_samples",
    "roll_out",
]


@dataclasses.dataclass(frozen=True)
class RewardedRollout:
    """Hold finished samples in the order they were asked for, and what they were worth."""

    samples: list[Sample]
    responses: list[Response]
    rewards: np.ndarray  # [B] float32, NaN where scoring failed and such samples are dropped
    ended: np.ndarray  # [B] bool: the response ends with a stop token, and was not cut off
    # by sample id, what slices had time to score beside generation; None where they do not score
    scored: dict[int, Scored] | None
    # what the host remembers once all were drawn
    host: HostState
    # when the first roll-out began, by the clock of `time.perf_counter`
    began: float
    # what the slices of all processes did, in seconds since then
    spans: list[Span]
    metrics: dict[str, float]
    # when the last rewards began to be computed and were there, by the clock of `began`
    rewarded: tuple[float, float]
    # updates that the weights had seen, of samples that were drawn ahead
    drawn_at: int | None = None


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Hold one roll-out of a step's prompts."""

    samples: list[Sample]
    responses: list[Response]
    rewards: np.ndarray  # [B] float32
    clipped: np.ndarray  # [B] float32, the rewards as the advantages will see them
    ended: np.ndarray  # [B] bool
    metrics: dict[str, float]
    rewarded: tuple[float, float]  # when the rewards began to be computed, and were there


@dataclasses.dataclass
class _RollOut:
    """Hold what the roll-outs of a step share, and what they add up."""

    host: HostState
    prompts: Prompts
    settings: GenerationSettings
    rewards: Rewards
    queue: ScoringQueue | None
    observe: Observer
    selector: Selector | None
    record: StageRecord = dataclasses.field(default_factory=StageRecord)
    seconds: dict[str, float] = dataclasses.field(  # by phase
        default_factory=lambda: {"generation": 0.0, "inference": 0.0}
    )
    # of earlier samples whose noise is repeated
    repeated_ids: set[int] = dataclasses.field(default_factory=set)
    # by request id, the row of its prompt
    row_of: dict[int, int] = dataclasses.field(default_factory=dict)
    # by sample id, what slices have scored beside generation
    scored: dict[int, Scored] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Say that a phase begins, and add the seconds that it takes."""
        self.observe(phase, None)
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def note(self, report: RoundReport) -> None:
        """Record a round of generation, and pass it on."""
        self.record.add(report)
        for scorer in self.rewards.eager.values():
            scorer.advance()
        self.observe("generation", report)


def roll_out(
    models: ModelPair,
    state: RunState,
    stream: PromptStream,
    settings: GenerationSettings,
    rewards: Rewards,
    queue: ScoringQueue | None,
    observe: Observer,
) -> RewardedRollout:
    """Roll out `prompts_per_step` prompts, and compute the rewards of their samples.

    `queue` scores what is finished beside generation, on slices with nothing left to decode. With
    `resample`, prompts whose samples all have one reward are set aside and others drawn, up to that
    many more roll-outs; those set aside fill what is still missing (dynamic sampling: DAPO, Yu et
    al. 2025, 3.2). Sample ids count on from step to step, whatever changes between, so that a run
    uses no noise twice unless it is asked to repeat some.
    """
    host = state.host
    selector = copy.deepcopy(host.training.selector)
    work = _RollOut(host, stream.prompts, settings, rewards, queue, observe, selector)
    position = host.position
    draws: list[_Draw] = []
    group = settings.samples_per_prompt
    for attempt in range(settings.resample + 1):
        rows, position = stream.batches.take(position)
        drawn = sum(len(draw.samples) for draw in draws)
        name = f"step {state.step} attempt {attempt}"
        samples = _generate(work, models, rows, host.next_id + drawn, name)
        draws.append(_reward(work, samples, rows))
        whole = _join(draws)
        kept, enough = choose_groups(whole.clipped, group, settings.prompts_per_step)
        if enough:
            break

    stats, spans, metrics = _close(work, whole.samples, models[1])
    samples = [whole.samples[index] for index in kept]
    return RewardedRollout(
        samples=samples,
        responses=[whole.responses[index] for index in kept],
        rewards=whole.rewards[kept],
        ended=whole.ended[kept],
        scored=work.scored if queue else None,
        host=host.after_rollout(samples, stats, position, host.next_id + len(whole.samples)),
        began=work.record.began,
        spans=spans,
        metrics=metrics | _draw_metrics(whole, group, attempts=len(draws)),
        rewarded=whole.rewarded,
    )


def draw_ahead(
    models: ModelPair,
    host: HostState,
    drawn_at: int,
    stream: PromptStream,
    settings: GenerationSettings,
    rewards: Rewards,
    report: Callable[[RoundReport], None],
) -> tuple[HostState, SamplesAhead]:
    """Draw the samples of the next prompts, to be rewarded later.

    drawn_at: the updates that the models have seen. `report` hears of each round. Returns also what
    the host remembers afterwards.
    """

    def observe(phase: str, told: RoundReport | PhaseParts | None) -> None:
        if isinstance(told, RoundReport):
            report(told)

    later = dataclasses.replace(rewards, eager={})
    selector = copy.deepcopy(host.training.selector)
    work = _RollOut(host, stream.prompts, settings, later, None, observe, selector)
    rows, position = stream.batches.take(host.position)
    samples = _generate(work, models, rows, host.next_id, f"samples from {host.next_id}")
    stats, spans, metrics = _close(work, samples, models[1])
    after = host.after_rollout(samples, stats, position, host.next_id + len(samples))
    ahead = SamplesAhead(
        samples, rows, drawn_at, metrics=metrics, began=work.record.began, spans=spans
    )
    return after, ahead


def reward_samples(
    ahead: SamplesAhead,
    host: HostState,
    prompts: Prompts,
    settings: GenerationSettings,
    rewards: Rewards,
    observe: Observer,
) -> RewardedRollout:
    """Compute the rewards of samples that were drawn ahead; `host` is what remembers them."""
    later = dataclasses.replace(rewards, eager={})
    work = _RollOut(host, prompts, settings, later, None, observe, selector=None)
    draw = _reward(work, ahead.samples, ahead.rows)
    metrics = ahead.metrics | _draw_metrics(draw, settings.samples_per_prompt, attempts=1)
    return RewardedRollout(
        ahead.samples,
        draw.responses,
        draw.rewards,
        ended=draw.ended,
        scored=None,
        host=host,
        began=work.record.began,
        spans=[],
        metrics=metrics | {"inference/seconds": work.seconds["inference"]},
        rewarded=draw.rewarded,
        drawn_at=ahead.drawn_at,
    )


def _draw_metrics(draw: _Draw, group: int, attempts: int) -> dict[str, float]:
    """Measure the rewards of all that was drawn for a step."""
    differ = groups_with_signal(draw.clipped, group)
    return draw.metrics | {
        "generation/attempts": attempts,
        "generation/groups_without_signal": float(1 - differ.mean()),
        "reward/mean": float(np.nanmean(draw.rewards)),
        "reward/std": float(np.nanstd(draw.rewards)),
        "response/unfinished": float(1 - draw.ended.mean()),
    }


def _join(draws: Sequence[_Draw]) -> _Draw:
    """Join several roll-outs; of metrics, failures add up, and the rest are means."""
    names = dict.fromkeys(name for draw in draws for name in draw.metrics)
    metrics = {}
    for name in names:
        values = [draw.metrics[name] for draw in draws if name in draw.metrics]
        metrics[name] = float(np.sum(values) if name.endswith("/failed") else np.mean(values))
    return _Draw(
        samples=[sample for draw in draws for sample in draw.samples],
        responses=[response for draw in draws for response in draw.responses],
        rewards=np.concatenate([draw.rewards for draw in draws]),
        clipped=np.concatenate([draw.clipped for draw in draws]),
        ended=np.concatenate([draw.ended for draw in draws]),
        metrics=metrics,
        rewarded=draws[-1].rewarded,
    )


def _generate(
    work: _RollOut, models: ModelPair, rows: np.ndarray, first_id: int, name: str
) -> list[Sample]:
    """Draw the samples of these rows' prompts, with ids from `first_id`, in a stage so named."""
    settings = work.settings
    with work.timed("generation"):
        wanted = requests(
            [work.prompts.tokens[row] for row in rows],
            settings.samples_per_prompt,
            settings.max_new_tokens,
            first_id=first_id,
            history=work.host.training.history,
            rule=settings.decoding.rule,
            repeated=settings.repeated_noise,
            used=work.repeated_ids,
        )
        work.row_of = {request.id: row for request, row in zip(wanted, rows, strict=True)}
        return generate_samples(
            models,
            wanted,
            settings.decoding,
            settings,
            assignment_policy_of(settings, work.host.training.lengths, name, work.queue),
            selector=work.selector,
            observe=work.note,
            finished=functools.partial(_enqueue, work),
            idle_work=work.queue,
        )


def _reward(work: _RollOut, samples: list[Sample], rows: np.ndarray) -> _Draw:
    """Compute the rewards of the samples of these rows' prompts."""
    settings = work.settings
    with work.timed("inference"):
        if work.queue and work.rewards.models:
            work.scored = _scored_by_all(work.queue, settings)
        asked = np.repeat(rows, settings.samples_per_prompt)
        responses = responses_of(samples, work.prompts, asked, work.rewards.tokenizer)
        began = time.perf_counter()
        rewards, metrics = compute_rewards(responses, work.rewards, _known_results(work, samples))
        rewarded = (began, time.perf_counter())
    ended = np.array([settings.decoding.ended_itself(sample.tokens) for sample in samples])
    clipped = np.asarray(work.rewards.clip(rewards, ended))
    return _Draw(samples, responses, rewards, clipped, ended, metrics, rewarded)


def _close(
    work: _RollOut, samples: list[Sample], drafter: Model | None
) -> tuple[RolloutStats, list[Span], dict[str, float]]:
    """End the stage: what all processes counted, what the selector learned, what slices did."""
    settings = work.settings
    selector = work.selector
    record = work.record
    counts = sum(by_group(record.counts, GenerationCounts(), settings), GenerationCounts())
    chosen = from_leader(selector.metrics() if selector else {}, settings)
    with work.timed("generation"):
        selector = end_stage(selector, drafter, samples, settings.decoding, settings)
    if work.queue:
        work.scored = work.scored or _scored_by_all(work.queue, settings)
        record.spans += work.queue.spans()
    of_groups = by_group(since(record.spans, record.began), [], settings)
    spans = [span for own in of_groups for span in own]
    metrics = counts.metrics(work.seconds["generation"]) | chosen
    metrics |= {
        "inference/seconds": work.seconds["inference"],
        "generation/idle_share": idle_share(spans, settings.layout.slices),
        "response/length_mean": float(np.mean([len(sample.tokens) for sample in samples])),
    }
    return RolloutStats(counts, selector), spans, metrics


def assignment_policy_of(
    settings: GenerationSettings, lengths: Lengths, name: str, queue: ScoringQueue | None = None
) -> AssignmentPolicy:
    """Say where the samples of the stage of this name run, beside which slices may score."""
    assignment_policy = AssignmentPolicy(
        settings.plan_reallocation, lengths, settings.in_turn, name
    )
    if queue is None:
        return assignment_policy
    groups = slice_group_of(settings.layout).slice_groups  # each has finished about as much
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


def _enqueue(work: _RollOut, sample: Sample) -> None:
    """Have a finished sample scored beside generation: by functions, and where a slice has time."""
    rewards = work.rewards
    response = None
    if rewards.eager or (work.queue and rewards.models):
        row = np.array([work.row_of[sample.request.id]])
        (response,) = responses_of([sample], work.prompts, row, rewards.tokenizer)
    if work.queue is not None:
        work.queue.add(sample, response if rewards.models else None)
    if response is not None and slice_group_of(work.settings.layout).leads:
        for scorer in rewards.eager.values():
            scorer.begin(sample.sample_id, response, sample.request.sample_ids)


def _known_results(work: _RollOut, samples: Sequence[Sample]) -> list[dict[str, RewardResult]]:
    """Return the results that each sample has already, by the reward's term.

    They are of models that slices had time for, and of functions that began beside generation.
    """
    known: dict[int, dict[str, RewardResult]] = {sample.sample_id: {} for sample in samples}
    for sample_id, scored in work.scored.items():
        if sample_id in known:
            known[sample_id] |= {name: Score(value) for name, value in scored.rewards.items()}
    eager = work.rewards.eager
    if eager:
        for part in distributed.gather_results(lambda: {n: s.collect() for n, s in eager.items()}):
            for name, results in part.items():
                for sample_id, result in results.items():
                    known[sample_id][name] = result
    return [known[sample.sample_id] for sample in samples]


def _scored_by_all(queue: ScoringQueue, settings: GenerationSettings) -> dict[int, Scored]:
    """Return what the slices of all processes have scored, by sample id."""
    parts = by_group(queue.scored(), {}, settings)
    return {sample: scored for part in parts for sample, scored in part.items()}
