"""The generation stage: all samples of some prompts, from all slices and processes, in order."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation import precompile
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.capability import DynamicSampling
from rlhf_jax.generation.engine import IdleWork, generate
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.reallocation.planner import ClusterView, Reallocation
from rlhf_jax.generation.requests import (
    GenerationConfig,
    GenerationCounts,
    Request,
    RoundReport,
    Sample,
    as_sequences,
)
from rlhf_jax.generation.scheduler import shared
from rlhf_jax.generation.slice_groups import StageAborted, failed, slice_group_of
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import teacher
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.generation.strategy.acceptance import Observations
from rlhf_jax.generation.strategy.cost import Costs
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import Layout
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.runtime import distributed, messages, to_host
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.types import Model

T = TypeVar("T")

# The factor on counts of accepted drafts after each policy update.
KEPT_ACCEPTANCE = 0.5
# Most finished texts that a draft model reads after a stage.
TEXTS_READ = 8
# The draft model reads at most this share of texts: reading costs far less than it saves.
TEXTS_FOR_ONE_READ = 16


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """Hold the settings of a run's generation; constant from step to step."""

    decoding: GenerationConfig
    layout: Layout
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    # of each sample of a prompt; none where all have that of `decoding`
    temperatures: tuple[float, ...] = ()
    # shares samples and temperatures out by capability; None: prompts have equal shares
    dynamic: DynamicSampling | None = None
    # more roll-outs, at most, in place of prompts without signal
    resample: int = 0
    # most samples of a prompt that repeat the noise of earlier ones
    repeated_noise: int = 0
    # compiles strategies before they are used; None: on first use
    compiler: BackgroundCompiler | None = None
    # where samples run; None: they stay on the slice they were dealt to
    plan_reallocation: Callable[[ClusterView], Reallocation] | None = None
    # slices are served in turn, so that a run is reproducible
    in_turn: bool = False
    # approximate seconds of a slice to score a token of finished samples; 0: no slice does
    scoring_seconds: float = 0.0

    def shares(self, capability: np.ndarray) -> tuple[list[int], list[tuple[float, ...]]]:
        """Return the number of samples of each prompt, and their temperatures if they vary."""
        if self.dynamic is None:
            count = len(capability)
            own = [self.temperatures] * count if self.temperatures else []
            return [self.samples_per_prompt] * count, own
        counts = self.dynamic.samples(capability).tolist()
        warm = self.dynamic.temperatures(capability).tolist()
        return counts, [(own,) * count for own, count in zip(warm, counts, strict=True)]


@dataclasses.dataclass
class StageRecord:
    """Count the rounds of a stage on this process, and record when each slice ran them."""

    counts: GenerationCounts = dataclasses.field(default_factory=GenerationCounts)
    spans: list[Span] = dataclasses.field(default_factory=list)
    # when the stage began, by the clock of `time.perf_counter`
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def add(self, report: RoundReport) -> None:
        """Add a round: the samples that moved to its slice before it, then the round itself."""
        self.counts.add(report)
        if report.moves:
            self.spans.append(
                Span(
                    report.slice,
                    "exchange",
                    began=report.began,
                    ended=report.began,
                    rows=report.moves,
                    label="",
                    amount=report.moved_bytes,
                )
            )
        self.spans.append(
            Span(
                report.slice,
                "generate",
                began=report.began,
                ended=report.ended,
                rows=report.live,
                label=trees.name_of(report.strategy),
                amount=report.tokens,
            )
        )


@messages.register
@dataclasses.dataclass(frozen=True)
class FinishedSample:
    """Carry a finished sample to other processes."""

    sample_id: int
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    top_k_ids: np.ndarray | None  # [T, top_k] int32, under top-k
    rounds: int
    accepted: int


def generate_samples(
    models: ModelPair,
    requests: Sequence[Request],
    decoding: GenerationConfig,
    settings: GenerationSettings,
    assignment_policy: AssignmentPolicy,
    *,
    selector: Selector | None = None,
    observe: Callable[[RoundReport], None] = lambda report: None,
    finished: Callable[[Sample], None] = lambda sample: None,
    idle_work: IdleWork | None = None,
) -> list[Sample]:
    """Generate all samples of the requests, in their order, with every process of the run.

    The processes that share a slice decode their share of the requests or, with planned
    reallocation, the samples assigned to it. `finished` is called with each sample that ends here.
    Raises the error of any process.
    """
    slice_group = slice_group_of(settings.layout)
    own_requests = requests if assignment_policy.plan_reallocation else slice_group.share(requests)
    decoded = generate(
        *models,
        own_requests,
        decoding,
        layout=settings.layout,
        observe=observe,
        selector=selector,
        compiler=settings.compiler,
        assignment_policy=assignment_policy,
        idle_work=idle_work,
    )
    samples: list[Sample] = []
    error: Exception | None = None
    try:
        with contextlib.suppress(StageAborted), failed(assignment_policy.name):
            for sample in decoded if slice_group.ranks else ():
                samples.append(sample)
                finished(sample)
    except Exception as raised:
        # Processes that share a slice may wait on their devices for one that failed: there the
        # error ends them. They stop where all are between two rounds, and so can communicate.
        if not distributed.started() or (slice_group.several and not isinstance(raised, Stopped)):
            raise
        error = raised

    if distributed.started():
        samples = _share_samples(samples, requests, error, leads=slice_group.leads)
        distributed.run_on_leader(lambda: distributed.delete_published(assignment_policy.name))
    by_id = {sample.sample_id: sample for sample in samples}
    return [by_id[sample_id] for request in requests for sample_id in request.sample_ids]


