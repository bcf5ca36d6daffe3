"""The host loop of generation: a queue of prompts, rows refilled as they finish, the batch shrinking in the tail.

The host decides and the device works: each round is dispatched before the counters of the one before it are read,
so a row that has finished meanwhile is a no-op for one round.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import tree as trees
from rlhf_jax.generation.drafters import lookup
from rlhf_jax.generation.drafters import model as model_drafter
from rlhf_jax.generation.round import run_round
from rlhf_jax.generation.rows import Admission, Prefix
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.mesh import place_rows
from rlhf_jax.types import DecodeState, Emission, Model, Strategy

PREFILLED = 8  # prompts prefilled in one call, ahead of need; the last call may have 4, 2 or 1
ADMITTED = 8  # rows begun in one call
NARROWEST = 32  # prompts are padded to this many tokens, or twice, four times ... as many


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted of it. Sample ids name the noise: they must not repeat within a seed."""

    prompt: np.ndarray  # [P] int32
    sample_ids: tuple[int, ...]
    max_new_tokens: int
    history: tuple[np.ndarray, ...] = ()  # earlier roll-outs of this prompt, the latest last


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How to generate: everything that is fixed for one call of `generate`."""

    sampling: Sampling
    strategy: Strategy
    stop_tokens: tuple[int, ...]
    rows: int  # live rows at most
    slots: int  # tokens of the longest sample, prompt included
    seed: int
    acceptance: str = "replayable"  # or "rejection"
    history: int = 0  # history tokens kept for lookup
    fewest_rows: int = 1  # the batch shrinks no further: each halving is a program of its own


@dataclasses.dataclass
class Sample:
    """One sample on the host; grows as rounds arrive."""

    sample_id: int
    prompt: np.ndarray  # [P] int32
    limit: int  # length at which it ends, prompt included
    history: np.ndarray  # [E] int32
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    support: list[np.ndarray] = dataclasses.field(default_factory=list)  # [top_k] each, under top-k
    rounds: int = 0  # rounds it took part in
    accepted: int = 0  # drafted tokens that were accepted
    done: bool = False


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What the host knows of a round when its counters arrive."""

    rows: int  # row slots decoded, idle ones included
    live: int  # samples that gained tokens
    tokens: int
    accepted: int
    drafted: int


@dataclasses.dataclass
class _Waiting:
    """A sample whose prompt is prefilled: row `source` of `prefix`."""

    sample: Sample
    prefix: Prefix
    source: int


def generate(
    target: Model,
    drafter: Model | None,
    requests: Iterable[Request],
    decoding: Decoding,
    mesh: jax.sharding.Mesh | None = None,
    observe: Callable[[RoundReport], None] | None = None,
) -> Iterator[Sample]:
    """Yield every sample of `requests` as it finishes, in order of finishing.

    target and drafter have unrolled layers, in the dtype they decode in; the drafter is wanted by a strategy of
    drafter 'model' only. Under replayable acceptance a sample's tokens are a function of (weights, prompt, seed,
    sample id, sampling): not of the strategy, the rows or the order. Raises ValueError for a prompt that does not
    fit. `observe` is called with each round's report.
    """
    if decoding.strategy.drafter == "model" and drafter is None:
        raise ValueError("The strategy drafts with a model, and none is given; pass a drafter or choose another.")
    queue = collections.deque(requests)
    for request in queue:
        _check(request, decoding)
    waiting: collections.deque[_Waiting] = collections.deque()
    board = [None] * _first_rows(sum(len(request.sample_ids) for request in queue), decoding, mesh)
    state = _empty_state(target, drafter, len(board), decoding, mesh)
    flight: tuple[Emission, list[Sample | None]] | None = None
    while queue or waiting or any(board) or flight:
        state = _refill(state, board, queue, waiting, (target, drafter), decoding, mesh)
        if not queue and not waiting:
            state, board = _shrink(state, board, decoding, mesh)
        landed, flight = flight, None
        if any(_may_run(sample, landed) for sample in board):
            state, emission = _dispatch(state, (target, drafter), decoding, mesh)
            flight = (emission, list(board))
        if landed:
            yield from _land(*landed, board, decoding, observe)


