"""The rounds of one slice: chosen and dispatched (`dispatch_round`), then read (`receive_round`). Host code.

The next round is chosen and dispatched before the counters of the one before it are read, so a row
that has finished meanwhile is a no-op for one round. But a long replayed draft ends rows or shows
that they have strayed: the round after it is chosen when it has landed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from rlhf_jax.generation import precompile
from rlhf_jax.generation import scheduler as boards
from rlhf_jax.generation.precompile import BackgroundCompiler, Results
from rlhf_jax.generation.requests import GenerationConfig, RoundReport, Sample
from rlhf_jax.generation.slice_batch import Board, InFlightRound, Instance
from rlhf_jax.generation.strategy import observations
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS, Observations
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import row_shards
from rlhf_jax.runtime.slice_groups import SliceGroup
from rlhf_jax.types import Strategy

FAR = 4  # replayed drafts of a row's round that are waited for


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all slices share in one call of `generate`."""

    decoding: GenerationConfig
    selector: Selector | None
    ahead: BackgroundCompiler | None
    slice_group: SliceGroup = dataclasses.field(default_factory=SliceGroup)


def can_dispatch(instance: Instance) -> bool:
    """Whether another round may begin: false while one must be known first, or once all limits are
    surely reached.
    """
    if len(instance.in_flight) == 2 or any(
        _goes_far(flight.strategy) for flight in instance.in_flight
    ):
        return False
    return any(
        not sample.done and len(sample.prompt) + len(sample.tokens) + sample.flying < sample.limit
        for sample in instance.live
    )


def _goes_far(strategy: Strategy) -> bool:
    """Whether a row may well end in its round, or show that it has strayed: both change what is
    best next.
    """
    return strategy.drafter == "replay" and len(strategy.parents) >= FAR


def dispatch_round(instance: Instance, drains: bool, setting: Setting) -> None:
    """Choose a strategy and start the round."""
    ahead = setting.ahead
    decoding = setting.decoding
    live = instance.live
    context = sum(len(sample.prompt) + len(sample.tokens) for sample in live)
    before = instance.in_flight[-1] if instance.in_flight else None
    drafted = before is not None and before.strategy.drafter == "model"
    # by the round that is on its way
    fed = set(map(id, before.samples)) if before is not None and drafted else set()
    lag = max(0 if id(sample) in fed else sample.unfed for sample in live)
    siblings = boards.siblings(instance.board, decoding)
    last = drains and not instance.queue and not instance.waiting
    strategy, worth = _choose(instance, siblings, context, lag, last, setting)
    follows = before is not None and not before.results.emission.count.is_ready()
    compiled = ahead.events if ahead else 0
    began = time.perf_counter()
    clean = instance.state is instance.played
    look = setting.selector is not None
    where = instance.models, strategy, siblings, decoding, instance.mesh, look
    instance.state, results = precompile.dispatch(instance.state, *where, worth)
    after = tuple(instance.arrived)
    moved = tuple(instance.moved)
    instance.arrived = []
    instance.moved = []
    known = context, lag, clean, follows, compiled, began, after, moved
    instance.in_flight.append(InFlightRound(strategy, list(instance.board), results, *known))
    instance.played = instance.state
    for sample in live:
        sample.flying += 1


