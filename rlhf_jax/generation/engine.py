"""The host loop of generation: a queue of prompts, rows refilled as they finish, the batch shrinking in the tail.

The host decides and the device works: each round is chosen and dispatched before the counters of the one before it
are read, so a row that has finished meanwhile is a no-op for one round.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.shapes import LANES
from rlhf_jax.generation import board as boards
from rlhf_jax.generation import evidence, programs
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import tree as trees
from rlhf_jax.generation.board import Board, Waiting
from rlhf_jax.generation.drafters import model as model_drafter
from rlhf_jax.generation.programs import Ahead, Models, Results
from rlhf_jax.generation.samples import Decoding, Request, RoundReport, Sample
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, Evidence
from rlhf_jax.generation.strategy.select import Selector, Situation
from rlhf_jax.types import DecodeState, Model, Strategy


@dataclasses.dataclass(frozen=True)
class Setting:
    """What stays the same in one call of `generate`."""

    models: Models
    decoding: Decoding
    mesh: jax.sharding.Mesh | None
    selector: Selector | None
    ahead: Ahead | None


@dataclasses.dataclass(frozen=True)
class Flight:
    """A round that was dispatched and whose results are on their way."""

    strategy: Strategy
    samples: Board
    results: Results
    context: int  # known tokens of the live samples
    lag: int  # tokens that the draft model lacked, of the sample that lacked most
    clean: bool  # it waited for the round before it, and for nothing else
    compiled: int  # what `ahead` had begun and ended when it was dispatched


@dataclasses.dataclass
class Clock:
    """When the last counters arrived; None where the host came late and cannot know."""

    last: float | None = None

    def tick(self, waited: bool) -> float | None:
        """Seconds since the last arrival, where both are known."""
        before, self.last = self.last, time.perf_counter() if waited else None
        return None if before is None or self.last is None else self.last - before


def generate(
    target: Model,
    drafter: Model | None,
    requests: Iterable[Request],
    decoding: Decoding,
    mesh: jax.sharding.Mesh | None = None,
    observe: Callable[[RoundReport], None] = lambda report: None,
    selector: Selector | None = None,
    ahead: Ahead | None = None,
) -> Iterator[Sample]:
    """Yield every sample of `requests` as it finishes, in order of finishing.

    target and drafter have unrolled layers, in the dtype they decode in; the drafter is wanted by strategies of
    drafter 'model' only. Under replayable acceptance a sample's tokens are a function of (weights, prompt, seed,
    sample id, sampling): not of the strategies, the rows or the order. The `selector` chooses each round's strategy
    among those that `ahead` has compiled; without it the first is always taken, without `ahead` a strategy is
    compiled when it is first played. Raises ValueError for a prompt that does not fit. `observe` is called with
    each round's report.
    """
    if decoding.drafts_by("model") and drafter is None:
        raise ValueError("A strategy drafts with a model, and none is given; pass a drafter or choose another.")
    queue, waiting = collections.deque(requests), collections.deque[Waiting]()
    for request in queue:
        boards.check(request, decoding)
    setting, clock = Setting((target, drafter), decoding, mesh, selector, ahead), Clock()
    board: Board = [None] * boards.first_rows(sum(len(request.sample_ids) for request in queue), decoding, mesh)
    state = _empty_state(setting.models, len(board), decoding, mesh)
    flight: Flight | None = None
    played = state  # as the last round leaves it
    while queue or waiting or any(board) or flight:
        state = boards.refill(state, board, queue, waiting, setting.models, decoding, mesh)
        if not queue and not waiting:
            state, board = boards.shrink(state, board, decoding, mesh)
        landed, flight = flight, None
        if any(_may_run(sample, landed) for sample in board):
            last = not queue and not waiting
            state, flight = _take_off(state, board, landed, state is played, last, setting)
            played = state
        if landed:
            report, ended = _land(landed, board, clock, setting)
            if decoding.history and decoding.drafts_by("lookup"):
                state = boards.pass_on(state, board, waiting, ended, decoding, mesh)
            yield from ended
            observe(report)


def warm_up(
    target: Model,
    drafter: Model | None,
    samples: int,
    decoding: Decoding,
    mesh: jax.sharding.Mesh | None = None,
    look: bool = False,
) -> Mapping[str, float]:
    """Compile the first strategy's rounds of `samples` samples, for every number of rows they may shrink to.

    `look` is for a selector, which wants to know how its drafters would do, and what XLA says that a plain round of the
    most rows does: that is returned, "flops" and "bytes accessed".
    """
    rows = boards.first_rows(samples, decoding, mesh)
    models = (target, drafter)
    state = _empty_state(models, rows, decoding, mesh)
    does = programs.analysis(state, target, decoding, mesh) if look else {}
    while True:
        alone = boards.siblings([None] * rows, decoding)
        state, _ = programs.dispatch(state, models, decoding.strategies[0], alone, decoding, mesh, look)
        rows, before = boards.row_bucket(rows // 2, rows, decoding, mesh), rows
        if rows == before:
            return does
        state = row_verbs.shrink(state, np.arange(rows, dtype=np.int32), mesh)


def cache_slots(longest: int, strategies: Iterable[Strategy], kernels: Kernels = REFERENCE) -> int:
    """Slots of a cache for samples of up to `longest` tokens: a round writes whole paths, a catch-up whole chunks.

    A kernel reads whole tiles.
    """
    slots = longest + max(model_drafter.CHUNK, *(trees.bucket(strategy) + 1 for strategy in strategies))
    return slots if kernels == REFERENCE else -(-slots // LANES) * LANES


def _empty_state(models: Models, rows: int, decoding: Decoding, mesh) -> DecodeState:
    target, drafter = models
    draft = None if drafter is None else drafter.config
    slots = cache_slots(decoding.slots, decoding.strategies, decoding.kernels)
    earlier = decoding.slots if decoding.drafts_by("replay") else 0
    return row_verbs.empty(target.config, draft, rows, slots, decoding.history, earlier, target.embed.dtype, mesh)


def _may_run(sample: Sample | None, landed: Flight | None) -> bool:
    """Whether another round could give the sample anything: false once its limit is surely reached."""
    if sample is None or sample.done:
        return False
    in_flight = landed is not None and any(other is sample for other in landed.samples)
    return len(sample.prompt) + len(sample.tokens) + in_flight < sample.limit


def _take_off(
    state, board: Board, landed: Flight | None, still: bool, last: bool, setting: Setting
) -> tuple[DecodeState, Flight]:
    """Choose a strategy and start the round.

    `still`: no row was admitted or moved since the round before; `last`: no sample waits for a row.
    """
    ahead, decoding = setting.ahead, setting.decoding
    running = [sample for sample in board if sample is not None]
    context = sum(len(sample.prompt) + len(sample.tokens) for sample in running)
    fed = landed is not None and landed.strategy.drafter == "model"  # by the round that is on its way
    lag = 0 if fed else max(sample.unfed for sample in running)
    siblings = boards.siblings(board, decoding)
    strategy = _choose(state, board, siblings, context, lag, last, setting)
    busy = landed is not None and not landed.results.emission.count.is_ready()
    compiled = ahead.events if ahead else 0
    state, results = programs.dispatch(
        state, setting.models, strategy, siblings, decoding, setting.mesh, setting.selector is not None
    )
    return state, Flight(strategy, list(board), results, context, lag, busy and still, compiled)


def _choose(state, board: Board, siblings, context: int, lag: int, last: bool, setting: Setting) -> Strategy:
    """The selector's choice; what it would rather have is compiled meanwhile, as is its choice for fewer rows."""
    selector, ahead, decoding = setting.selector, setting.ahead, setting.decoding
    if selector is None:
        return decoding.strategies[0]
    rows, live = len(board), sum(sample is not None for sample in board)

    def ready(strategy: Strategy) -> bool:
        return ahead is None or ahead.ready(strategy, rows, decoding)

    def failed(strategy: Strategy) -> bool:
        return ahead is not None and ahead.failed(strategy, rows, decoding)

    most = programs.VERIFIED * boards.shared(1, setting.mesh) // rows
    left = _left(board) if last and decoding.drafts_by("replay") else {}
    choice = selector.choose(Situation(rows, live, context, lag, _classes(board, decoding), ready, most, failed, left))
    fewer = boards.row_bucket(rows // 2, rows, decoding, setting.mesh)
    stays = None if choice.reason == "probe" else choice.strategy
    for strategy, size in ((choice.wish, rows), (stays, fewer)):
        if ahead is not None and strategy is not None:
            ahead.want(state, setting.models, strategy, size, siblings, decoding, setting.mesh)
    return choice.strategy


def _classes(board: Board, decoding: Decoding) -> dict[str, np.ndarray]:
    """By drafter, [2, CLASSES] counts of running samples by whether the prompt is familiar, and confidence."""
    drafters = {strategy.drafter for strategy in decoding.strategies if strategy.parents}
    return {drafter: _by_class(board, drafter, lambda sample: 1).astype(np.int64) for drafter in drafters}


def _left(board: Board) -> dict[str, np.ndarray]:
    """[2, CLASSES] tokens that running samples have to come, by the classes of replay: those of the earlier text.

    Replay's classes last: a text that has left its earlier one rarely comes back.
    """

    def left(sample: Sample) -> int:
        earlier = sample.request.earlier.get(sample.sample_id, ())
        length = min(len(earlier) or sample.request.max_new_tokens, sample.request.max_new_tokens)
        return max(1, length - len(sample.tokens))

    return {"replay": _by_class(board, "replay", left)}


def _by_class(board: Board, drafter: str, figure: Callable[[Sample], int]) -> np.ndarray:
    """[2, CLASSES] a figure of running samples, summed by whether the prompt is familiar, and by confidence."""
    running = [sample for sample in board if sample is not None]
    cells = [CLASSES * sample.familiar + sample.confidence.get(drafter, 0) for sample in running]
    return np.bincount(cells, [figure(sample) for sample in running], 2 * CLASSES).reshape(2, CLASSES)


def _land(flight: Flight, board: Board, clock: Clock, setting: Setting) -> tuple[RoundReport, list[Sample]]:
    """Read a round's results: samples grow, finished ones leave their rows; the selector hears of it."""
    waited = not flight.results.emission.count.is_ready()
    arrived: Results = jax.device_get(flight.results)
    seconds = clock.tick(waited)
    ahead = setting.ahead
    alone = ahead is None or not (ahead.busy or ahead.events != flight.compiled)
    before = [sample.confidence if sample else {} for sample in flight.samples]  # what was known when it was drafted
    ended = _grow(flight, arrived, board)
    report = _report(flight, arrived, before, seconds if flight.clean and alone else None)
    if setting.selector is not None:
        setting.selector.arrived(report)
    return report, ended


def _grow(flight: Flight, arrived: Results, board: Board) -> list[Sample]:
    """Samples take what they gained; the finished ones."""
    emission, ended = arrived.emission, []
    for row, sample in enumerate(flight.samples):
        count = int(emission.count[row])
        if sample is None or count == 0:
            continue
        sample.tokens += emission.tokens[row, :count].tolist()
        sample.logprobs += emission.logprobs[row, :count].tolist()
        if emission.support is not None:
            sample.support += list(emission.support[row, :count].copy())
        sample.rounds += 1
        sample.accepted += int(emission.accepted[row])
        sample.done = bool(emission.done[row])
        sample.unfed = 0 if flight.strategy.drafter == "model" else sample.unfed + count
        sample.confidence = {name: int(signal.confidence[row]) for name, signal in arrived.signals.items()}
        if arrived.confidence is not None:
            sample.confidence["model"] = int(arrived.confidence[row])
        if sample.done:
            board[next(place for place, other in enumerate(board) if other is sample)] = None
            ended.append(sample)
    return ended


def _report(flight: Flight, arrived: Results, before: list[dict[str, int]], seconds: float | None) -> RoundReport:
    emission, strategy = arrived.emission, flight.strategy
    live = int((emission.count > 0).sum())
    return RoundReport(
        strategy=strategy,
        rows=len(emission.count),
        live=live,
        tokens=int(emission.count.sum()),
        accepted=int(emission.accepted.sum()),
        drafted=live * len(strategy.parents),
        context=flight.context,
        lag=flight.lag,
        seconds=seconds,
        evidence=_evidence(flight, arrived, before),
    )


def _evidence(flight: Flight, arrived: Results, before: list[dict[str, int]]) -> dict[str, Evidence]:
    """Of the drafter that drafted by its drafts, of the others by looking back.

    A round ends where its drafter was wrong, so looking back from there would see too many of its misses.
    """
    used, part = flight.strategy.drafter, arrived.emission.count > 0
    familiar = np.array([sample is not None and sample.familiar for sample in flight.samples])
    long = np.array([sample is not None and len(sample.tokens) >= DEPTHS for sample in flight.samples])
    others = {name: signal for name, signal in arrived.signals.items() if name != used}
    said = {name: evidence.of_signal(signal, part & long, familiar) for name, signal in others.items()}
    if used in arrived.signals or arrived.confidence is not None:
        confidence = np.array([classes.get(used, 0) for classes in before])
        said[used] = evidence.of_drafts(flight.strategy, arrived.emission, confidence, familiar)
    return said