def _share_samples(
    samples: Sequence[Sample], requests: Sequence[Request], error: Exception | None, leads: bool
) -> list[Sample]:
    """Return the finished samples of all processes; raise the error of any of them.

    leads: whether this process reports for those that share its slices, and have the same samples.
    """

    def share() -> list[FinishedSample]:
        if error is not None:
            raise error
        return [
            FinishedSample(
                one.sample_id,
                np.array(one.tokens, np.int32),
                np.array(one.logprobs, np.float32),
                top_k_ids=np.array(one.top_k_ids, np.int32) if one.top_k_ids else None,
                rounds=one.rounds,
                accepted=one.accepted,
            )
            for one in (samples if leads else ())
        ]

    shares = distributed.gather_results(share)
    request_of = {sample_id: request for request in requests for sample_id in request.sample_ids}
    return [
        Sample(
            one.sample_id,
            request_of[one.sample_id],
            [],
            tokens=one.tokens.tolist(),
            logprobs=one.logprobs.tolist(),
            top_k_ids=[] if one.top_k_ids is None else list(one.top_k_ids),
            rounds=one.rounds,
            accepted=one.accepted,
            done=True,
        )
        for shared_samples in shares
        for one in shared_samples
    ]


def from_leader(value: T, settings: GenerationSettings) -> T:
    """Return on all processes the value of the one that leads generation."""
    leader = slice_group_of(settings.layout).all_ranks[0]
    return distributed.broadcast(value, leader) if distributed.started() else value


def by_group(own: object, nothing: object, settings: GenerationSettings) -> list:
    """Return the report of each group's slices; the first process of a group reports."""
    leads = slice_group_of(settings.layout).leads
    return distributed.gather(own if leads else nothing)


def end_stage(
    selector: Selector | None,
    drafter: Model | None,
    samples: Sequence[Sample],
    decoding: GenerationConfig,
    settings: GenerationSettings,
) -> Selector | None:
    """Let the selector learn from a finished stage; return it for the next stage.

    A draft model reads a few texts once, teacher-forced, so that drafters by its own draws are
    measured even if they never drafted. Under rejection it does not: there text has noise of its
    own, and ranks in the model's draw do not predict acceptance.
    """
    if selector is None:
        return None
    learning = [one.name for one in decoding.drafters if one.learns_from_texts]
    if drafter is not None and learning and not decoding.rule.depends_on_drafts:
        chosen = samples[:: max(1, len(samples) // TEXTS_READ)]
        chosen = chosen[: min(TEXTS_READ, max(1, len(samples) // TEXTS_FOR_ONE_READ))]
        observed = read_texts(drafter, chosen, decoding, settings)
        for name in learning:
            selector.observe_text(name, observed)
    selector.stage_ended(KEPT_ACCEPTANCE)
    if distributed.started():  # all begin the next stage alike
        selector.restore(from_leader(selector.state(), settings))
    return selector


def read_texts(
    drafter: Model,
    samples: Sequence[Sample],
    decoding: GenerationConfig,
    settings: GenerationSettings,
) -> Observations:
    """Measure the drafts that the draft model would have made on finished texts.

    It reads TEXTS_READ rows, or as many more as the devices share evenly.
    """
    texts = as_sequences(samples, decoding.max_length)
    rows = shared(TEXTS_READ, settings.layout)
    padding = ((0, rows - len(samples)), (0, 0))
    tokens = np.pad(texts.tokens, padding)
    mask = np.pad(texts.mask, padding)
    key = np.full((rows, 2), decoding.seed, np.uint32)
    key[: len(samples), 1] = texts.columns["sample_ids"]

    temperature = np.ones(rows, np.float32)
    temperature[: len(samples)] = [
        decoding.temperature_of(one.request, one.sample_id) for one in samples
    ]

    placed = meshes.place_rows((tokens, mask, key, temperature), settings.layout)
    truncation = decoding.sampling.truncation
    scored = teacher.score(drafter, *placed, truncation, settings.layout)
    rank, confidence = to_host.fetch(scored)
    seen = [sample.seen_prompt for sample in samples] + [False] * (rows - len(samples))
    return teacher.as_observations(rank, confidence, mask, np.array(seen))


def first_programs(
    models: ModelPair, prompts: Sequence[int], settings: GenerationSettings, looks_back: bool
) -> tuple[list[Callable[[], object]], Callable[[], Mapping[str, float]]]:
    """Return the compilation jobs of a step's first programs, and the analysis of a round.

    prompts: tokens of each prompt of a step. See `precompile.first_programs`.
    """
    group = slice_group_of(settings.layout)
    if not group.ranks:
        return [], dict
    prompts_here = prompts if settings.plan_reallocation else group.share(prompts)
    samples = len(prompts_here) * settings.samples_per_prompt
    return precompile.first_programs(
        models, samples, prompts_here, settings.decoding, settings.layout, looks_back
    )


def begin_selectors(
    selectors: Sequence[Selector],
    settings: GenerationSettings,
    analyse: Callable[[], Mapping[str, float]],
    costs: Callable[[Mapping[str, float]], Costs],
) -> list[Selector]:
    """Return selectors with the given initial costs, unless they have measured some.

    costs: from XLA's analysis of a plain round ("flops", "bytes accessed"), as `analyse` returns
    it.
    """
    work = from_leader(analyse() if selectors else {}, settings)
    begun = copy.deepcopy(list(selectors))
    for selector in begun:
        selector.begin(costs(work))
    return begun