def _check(request: Request, decoding: Decoding) -> None:
    wanted = len(request.prompt) + request.max_new_tokens
    if not len(request.prompt) or request.max_new_tokens < 1 or wanted > decoding.slots:
        raise ValueError(
            f"A prompt of {len(request.prompt)} tokens with up to {request.max_new_tokens} new ones does not fit"
            f" the cache of {decoding.slots} slots; shorten the prompt, ask for fewer tokens or raise the slots."
        )


def warm_up(
    target: Model,
    drafter: Model | None,
    samples: int,
    decoding: Decoding,
    mesh: jax.sharding.Mesh | None = None,
) -> None:
    """Compile the rounds of `samples` samples, for every number of rows they may shrink to, before they are needed."""
    rows = _first_rows(samples, decoding, mesh)
    state = _empty_state(target, drafter, rows, decoding, mesh)
    while True:
        state, _ = _dispatch(state, (target, drafter), decoding, mesh)
        rows, before = _row_bucket(rows // 2, rows, decoding, mesh), rows
        if rows == before:
            return
        state = row_verbs.shrink(state, np.arange(rows, dtype=np.int32), mesh)


def _first_rows(samples: int, decoding: Decoding, mesh) -> int:
    return _row_bucket(min(max(samples, 1), decoding.rows), decoding.rows, decoding, mesh)


def _row_bucket(live: int, most: int, decoding: Decoding, mesh) -> int:
    """The smallest of most, most/2, most/4 ... that holds `live` rows, at least the fewest, in equal shares."""
    size, shards = _shared(most, mesh), _shared(1, mesh)
    while size // 2 >= max(live, decoding.fewest_rows) and size % (2 * shards) == 0:
        size //= 2
    return size


def _shared(rows: int, mesh) -> int:
    """`rows`, rounded up to equal shares for the devices that rows lie on."""
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-rows // shards) * shards


def slack(strategy: Strategy) -> int:
    """Slots a cache needs beyond the longest sample: a round writes whole paths, a catch-up whole chunks."""
    return max(trees.bucket(strategy) + 1, model_drafter.CHUNK)


def prompt_width(longest: int, slots: int) -> int:
    """Tokens that prompts of at most `longest` tokens are padded to for prefill."""
    return min(max(NARROWEST, 1 << (longest - 1).bit_length()), slots)


def _empty_state(target, drafter, rows: int, decoding: Decoding, mesh) -> DecodeState:
    draft = None if drafter is None else drafter.config
    slots, dtype = decoding.slots + slack(decoding.strategy), target.embed.dtype
    return row_verbs.empty(target.config, draft, rows, slots, decoding.history, dtype, mesh)


def _may_run(sample: Sample | None, landed) -> bool:
    """Whether another round could give the sample anything: false once its limit is surely reached."""
    if sample is None or sample.done:
        return False
    in_flight = landed is not None and any(other is sample for other in landed[1])
    return len(sample.prompt) + len(sample.tokens) + in_flight < sample.limit


def _refill(state, board, queue, waiting, models, decoding: Decoding, mesh) -> DecodeState:
    """Admit samples to free rows; prompts are prefilled several at a time, so some wait ready."""
    free = [row for row, sample in enumerate(board) if sample is None]
    while free and (waiting or queue):
        if not waiting:
            chosen = [queue.popleft() for _ in range(min(len(queue), PREFILLED))]
            waiting.extend(_prefill(chosen, models, decoding, mesh))
        prefix, batch = waiting[0].prefix, []
        while free and waiting and waiting[0].prefix is prefix and len(batch) < ADMITTED:
            batch.append((free.pop(0), waiting.popleft()))
        state = _admit(state, board, prefix, batch, decoding, mesh)
    return state


def _prefill(requests: list[Request], models, decoding: Decoding, mesh) -> Iterator[_Waiting]:
    longest = max(len(request.prompt) for request in requests)
    rows = _shared(1 << (len(requests) - 1).bit_length(), mesh)
    tokens = np.zeros((rows, prompt_width(longest, decoding.slots)), np.int32)
    length = np.ones(len(tokens), np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.prompt)] = request.prompt
        length[row] = len(request.prompt)
    prefix = row_verbs.prefill(*models, *place_rows((tokens, length), mesh), mesh=mesh)
    for row, request in enumerate(requests):
        history = _history(request, decoding.history)
        limit = len(request.prompt) + request.max_new_tokens
        for sample_id in request.sample_ids:
            yield _Waiting(Sample(sample_id, request.prompt, limit, history), prefix, row)