def _choose(
    instance: Instance, siblings: np.ndarray, context: int, lag: int, last: bool, setting: Setting
) -> tuple[Strategy, np.ndarray | None]:
    """The selector's choice, and the worth of drafts by which packed rounds choose.

    What it would rather have is compiled meanwhile, as is its choice for fewer rows.
    """
    selector = setting.selector
    ahead = setting.ahead
    decoding = setting.decoding
    mesh = instance.mesh
    if selector is None:
        return decoding.strategies[0], None
    board = instance.board
    rows = len(board)
    live = len(instance.live)

    def ready(strategy: Strategy) -> bool:
        return ahead is None or ahead.ready(strategy, rows, decoding, mesh)

    most = precompile.VERIFIED * boards.shared(1, mesh) // rows
    left = _left(board) if last and decoding.uses_drafter("replay") else {}
    classes = _classes(board, decoding)
    failed = ahead.failed(rows, decoding, mesh) if ahead else ()
    by_device = {"replay": _by_device(board, mesh)} if "replay" in classes else {}
    situation = Situation(
        rows, live, context, lag, classes, ready, most, failed, left, instance.number, by_device
    )

    def decide() -> tuple[Strategy, np.ndarray | None, tuple[Strategy, int] | None]:
        choice = selector.choose(situation)
        stays = None if choice.reason == "probe" else choice.strategy
        fewer = boards.row_bucket(rows // 2, rows, decoding, mesh)
        for not_yet_compiled, size in ((choice.not_yet_compiled, rows), (stays, fewer)):
            if ahead and not_yet_compiled and ahead.may(not_yet_compiled, size, decoding, mesh):
                return choice.strategy, choice.expected_gain, (not_yet_compiled, size)
        return choice.strategy, choice.expected_gain, None

    strategy, worth, wanted = setting.slice_group.decide_together(decide)
    if ahead and wanted:
        ahead.want(instance.state, instance.models, *wanted, siblings, decoding, mesh)
    return strategy, worth


def _classes(board: Board, decoding: GenerationConfig) -> dict[str, np.ndarray]:
    """By drafter, [2, CLASSES] counts of running samples by whether the prompt is familiar, and
    confidence.
    """
    drafters = {strategy.drafter for strategy in decoding.strategies if strategy.parents}
    return {
        drafter: _by_class(board, drafter, lambda sample: 1).astype(np.int64)
        for drafter in drafters
    }


def _by_device(board: Board, mesh) -> np.ndarray:
    """[D, CLASSES] running samples by replay's confidence, on each of the devices that rows lie
    on.
    """
    kinds = np.array(
        [CLASSES if sample is None else sample.confidence.get("replay", 0) for sample in board]
    )
    return (kinds.reshape(row_shards(mesh), -1, 1) == np.arange(CLASSES)).sum(axis=1)


def _left(board: Board) -> dict[str, np.ndarray]:
    """[2, CLASSES] tokens that running samples have to come, by the classes of replay: those of the
    earlier text.

    Replay's classes last: a text that has left its earlier one rarely comes back.
    """

    def left(sample: Sample) -> int:
        earlier = sample.request.earlier.get(sample.sample_id, ())
        length = min(len(earlier) or sample.request.max_new_tokens, sample.request.max_new_tokens)
        return max(1, length - len(sample.tokens))

    return {"replay": _by_class(board, "replay", left)}


def _by_class(board: Board, drafter: str, figure: Callable[[Sample], int]) -> np.ndarray:
    """[2, CLASSES] a figure of running samples, summed by whether the prompt is familiar, and by
    confidence.
    """
    running = [sample for sample in board if sample is not None]
    cells = [CLASSES * sample.seen_prompt + sample.confidence.get(drafter, 0) for sample in running]
    return np.bincount(cells, [figure(sample) for sample in running], 2 * CLASSES).reshape(
        2, CLASSES
    )


def receive_round(instance: Instance, setting: Setting) -> tuple[RoundReport, list[Sample]]:
    """Read the oldest round's results: samples grow, the selector hears of it; the finished
    ones.
    """
    flight = instance.in_flight.popleft()
    waited = instance.watched or not flight.results.emission.count.is_ready()
    instance.watched = False
    arrived: Results = jax.device_get(flight.results)
    seconds = instance.clock.tick(waited, None if flight.follows else flight.began)
    ahead = setting.ahead
    alone = ahead is None or not (ahead.busy or ahead.events != flight.compiled)
    # what was known when it was drafted
    before = [sample.confidence if sample else {} for sample in flight.samples]
    ended = _grow(flight, arrived)
    report = _report(instance, flight, arrived, before, seconds if flight.clean and alone else None)
    if setting.selector is not None:
        setting.selector.observe_round(report)
    return report, ended


def _grow(flight: InFlightRound, arrived: Results) -> list[Sample]:
    """Samples take what they gained; the finished ones."""
    emission = arrived.emission
    ended = []
    for row, sample in enumerate(flight.samples):
        if sample is None:
            continue
        sample.flying -= 1
        count = int(emission.count[row])
        if count == 0:
            continue
        sample.tokens += emission.tokens[row, :count].tolist()
        sample.logprobs += emission.logprobs[row, :count].tolist()
        if emission.support is not None:
            sample.support += list(emission.support[row, :count].copy())
        sample.rounds += 1
        sample.accepted += int(emission.accepted[row])
        sample.done = bool(emission.done[row])
        sample.unfed = 0 if flight.strategy.drafter == "model" else sample.unfed + count
        sample.confidence = {
            name: int(signal.confidence[row]) for name, signal in arrived.signals.items()
        }
        if arrived.confidence is not None:
            sample.confidence["model"] = int(arrived.confidence[row])
        if sample.done:
            ended.append(sample)
    return ended


def _report(
    instance: Instance,
    flight: InFlightRound,
    arrived: Results,
    before: list[dict[str, int]],
    seconds: float | None,
) -> RoundReport:
    emission = arrived.emission
    strategy = flight.strategy
    live = int((emission.count > 0).sum())
    return RoundReport(
        strategy=strategy,
        rows=len(emission.count),
        live=live,
        tokens=int(emission.count.sum()),
        accepted=int(emission.accepted.sum()),
        drafted=int(_drafts(flight, arrived)[emission.count > 0].sum()),
        context=flight.context,
        lag=flight.lag,
        seconds=seconds,
        evidence=_evidence(flight, arrived, before),
        slice=instance.number,
        began=flight.began,
        ended=time.perf_counter(),
        moves=len(flight.moved),
        moved_bytes=sum(flight.moved),
    )


def _drafts(flight: InFlightRound, arrived: Results) -> np.ndarray:
    """[B] drafts that each row had, or was to have."""
    return (
        np.full(len(flight.samples), len(flight.strategy.parents))
        if arrived.spent is None
        else arrived.spent.drafts
    )


def _evidence(
    flight: InFlightRound, arrived: Results, before: list[dict[str, int]]
) -> dict[str, Observations]:
    """Of the drafter that drafted by its drafts, of the others by looking back.

    A round ends where its drafter was wrong, so looking back from there would see too many of its
    misses.
    """
    used = flight.strategy.drafter
    part = arrived.emission.count > 0
    seen_prompt = np.array([sample is not None and sample.seen_prompt for sample in flight.samples])
    long = np.array(
        [sample is not None and len(sample.tokens) >= DEPTHS for sample in flight.samples]
    )
    others = {name: signal for name, signal in arrived.signals.items() if name != used}
    said = {
        name: observations.of_hindsight(signal, part & long, seen_prompt)
        for name, signal in others.items()
    }
    if used in arrived.signals or arrived.confidence is not None:
        confidence = np.array([classes.get(used, 0) for classes in before])
        allowed = np.full(len(confidence), len(flight.strategy.parents))
        if arrived.spent is not None:
            allowed = np.where(arrived.spent.short, arrived.spent.drafts, allowed)
        said[used] = observations.of_drafts(
            flight.strategy, arrived.emission, confidence, seen_prompt, allowed
        )
    return said
