"""Which sample is in which row: samples admitted, rows refilled, the batch halved in the tail. Host code."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.drafters.replay import FOLLOWS
from rlhf_jax.generation.programs import Models
from rlhf_jax.generation.rows import Admission, Prefix
from rlhf_jax.generation.samples import Decoding, Request, Sample
from rlhf_jax.mesh import place_rows, row_shards
from rlhf_jax.types import DecodeState

PREFILLED = 8  # prompts prefilled in one call, ahead of need; the last call may have 4, 2 or 1
ADMITTED = 8  # rows begun in one call
NARROWEST = 32  # prompts are padded to this many tokens, or twice, four times ... as many
SIBLINGS = 3  # running samples of the same prompt that a lookup reads

Board = list[Sample | None]


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A sample whose prompt is prefilled: row `source` of `prefix`."""

    sample: Sample
    prefix: Prefix
    source: int


def check(request: Request, decoding: Decoding) -> None:
    """Raise ValueError, in one sentence, for a prompt that does not fit."""
    wanted = len(request.prompt) + request.max_new_tokens
    if not len(request.prompt) or request.max_new_tokens < 1 or wanted > decoding.slots:
        raise ValueError(
            f"A prompt of {len(request.prompt)} tokens with up to {request.max_new_tokens} new ones does not fit"
            f" the cache of {decoding.slots} slots; shorten the prompt, ask for fewer tokens or raise the slots."
        )


def first_rows(samples: int, decoding: Decoding, mesh) -> int:
    """Rows that `samples` samples begin with."""
    return row_bucket(min(max(samples, 1), decoding.rows), decoding.rows, decoding, mesh)


def row_bucket(live: int, most: int, decoding: Decoding, mesh) -> int:
    """The smallest of most, most/2, most/4 ... that holds `live` rows, at least the fewest, in equal shares."""
    size, shards = shared(most, mesh), shared(1, mesh)
    while size // 2 >= max(live, decoding.fewest_rows) and size % (2 * shards) == 0:
        size //= 2
    return size


def shared(rows: int, mesh) -> int:
    """`rows`, rounded up to equal shares for the devices that rows lie on."""
    shards = row_shards(mesh)
    return -(-rows // shards) * shards


def prompt_width(longest: int, slots: int) -> int:
    """Tokens that prompts of at most `longest` tokens are padded to for prefill."""
    return min(max(NARROWEST, 1 << (longest - 1).bit_length()), slots)


def refill(
    state: DecodeState,
    board: Board,
    queue: collections.deque[Request],
    waiting: collections.deque[Waiting],
    models: Models,
    decoding: Decoding,
    mesh,
) -> DecodeState:
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


def _prefill(requests: list[Request], models: Models, decoding: Decoding, mesh) -> Iterator[Waiting]:
    longest = max(len(request.prompt) for request in requests)
    rows = shared(1 << (len(requests) - 1).bit_length(), mesh)
    tokens = np.zeros((rows, prompt_width(longest, decoding.slots)), np.int32)
    length = np.ones(len(tokens), np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.prompt)] = request.prompt
        length[row] = len(request.prompt)
    prefix = row_verbs.prefill(*models, *place_rows((tokens, length), mesh), mesh=mesh)
    for row, request in enumerate(requests):
        for sample_id in request.sample_ids:
            yield Waiting(Sample(sample_id, request, list(request.history)), prefix, row)


def _history(texts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """[E] the latest texts that fit, each followed by a separator."""
    flat = [np.append(text, -1) for text in texts]
    joined = np.concatenate([np.zeros(0, np.int32), *flat])[-size:] if size else np.zeros(0, np.int32)
    return np.pad(joined, (0, size - len(joined)), constant_values=-1).astype(np.int32)


def _admit(state, board: Board, prefix: Prefix, batch, decoding: Decoding, mesh) -> DecodeState:
    source, row = np.zeros(ADMITTED, np.int32), np.full(ADMITTED, len(board), np.int32)
    limit, key = np.ones(ADMITTED, np.int32), np.zeros((ADMITTED, 2), np.uint32)
    history = np.full((ADMITTED, decoding.history), -1, np.int32)
    earlier = np.full((ADMITTED, state.earlier.shape[1]), -1, np.int32)
    for i, (place, waiting) in enumerate(batch):
        sample = board[place] = waiting.sample
        source[i], row[i], limit[i] = waiting.source, place, sample.limit
        key[i], history[i] = (decoding.seed, sample.sample_id), _history(sample.texts, decoding.history)
        text = sample.request.earlier.get(sample.sample_id)
        if text is not None and earlier.shape[1]:
            aligned = np.concatenate([sample.prompt, text])[: earlier.shape[1]]
            earlier[i, : len(aligned)] = aligned
            sample.confidence = {"replay": FOLLOWS}
    return row_verbs.admit(state, prefix, Admission(source, row, limit, key, history, earlier), mesh=mesh)


def shrink(state: DecodeState, board: Board, decoding: Decoding, mesh) -> tuple[DecodeState, Board]:
    """Halve the rows, nobody being left to wait, whenever the live ones fit the half."""
    live = [row for row, sample in enumerate(board) if sample is not None]
    size = row_bucket(max(len(live), 1), len(board), decoding, mesh)
    if size == len(board):
        return state, board
    idle = [row for row, sample in enumerate(board) if sample is None]
    kept = (live + idle)[:size]
    return row_verbs.shrink(state, np.array(kept, np.int32), mesh), [board[row] for row in kept]


def siblings(board: Board, decoding: Decoding) -> np.ndarray:
    """[B, SIBLINGS] int32 rows of running samples of the same prompt, -1 for none; [B, 0] where nothing looks up."""
    found = np.full((len(board), SIBLINGS if decoding.drafts_by("lookup") else 0), -1, np.int32)
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(board):
        if sample is not None:
            groups.setdefault(id(sample.request), []).append(row)
    for rows in groups.values() if found.size else ():
        for row in rows:
            others = [other for other in rows if other != row][:SIBLINGS]
            found[row, : len(others)] = others
    return found


def pass_on(
    state: DecodeState,
    board: Board,
    waiting: collections.deque[Waiting],
    ended: list[Sample],
    decoding: Decoding,
    mesh,
) -> DecodeState:
    """What has ended is history to the siblings that still run or wait: their lookups read it."""
    running = [sample for sample in board if sample is not None]
    for sample in ended:
        text = np.array(sample.tokens, np.int32)
        for other in (*running, *(place.sample for place in waiting)):
            if other.request is sample.request:
                other.texts.append(text)
    asked = {id(sample.request) for sample in ended}
    rows = [row for row, sample in enumerate(board) if sample is not None and id(sample.request) in asked]
    for start in range(0, len(rows), ADMITTED):
        state = _remember(state, board, rows[start : start + ADMITTED], decoding, mesh)
    return state


def _remember(state: DecodeState, board: Board, rows: list[int], decoding: Decoding, mesh) -> DecodeState:
    row, history = np.full(ADMITTED, len(board), np.int32), np.full((ADMITTED, decoding.history), -1, np.int32)
    for i, place in enumerate(rows):
        sample = board[place]
        assert sample is not None
        row[i], history[i] = place, _history(sample.texts, decoding.history)
    return row_verbs.remember(state, row, history, mesh=mesh)
