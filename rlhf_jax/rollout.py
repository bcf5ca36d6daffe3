"""Roll out all samples of a stage: dealt out to slices, or placed by a plan, and gathered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from rlhf_jax.generation.assignment import PlacementPolicy
from rlhf_jax.generation.engine import IdleWork, generate
from rlhf_jax.generation.requests import GenerationConfig, Request, RoundReport, Sample
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.overlap import ScoringQueue
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.reallocation.length_model import Lengths
from rlhf_jax.runtime import distributed, messages
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.runtime.slice_groups import StageAborted, failed, slice_group_of
from rlhf_jax.state import Stages
from rlhf_jax.types import Model


@messages.register
@dataclasses.dataclass(frozen=True)
class FinishedSample:
    """Tell other processes of a sample that has ended."""

    sample_id: int
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    support: np.ndarray | None  # [T, top_k] int32, under top-k
    rounds: int
    accepted: int


def placing_of(
    stages: Stages, lengths: Lengths, name: str, scoring_queue: ScoringQueue | None = None
) -> PlacementPolicy:
    """Return where the samples of a stage run, beside which slices may score what is finished."""
    placing = PlacementPolicy(stages.plan_reallocation, lengths, stages.in_turn, name)
    if scoring_queue is None:
        return placing
    # each has finished about as much as this one
    slice_groups = slice_group_of(stages.mesh).slice_groups
    return dataclasses.replace(
        placing, scoring=stages.scoring, unscored=lambda: slice_groups * scoring_queue.tokens
    )


def roll_out(
    target: Model,
    drafter: Model | None,
    wanted: Sequence[Request],
    decoding: GenerationConfig,
    stages: Stages,
    placing: PlacementPolicy,
    selector: Selector | None = None,
    observe: Callable[[RoundReport], None] = lambda report: None,
    finished: Callable[[Sample], None] = lambda sample: None,
    spare: IdleWork | None = None,
) -> list[Sample]:
    """Return all samples, in the order of the requests.

    Each slice group decodes on its own slices, without the others. What it decodes is its share of
    the requests or, where there is a plan, what that says.
    `finished` hears of each sample that ends here.
    """
    slice_group = slice_group_of(stages.mesh)
    asked = wanted if placing.plan_reallocation else slice_group.share(wanted)

    def rolled() -> list[Sample]:
        samples = []
        on = (stages.mesh, observe, selector, stages.ahead, placing, spare)
        with contextlib.suppress(StageAborted), failed(placing.name):
            for sample in generate(target, drafter, asked, decoding, *on):
                samples.append(sample)
                finished(sample)
        return samples if slice_group.leads else []  # the leader speaks for all

    ids = [(request, sample_id) for request in wanted for sample_id in request.sample_ids]
    if not distributed.started():
        samples = {sample.sample_id: sample for sample in rolled()}
        return [samples[sample_id] for _, sample_id in ids]
    outcome = _of_group(rolled) if slice_group.several else rolled
    shares = distributed.gather_results(lambda: list(map(_packed, outcome())))
    distributed.run_on_leader(lambda: distributed.delete_published(placing.name))
    packed = {one.sample_id: one for share in shares for one in share}
    return [_unpacked(request, packed[sample_id]) for request, sample_id in ids]


def _of_group(rolled: Callable[[], list[Sample]]) -> Callable[[], list[Sample]]:
    """Return what a process of a slice group tells all others when its part is over.

    A run may be stopped where all of a group are between two rounds. With any other error the
    others may wait on their devices for this process: it is raised here, and ends them.
    """
    try:
        samples = rolled()
    except Stopped as stopped:
        return functools.partial(_raise, stopped)
    return lambda: samples


def _raise(error: Exception) -> NoReturn:
    raise error


def _packed(sample: Sample) -> FinishedSample:
    support = np.array(sample.support, np.int32) if sample.support else None
    return FinishedSample(
        sample.sample_id,
        np.array(sample.tokens, np.int32),
        np.array(sample.logprobs, np.float32),
        support=support,
        rounds=sample.rounds,
        accepted=sample.accepted,
    )


def _unpacked(request: Request, packed: FinishedSample) -> Sample:
    return Sample(
        packed.sample_id,
        request,
        [],
        tokens=packed.tokens.tolist(),
        logprobs=packed.logprobs.tolist(),
        support=[] if packed.support is None else list(packed.support),
        rounds=packed.rounds,
        accepted=packed.accepted,
        done=True,
    )


def spans_of(report: RoundReport) -> Iterator[Span]:
    """Yield what a round says of its slice: samples that came with it, then the round."""
    if report.moves:
        yield Span(
            report.slice,
            "exchange",
            report.began,
            report.began,
            report.moves,
            "",
            report.moved_bytes,
        )
    name = trees.name_of(report.strategy)
    yield Span(
        report.slice, "generate", report.began, report.ended, report.live, name, report.tokens
    )
