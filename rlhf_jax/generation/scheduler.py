"""Hold the batch of a slice, and assign samples to its rows. Host code.

Samples are admitted to free rows, finished ones free theirs, and the batch is halved when few
samples are left.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pallas_kernels.shapes import LANES
from rlhf_jax import mesh as meshes
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.history import keep_latest, known_texts
from rlhf_jax.generation.requests import GenerationConfig, Sample, is_ready
from rlhf_jax.generation.rows import Admission, Prefix
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.results import Results
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.mesh import Layout, place_rows
from rlhf_jax.types import Array, Strategy

# Prompts prefilled in one call, ahead of need; the last call may have 4, 2 or 1.
PREFILLED = 8
# Samples admitted to rows in one call.
ADMITTED = 8
# Padded length of a short prompt in tokens; longer ones have twice, four times ... as many.
NARROWEST_PROMPT = 32
# Most running samples of the same prompt that a lookup reads.
SIBLINGS = 3


@dataclasses.dataclass(frozen=True)
class PrefilledSample:
    """Hold a sample that waits for a row: its prompt is prefilled as row `source` of `prefix`."""

    sample: Sample
    prefix: Prefix
    source: int


@dataclasses.dataclass(frozen=True, eq=False)
class InFlightRound:
    """Describe a dispatched round whose results the host has not read."""

    strategy: Strategy
    samples: list[Sample | None]  # of each row, None for an idle one
    results: Results
    words: Array  # the results on their way to the host (`as_words`)
    context: int  # known tokens of the live samples
    draft_lag: int  # most tokens by which the draft model was behind in a sample
    undisturbed: bool  # its slice did nothing else since the previous round
    follows: bool  # it was dispatched while the previous round ran
    compilations: int  # begun and ended by the compiler at its dispatch
    dispatched: float  # time in seconds, by the clock of `time.perf_counter`
    # Rounds of its samples on other slices; they are received before it.
    receive_first: tuple[tuple[SliceBatch, InFlightRound], ...]
    moved_bytes: tuple[int, ...]  # of each sample that had come from another slice


@dataclasses.dataclass(eq=False)
class SliceBatch:
    """Hold the work of one slice: its rows, the samples it is to begin, its rounds in flight.

    This module changes its rows, and `rounds` its rounds. Others only put samples into its queue,
    or let running ones leave and join it (`assignment`).
    """

    number: int
    models: ModelPair
    layout: Layout
    state: DecodeState
    rows: list[Sample | None]  # the sample of each row, None for an idle one
    # samples to begin
    queue: collections.deque[Sample] = dataclasses.field(default_factory=collections.deque)
    prefilled: collections.deque[PrefilledSample] = dataclasses.field(
        default_factory=collections.deque
    )
    # the oldest first
    in_flight: collections.deque[InFlightRound] = dataclasses.field(
        default_factory=collections.deque
    )
    state_after_round: DecodeState | None = None  # as the last round leaves it
    # When the last results arrived, in seconds; None if they came before the host.
    received: float | None = None
    seen_unfinished: bool = False  # the oldest round still ran at the last poll
    # These two are of the next round: see `InFlightRound`.
    receive_first: list[tuple[SliceBatch, InFlightRound]] = dataclasses.field(default_factory=list)
    moved_bytes: list[int] = dataclasses.field(default_factory=list)
    # The results of `siblings`, and the rows they are for.
    siblings: np.ndarray | None = None
    siblings_of: list[Sample | None] = dataclasses.field(default_factory=list)
    # The latest text of each request that ended here, the last one at the end.
    ended_texts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    # Results of other work on the slice; they are ready when it is done.
    idle_work: list[Array] = dataclasses.field(default_factory=list)

    @property
    def live(self) -> list[Sample]:
        """Return the samples in its rows."""
        return [sample for sample in self.rows if sample is not None]

    def count_live(self) -> int:
        """Count the samples in its rows."""
        return len(self.rows) - self.rows.count(None)

    @property
    def samples(self) -> list[Sample]:
        """Return the samples in its rows and in its queue."""
        return [*self.live, *(waiting.sample for waiting in self.prefilled), *self.queue]

    @property
    def busy(self) -> bool:
        """Return whether it has anything left to decode."""
        return bool(self.queue or self.prefilled or self.in_flight or any(self.rows))

    @property
    def has_room(self) -> bool:
        """Return whether it may start other work: at most one call of it is unfinished."""
        return sum(not is_ready(work) for work in self.idle_work) < 2

    @property
    def results_ready(self) -> bool:
        """Return whether the results of its oldest round have arrived."""
        return bool(self.in_flight) and is_ready(self.in_flight[0].words)


def cache_length_for(longest: int, strategies: Iterable[Strategy], layout: Layout) -> int:
    """Return the length in tokens of a cache for samples of up to `longest` tokens.

    A round writes whole paths, a catch-up of the draft model whole chunks, and a kernel reads whole
    tiles.
    """
    length = longest + max(
        model_drafter.CATCH_UP_TOKENS, *(trees.bucket(strategy) + 1 for strategy in strategies)
    )
    return -(-length // LANES) * LANES if layout.kernels.tiled else length


def prompt_width(longest: int, limit: int) -> int:
    """Return the padded length, up to `limit`, of prefilled prompts of up to `longest` tokens."""
    return min(max(NARROWEST_PROMPT, 1 << (longest - 1).bit_length()), limit)


def shared(rows: int, layout: Layout) -> int:
    """Round a number of rows up to equal shares of the devices."""
    shards = layout.row_shards
    return -(-rows // shards) * shards


def row_bucket(live: int, most: int, decoding: GenerationConfig, layout: Layout) -> int:
    """Return the smallest of most, most/2, most/4 ... rows that holds `live` samples.

    It is at least `decoding.min_rows`, and gives all devices equal shares.
    """
    size = shared(most, layout)
    shards = layout.row_shards
    while size // 2 >= max(live, decoding.min_rows) and size % (2 * shards) == 0:
        size //= 2
    return size


def begin_slices(
    models: ModelPair, samples: int, decoding: GenerationConfig, layout: Layout
) -> list[SliceBatch]:
    """Return the batches of this process's slices, with the initial idle rows for `samples`.

    Slices shared with other processes are included.
    """
    target, drafter = models
    draft_config = None if drafter is None else drafter.config
    cache_length = cache_length_for(decoding.max_length, decoding.strategies, layout)
    earlier_length = (
        decoding.max_length if any(one.needs_earlier for one in decoding.drafters) else 0
    )
    parts = layout.split()
    slices = []
    for number, part in enumerate(parts):
        on_slice = models
        if len(parts) > 1:
            if not part.is_here:
                continue
            on_slice = meshes.on_slice(models, part)
        rows = min(max(samples, 1), decoding.max_rows)
        rows = row_bucket(rows, decoding.max_rows, decoding, layout=part)
        state = row_verbs.empty(
            target.config, draft_config, rows, cache_length, decoding.history, earlier_length, part
        )
        slices.append(SliceBatch(number, on_slice, part, state=state, rows=[None] * rows))
    return slices


def refill(batch: SliceBatch, decoding: GenerationConfig, reallocates: bool, drains: bool) -> None:
    """Admit waiting samples to free rows, after resizing the slice to the rows it needs.

    reallocates: samples are assigned to free rows, so the slice keeps rows for all its own. drains:
    it gets no further samples, so rows that none waits for are dropped.
    """
    if reallocates:
        waiting = len(batch.queue) + len(batch.prefilled)
        resize(batch, batch.count_live() + waiting, decoding)

    free = []
    if batch.prefilled or batch.queue:
        free = [row for row, sample in enumerate(batch.rows) if sample is None]
    while free and (batch.prefilled or batch.queue):
        if not batch.prefilled:
            _prefill(batch, decoding)
        prefix = batch.prefilled[0].prefix
        admitted = []
        while (
            free
            and batch.prefilled
            and batch.prefilled[0].prefix is prefix
            and len(admitted) < ADMITTED
        ):
            admitted.append((free.pop(0), batch.prefilled.popleft()))
        _admit(batch, prefix, admitted, decoding=decoding)

    if drains and not batch.queue and not batch.prefilled:
        resize(batch, batch.count_live(), decoding)


def prefill_shape(
    prompts: Sequence[int], decoding: GenerationConfig, layout: Layout
) -> tuple[int, int]:
    """Return the shape in which the first of some prompts are prefilled, given their lengths."""
    lengths = prompts[:PREFILLED]
    rows = shared(1 << (len(lengths) - 1).bit_length(), layout)
    return rows, prompt_width(max(lengths), decoding.max_length)


def _prefill(batch: SliceBatch, decoding: GenerationConfig) -> None:
    """Prefill the next prompts of the queue, each once for all of its consecutive samples."""
    groups: list[list[Sample]] = []
    while batch.queue:
        same = bool(groups) and batch.queue[0].request.id == groups[-1][0].request.id
        if not same and len(groups) == PREFILLED:
            break
        if not same:
            groups.append([])
        groups[-1].append(batch.queue.popleft())

    prompts = [group[0].prompt for group in groups]
    shape = prefill_shape([*map(len, prompts)], decoding, batch.layout)
    tokens = np.zeros(shape, np.int32)
    length = np.ones(shape[0], np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        length[row] = len(prompt)

    placed = place_rows((tokens, length), batch.layout)
    prefix = row_verbs.prefill(*batch.models, *placed, layout=batch.layout)
    for row, group in enumerate(groups):
        batch.prefilled.extend(PrefilledSample(sample, prefix, row) for sample in group)


def _admit(
    batch: SliceBatch,
    prefix: Prefix,
    admitted: Sequence[tuple[int, PrefilledSample]],
    decoding: GenerationConfig,
) -> None:
    """Begin samples, each in the row given with it; `prefix` holds all of their prompts."""
    new = row_verbs.no_admission(batch.state, ADMITTED)
    earlier_length = new["earlier"].shape[1]
    for i, (place, waiting) in enumerate(admitted):
        sample = waiting.sample
        batch.rows[place] = sample
        new["source"][i] = waiting.source
        new["row"][i] = place
        new["limit"][i] = sample.limit
        new["key"][i] = (decoding.seed, sample.sample_id)
        new["temperature"][i] = decoding.temperature_of(sample.request, sample.sample_id)
        new["history"][i] = known_texts(sample, batch.ended_texts, decoding.history)
        text = sample.request.earlier.get(sample.sample_id)
        if text is not None and earlier_length:
            aligned = np.concatenate([sample.prompt, text])[:earlier_length]
            new["earlier"][i, : len(aligned)] = aligned
            sample.confidence = {
                one.name: one.first_confidence for one in decoding.drafters if one.needs_earlier
            }
    admission = Admission(**new)
    batch.state = row_verbs.admit(batch.state, prefix, admission, layout=batch.layout)


def resize(batch: SliceBatch, wanted: int, decoding: GenerationConfig) -> None:
    """Resize the slice to the fewest rows that hold `wanted` samples, its live ones included."""
    size = row_bucket(max(wanted, 1), decoding.max_rows, decoding, layout=batch.layout)
    if size == len(batch.rows):
        return
    live = [row for row, sample in enumerate(batch.rows) if sample is not None]
    idle = [row for row, sample in enumerate(batch.rows) if sample is None]
    kept = (live + idle)[:size]
    added = size - len(kept)

    taken = np.array(kept + [0] * added, np.int32)
    state = row_verbs.resize(batch.state, taken, batch.layout)
    if added:
        # Rows past the end are dropped: so one program of a size suffices for any number of new
        # rows.
        new_rows = np.arange(size, dtype=np.int32) + len(kept)
        state = row_verbs.retire(state, new_rows, layout=batch.layout)
    batch.state = state
    batch.rows = [batch.rows[row] for row in kept] + [None] * added


def release_finished(
    slices: Sequence[SliceBatch],
    ended: Sequence[Sample],
    samples: Mapping[int, Sample],
    decoding: GenerationConfig,
) -> None:
    """Free the rows of samples that ended, and let lookups read their texts.

    Siblings read them from now on, and other prompts' samples if they begin later on that slice.
    samples: all of the call, by sample id.
    """
    if not ended:
        return
    reads = decoding.history and any(one.needs_history for one in decoding.drafters)
    for batch in slices:
        # No others: all processes that share a slice know which samples have ended there.
        for sample in batch.live if reads else ():
            if sample.done:
                text = np.array(sample.tokens, np.int32)
                keep_latest(batch.ended_texts, sample.request.id, text, size=decoding.history)
        batch.rows = [None if sample is None or sample.done else sample for sample in batch.rows]

    if not reads:
        return
    for sample in ended:
        text = np.array(sample.tokens, np.int32)
        for sibling in map(samples.__getitem__, sample.request.sample_ids):
            if not sibling.done:
                sibling.texts.append(text)

    requests = {sample.request.id for sample in ended}
    for batch in slices:
        siblings = [
            (row, sample)
            for row, sample in enumerate(batch.rows)
            if sample and sample.request.id in requests
        ]
        for start in range(0, len(siblings), ADMITTED):
            row = np.full(ADMITTED, len(batch.rows), np.int32)
            history = np.full((ADMITTED, decoding.history), -1, np.int32)
            for i, (place, sibling) in enumerate(siblings[start : start + ADMITTED]):
                row[i] = place
                history[i] = known_texts(sibling, batch.ended_texts, decoding.history)
            held = batch.state.history
            history = row_verbs.overwrite(held, row, history, layout=batch.layout)
            batch.state = dataclasses.replace(batch.state, history=history)


def siblings(batch: SliceBatch, decoding: GenerationConfig) -> np.ndarray:
    """Return the `sibling_rows` of a slice's rows, recomputed only if these have changed."""
    if batch.siblings is None or batch.siblings_of != batch.rows:
        batch.siblings = sibling_rows(batch.rows, decoding)
        batch.siblings_of = list(batch.rows)
    return batch.siblings


def sibling_rows(rows: Sequence[Sample | None], decoding: GenerationConfig) -> np.ndarray:
    """Return [B, SIBLINGS] int32: rows with running samples of the same prompt, -1 for none.

    It is [B, 0] without a lookup drafter.
    """
    reads = any(one.needs_history for one in decoding.drafters)
    siblings = np.full((len(rows), SIBLINGS if reads else 0), -1, np.int32)
    if not siblings.size:
        return siblings
    rows_of = collections.defaultdict(list)  # by request id
    for row, sample in enumerate(rows):
        if sample is not None:
            rows_of[sample.request.id].append(row)
    for group in rows_of.values():
        for row in group:
            others = [other for other in group if other != row][:SIBLINGS]
            siblings[row, : len(others)] = others
    return siblings