def _history(request: Request, size: int) -> np.ndarray:
    """[E] the latest roll-outs that fit, each followed by a separator."""
    flat = [np.append(text, -1) for text in request.history]
    joined = np.concatenate([np.zeros(0, np.int32), *flat])[-size:] if size else np.zeros(0, np.int32)
    return np.pad(joined, (0, size - len(joined)), constant_values=-1).astype(np.int32)


def _admit(state, board, prefix: Prefix, batch, decoding: Decoding, mesh) -> DecodeState:
    source, row = np.zeros(ADMITTED, np.int32), np.full(ADMITTED, len(board), np.int32)
    limit, key = np.ones(ADMITTED, np.int32), np.zeros((ADMITTED, 2), np.uint32)
    history = np.full((ADMITTED, decoding.history), -1, np.int32)
    for i, (place, waiting) in enumerate(batch):
        sample = board[place] = waiting.sample
        source[i], row[i], limit[i] = waiting.source, place, sample.limit
        key[i], history[i] = (decoding.seed, sample.sample_id), sample.history
    return row_verbs.admit(state, prefix, Admission(source, row, limit, key, history), mesh=mesh)


def _shrink(state, board, decoding: Decoding, mesh) -> tuple[DecodeState, list[Sample | None]]:
    """Halve the rows, nobody being left to wait, whenever the live ones fit the half."""
    live = [row for row, sample in enumerate(board) if sample is not None]
    size = _row_bucket(max(len(live), 1), len(board), decoding, mesh)
    if size == len(board):
        return state, board
    idle = [row for row, sample in enumerate(board) if sample is None]
    kept = (live + idle)[:size]
    return row_verbs.shrink(state, np.array(kept, np.int32), mesh), [board[row] for row in kept]


def _dispatch(state, models, decoding: Decoding, mesh) -> tuple[DecodeState, Emission]:
    """Draft and verify once: start the round and the copy of its counters, and wait for neither."""
    target, drafter = models
    strategy, window, laws = decoding.strategy, None, None
    tree = trees.as_data(strategy, len(state.done))
    if strategy.drafter == "model":
        wanted = decoding.acceptance == "rejection"
        drafts, laws, window = model_drafter.propose(drafter, state, strategy, decoding.sampling, wanted)
    elif strategy.drafter == "lookup":
        drafts = lookup.propose(state, strategy)
    else:
        drafts = np.zeros((len(state.done), 0), np.int32)
    options = dict(sampling=decoding.sampling, stop_tokens=decoding.stop_tokens, rule=decoding.acceptance)
    state, emission, path = run_round(target, state, drafts, laws, tree, mesh=mesh, **options)
    if window is not None:
        state = model_drafter.commit(state, window, path, emission.count, strategy, mesh=mesh)
    for leaf in jax.tree.leaves(emission):
        leaf.copy_to_host_async()
    return state, emission


def _land(emission: Emission, samples, board, decoding: Decoding, observe) -> Iterator[Sample]:
    """Read a round's counters: samples grow, finished ones leave their rows and are yielded."""
    arrived = jax.device_get(emission)
    for row, sample in enumerate(samples):
        count = int(arrived.count[row])
        if sample is None or count == 0:
            continue
        sample.tokens += arrived.tokens[row, :count].tolist()
        sample.logprobs += arrived.logprobs[row, :count].tolist()
        if arrived.support is not None:
            sample.support += list(arrived.support[row, :count].copy())
        sample.rounds += 1
        sample.accepted += int(arrived.accepted[row])
        sample.done = bool(arrived.done[row])
        if sample.done:
            board[next(place for place, other in enumerate(board) if other is sample)] = None
            yield sample
    if observe is not None:
        observe(_report(arrived, decoding))


def _report(arrived: Emission, decoding: Decoding) -> RoundReport:
    live = int((arrived.count > 0).sum())
    return RoundReport(
        rows=len(arrived.count),
        live=live,
        tokens=int(arrived.count.sum()),
        accepted=int(arrived.accepted.sum()),
        drafted=live * len(decoding.strategy.parents),
    )
