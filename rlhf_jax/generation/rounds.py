"""Dispatch the rounds of a slice and receive their results. Host code.

The next round is chosen and dispatched before the results of the previous one are read, so that the
device never waits for the host; a row that has finished meanwhile is a no-op for one round. But a
long replayed draft ends rows, or shows that they have diverged from their earlier text: the round
after it is chosen from its results.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlhf_jax.generation import precompile, scheduler
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import (
    GenerationConfig,
    RoundReport,
    Sample,
    StopStrings,
    is_ready,
)
from rlhf_jax.generation.scheduler import InFlightRound, SliceBatch
from rlhf_jax.generation.slice_groups import SliceGroup
from rlhf_jax.generation.speculative.protocol import drafter_of
from rlhf_jax.generation.speculative.results import Results, from_words, observe_drafters
from rlhf_jax.generation.speculative.round import speculative_round
from rlhf_jax.generation.strategy.acceptance import BANDS, CLASSES, bands
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.types import Strategy

# Most rounds of a slice in flight.
MOST_IN_FLIGHT = 2
# Replayed drafts per row from which on the results of a round are awaited.
LONG_REPLAY = 4

RoundResult = tuple[RoundReport, list[Sample]]  # a round's report, and the samples it ended


@dataclasses.dataclass(frozen=True)
class GenerationRun:
    """Hold the state that all slices share in one call of `generate`."""

    decoding: GenerationConfig
    selector: Selector | None
    compiler: BackgroundCompiler | None
    slice_group: SliceGroup = dataclasses.field(default_factory=SliceGroup)


def can_dispatch(batch: SliceBatch) -> bool:
    """Return whether the slice may begin another round.

    It may not if it must wait for results, or once all its samples are sure to reach their limits.
    """
    if len(batch.in_flight) == MOST_IN_FLIGHT:
        return False
    strategies = [sent.strategy for sent in batch.in_flight]
    if any(drafter_of(one).needs_earlier and len(one.parents) >= LONG_REPLAY for one in strategies):
        return False
    return any(
        not sample.done and sample.length + sample.rounds_in_flight < sample.limit
        for sample in batch.live
    )


def dispatch_round(batch: SliceBatch, drains: bool, run: GenerationRun) -> None:
    """Choose a strategy, start a round of the slice, and start copying its results to the host.

    drains: the slice gets no further samples.
    """
    live = batch.live
    draft_lag = _draft_lag(batch)
    context = sum(sample.length for sample in live)
    siblings = scheduler.siblings(batch, run.decoding)
    strategy = run.decoding.strategies[0]
    expected_gain = None
    if run.selector is not None:
        situation = _situation_of(batch, context, draft_lag, drains, run)
        strategy, expected_gain = _choose(
            run.selector, situation, batch, siblings=siblings, run=run
        )

    follows = bool(batch.in_flight) and not is_ready(batch.in_flight[-1].words)
    compilations = run.compiler.programs.events if run.compiler else 0
    dispatched = time.perf_counter()
    undisturbed = batch.state is batch.state_after_round
    batch.state, results, words = speculative_round(
        operator.call,
        batch.state,
        batch.models,
        strategy,
        siblings,
        run.decoding,
        layout=batch.layout,
        looks_back=run.selector is not None,
        expected_gain=expected_gain,
    )
    words.copy_to_host_async()

    batch.in_flight.append(
        InFlightRound(
            strategy=strategy,
            samples=list(batch.rows),
            results=results,
            words=words,
            context=context,
            draft_lag=draft_lag,
            undisturbed=undisturbed,
            follows=follows,
            compilations=compilations,
            dispatched=dispatched,
            receive_first=tuple(batch.receive_first),
            moved_bytes=tuple(batch.moved_bytes),
        )
    )
    batch.state_after_round = batch.state
    batch.receive_first = []
    batch.moved_bytes = []
    for sample in live:
        sample.rounds_in_flight += 1


def _draft_lag(batch: SliceBatch) -> int:
    """Return the most tokens by which the draft model is behind in a sample.

    A round of its own in flight reads all that the samples in it have by now.
    """
    fed = set()
    if batch.in_flight:
        before = batch.in_flight[-1]
        if drafter_of(before.strategy).needs_model:
            fed = {sample.sample_id for sample in before.samples if sample is not None}
    return max(0 if sample.sample_id in fed else sample.unfed for sample in batch.live)


def _situation_of(
    batch: SliceBatch, context: int, draft_lag: int, drains: bool, run: GenerationRun
) -> Situation:
    """Describe the next round of the slice to the selector.

    context: total tokens of its samples. drains: the slice gets no further samples.
    """
    decoding = run.decoding
    compiler = run.compiler
    layout = batch.layout
    live = batch.live
    rows = len(batch.rows)

    # [D, CLASSES] samples by confidence, on each of several devices with separate budgets.
    by_device = {}
    for name in (one.name for one in decoding.drafters if one.packs and layout.row_shards > 1):
        kinds = [one.confidence.get(name, 0) if one else CLASSES for one in batch.rows]
        on_device = np.array(kinds).reshape(layout.row_shards, -1, 1)
        by_device[name] = (on_device == np.arange(CLASSES)).sum(axis=1)

    # Only of drafters by an earlier text, as their classes last: a text that has diverged from its
    # earlier one rarely returns to it.
    left = {}
    last = drains and not batch.queue and not batch.prefilled
    for name in (one.name for one in decoding.drafters if last and one.needs_earlier):
        tokens = []
        for sample in live:
            most = sample.request.max_new_tokens
            earlier = len(sample.request.earlier.get(sample.sample_id, ()))
            tokens.append(max(1, min(earlier or most, most) - len(sample.tokens)))
        left[name] = _sum_by_class(live, name, tokens)

    return Situation(
        rows=rows,
        live=len(live),
        context=context,
        draft_lag=draft_lag,
        classes={
            one.name: _sum_by_class(live, one.name, [1] * len(live)).astype(np.int64)
            for one in decoding.drafters
        },
        ready=lambda one: compiler is None or compiler.ready(one, rows, decoding, layout=layout),
        most_nodes=precompile.VERIFIED * layout.row_shards // rows,
        failed=compiler.failed(rows, decoding, layout) if compiler else (),
        left=left,
        slice=batch.number,
        by_device=by_device,
        bands=np.bincount(bands(np.array([len(one.tokens) for one in live])), minlength=BANDS),
    )


def _sum_by_class(samples: Sequence[Sample], drafter: str, figures: list[int]) -> np.ndarray:
    """Sum figures of samples by whether the prompt was seen, and by confidence: [2, CLASSES]."""
    cells = [CLASSES * one.seen_prompt + one.confidence.get(drafter, 0) for one in samples]
    return np.bincount(cells, figures, 2 * CLASSES).reshape(2, CLASSES)


def _choose(
    selector: Selector,
    situation: Situation,
    batch: SliceBatch,
    siblings: np.ndarray,
    run: GenerationRun,
) -> tuple[Strategy, np.ndarray | None]:
    """Return the next round's strategy, and the expected gains that rank a packed one's drafts.

    A better strategy is compiled in the background, as is the choice for fewer rows.
    """
    compiler = run.compiler
    decoding = run.decoding
    layout = batch.layout
    rows = len(batch.rows)

    def decide() -> tuple[Strategy, np.ndarray | None, tuple[Strategy, int] | None]:
        choice = selector.choose(situation)
        stays = None if choice.reason == "probe" else choice.strategy
        fewer = scheduler.row_bucket(rows // 2, rows, decoding, layout=layout)
        for strategy, size in ((choice.not_yet_compiled, rows), (stays, fewer)):
            if compiler and strategy and compiler.can_submit(strategy, size, decoding, layout):
                return choice.strategy, choice.expected_gain, (strategy, size)
        return choice.strategy, choice.expected_gain, None

    strategy, expected_gain, submitted = run.slice_group.decide_together(decide)
    if compiler and submitted:
        compiler.submit(
            *submitted,
            state=batch.state,
            models=batch.models,
            siblings=siblings,
            decoding=decoding,
            layout=layout,
        )
    return strategy, expected_gain


def receive_next(batch: SliceBatch, run: GenerationRun) -> Iterator[RoundResult]:
    """Receive the slice's oldest round, after those of other slices with its samples.

    Its results are read: samples grow, and the selector observes the round.
    """
    if not batch.in_flight:
        return
    yield from _receive_first(batch.in_flight[0].receive_first, run)
    sent = batch.in_flight.popleft()
    # Without a wait the results came earlier than the host, at an unknown time.
    waited = batch.seen_unfinished or not is_ready(sent.words)
    batch.seen_unfinished = False
    results = from_words(np.asarray(sent.words), sent.results)

    began = batch.received if sent.follows else sent.dispatched
    batch.received = time.perf_counter() if waited else None
    programs = run.compiler and run.compiler.programs
    quiet = programs is None or not (programs.left or programs.events != sent.compilations)
    seconds = None
    if sent.undisturbed and quiet and began is not None and batch.received is not None:
        seconds = batch.received - began

    confidence = [sample.confidence if sample else {} for sample in sent.samples]
    ended = _grow(sent, results, run.decoding.stop_strings)
    report = _report(batch.number, sent, results, confidence=confidence, seconds=seconds)
    report = dataclasses.replace(report, finished=len(ended))
    if run.selector is not None:
        run.selector.observe_round(report)
    yield report, ended


def receive_all(batch: SliceBatch, run: GenerationRun) -> Iterator[RoundResult]:
    """Receive all rounds in flight of the samples of a slice, on any slice."""
    yield from _receive_first(batch.receive_first, run)
    while batch.in_flight:
        yield from receive_next(batch, run)


def _receive_first(
    rounds: Iterable[tuple[SliceBatch, InFlightRound]], run: GenerationRun
) -> Iterator[RoundResult]:
    """Receive these rounds, and those that must come before them."""
    for batch, sent in rounds:
        while sent in batch.in_flight:
            yield from receive_next(batch, run)


def _grow(sent: InFlightRound, results: Results, stop_strings: StopStrings | None) -> list[Sample]:
    """Append a round's tokens to samples, and return the samples that it ended.

    The device does not know stop strings: tokens after one are cut off here.
    """
    emission = results.emission
    confidence = {name: own.confidence.tolist() for name, own in results.hindsight.items()}
    if results.confidence is not None:
        confidence[sent.strategy.drafter] = results.confidence.tolist()
    feeds_model = drafter_of(sent.strategy).needs_model
    # Lists are faster than arrays for reading single numbers.
    tokens, logprobs, accepted, done = (
        leaf.tolist()
        for leaf in (emission.tokens, emission.logprobs, emission.accepted, emission.done)
    )

    ended = []
    for row, count in enumerate(emission.count.tolist()):
        sample = sent.samples[row]
        if sample is None:
            continue
        sample.rounds_in_flight -= 1
        if count == 0 or sample.done:
            continue
        sample.tokens += tokens[row][:count]
        sample.logprobs += logprobs[row][:count]
        if emission.top_k_ids is not None:
            sample.top_k_ids += list(emission.top_k_ids[row, :count].copy())
        sample.rounds += 1
        sample.accepted += accepted[row]
        sample.done = done[row]
        end = stop_strings and stop_strings.end(sample.tokens, count)
        if end is not None:
            sample.done = True
            for column in (sample.tokens, sample.logprobs, sample.top_k_ids):
                del column[end:]
        sample.unfed = 0 if feeds_model else sample.unfed + count
        sample.confidence = {name: classes[row] for name, classes in confidence.items()}
        if sample.done:
            ended.append(sample)
    return ended


def _report(
    number: int,
    sent: InFlightRound,
    results: Results,
    confidence: list[dict[str, int]],
    seconds: float | None,
) -> RoundReport:
    """Report a round of slice `number`; confidence: of each row's drafters before the round."""
    count = results.emission.count
    live = int(np.count_nonzero(count))
    share = results.budget_share
    drafted = live * len(sent.strategy.parents)
    return RoundReport(
        strategy=sent.strategy,
        rows=len(count),
        live=live,
        tokens=int(count.sum()),
        accepted=int(results.emission.accepted.sum()),
        drafted=drafted if share is None else int(share.drafts[count > 0].sum()),
        context=sent.context,
        draft_lag=sent.draft_lag,
        seconds=seconds,
        observations=observe_drafters(results, sent.strategy, sent.samples, confidence),
        slice=number,
        began=sent.dispatched,
        ended=time.perf_counter(),
        moves=len(sent.moved_bytes),
        moved_bytes=sum(sent.moved_bytes),
    )
