"""Which sample is in which row of a slice: samples admitted, rows refilled, the batch halved in the
tail. Host code.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.shapes import LANES
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.rows import Admission, Prefix
from rlhf_jax.generation.precompile import Models
from rlhf_jax.generation.requests import GenerationConfig, Request, Sample
from rlhf_jax.generation.slice_batch import Board, Instance, Waiting
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.drafters.replay import FOLLOWS
from rlhf_jax.mesh import place_rows, row_shards
from rlhf_jax.types import DecodeState, Strategy

PREFILLED = 8  # prompts prefilled in one call, ahead of need; the last call may have 4, 2 or 1
ADMITTED = 8  # rows begun in one call
NARROWEST = 32  # prompts are padded to this many tokens, or twice, four times ... as many
SIBLINGS = 3  # running samples of the same prompt that a lookup reads


def cache_slots(longest: int, strategies: Iterable[Strategy], kernels: Kernels = REFERENCE) -> int:
    """Slots of a cache for samples of up to `longest` tokens: a round writes whole paths, a
    catch-up whole chunks.

    A kernel reads whole tiles.
    """
    slots = longest + max(
        model_drafter.CHUNK, *(trees.bucket(strategy) + 1 for strategy in strategies)
    )
    return slots if kernels == REFERENCE else -(-slots // LANES) * LANES


def empty_state(models: Models, rows: int, decoding: GenerationConfig, mesh) -> DecodeState:
    """So many rows that are all done."""
    target, drafter = models
    draft = None if drafter is None else drafter.config
    slots = cache_slots(decoding.max_length, decoding.strategies, decoding.kernels)
    earlier = decoding.max_length if decoding.uses_drafter("replay") else 0
    return row_verbs.empty(
        target.config, draft, rows, slots, decoding.history, earlier, target.embed.dtype, mesh
    )


def begin(number: int, models: Models, mesh, samples: int, decoding: GenerationConfig) -> Instance:
    """A slice with the rows that so many samples begin with, all empty."""
    rows = first_rows(samples, decoding, mesh)
    return Instance(number, models, mesh, empty_state(models, rows, decoding, mesh), [None] * rows)


def check(request: Request, decoding: GenerationConfig) -> None:
    """Raise ValueError, in one sentence, for a prompt that does not fit."""
    wanted = len(request.prompt) + request.max_new_tokens
    if not len(request.prompt) or request.max_new_tokens < 1 or wanted > decoding.max_length:
        raise ValueError(
            f"A prompt of {len(request.prompt)} tokens with up to {request.max_new_tokens} new"
            " ones does not fit"
            f" the cache of {decoding.max_length} slots; shorten the prompt, ask for fewer tokens or"
            " raise the slots."
        )


def first_rows(samples: int, decoding: GenerationConfig, mesh) -> int:
    """Rows that `samples` samples begin with."""
    return row_bucket(min(max(samples, 1), decoding.max_rows), decoding.max_rows, decoding, mesh)


def row_bucket(live: int, most: int, decoding: GenerationConfig, mesh) -> int:
    """The smallest of most, most/2, most/4 ... that holds `live` rows, at least the fewest, in
    equal shares.
    """
    size = shared(most, mesh)
    shards = shared(1, mesh)
    while size // 2 >= max(live, decoding.min_rows) and size % (2 * shards) == 0:
        size //= 2
    return size


def shared(rows: int, mesh) -> int:
    """`rows`, rounded up to equal shares for the devices that rows lie on."""
    shards = row_shards(mesh)
    return -(-rows // shards) * shards


def prompt_width(longest: int, slots: int) -> int:
    """Tokens that prompts of at most `longest` tokens are padded to for prefill."""
    return min(max(NARROWEST, 1 << (longest - 1).bit_length()), slots)


def refill(instance: Instance, decoding: GenerationConfig) -> None:
    """Admit samples to free rows; prompts are prefilled several at a time, so some wait ready."""
    waiting = instance.waiting
    free = [row for row, sample in enumerate(instance.board) if sample is None]
    while free and (waiting or instance.queue):
        if not waiting:
            waiting.extend(_prefill(_next_prompts(instance.queue), instance, decoding))
        prefix = waiting[0].prefix
        batch = []
        while free and waiting and waiting[0].prefix is prefix and len(batch) < ADMITTED:
            batch.append((free.pop(0), waiting.popleft()))
        instance.state = _admit(instance, prefix, batch, decoding)


def _next_prompts(queue: collections.deque[Sample]) -> list[list[Sample]]:
    """The samples of the first PREFILLED prompts, taken from the queue."""
    groups: list[list[Sample]] = []
    while queue and (len(groups) < PREFILLED or queue[0].request is groups[-1][0].request):
        sample = queue.popleft()
        if groups and sample.request is groups[-1][0].request:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _prefill(
    groups: list[list[Sample]], instance: Instance, decoding: GenerationConfig
) -> Iterator[Waiting]:
    prompts = [group[0].prompt for group in groups]
    mesh = instance.mesh
    rows = shared(1 << (len(prompts) - 1).bit_length(), mesh)
    tokens = np.zeros((rows, prompt_width(max(map(len, prompts)), decoding.max_length)), np.int32)
    length = np.ones(len(tokens), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        length[row] = len(prompt)
    prefix = row_verbs.prefill(*instance.models, *place_rows((tokens, length), mesh), mesh=mesh)
    for row, group in enumerate(groups):
        for sample in group:
            yield Waiting(sample, prefix, row)


def _history(texts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """[E] the latest texts that fit, each followed by a separator."""
    flat = [np.append(text, -1) for text in texts]
    joined = (
        np.concatenate([np.zeros(0, np.int32), *flat])[-size:] if size else np.zeros(0, np.int32)
    )
    return np.pad(joined, (0, size - len(joined)), constant_values=-1).astype(np.int32)


def _admit(instance: Instance, prefix: Prefix, batch, decoding: GenerationConfig) -> DecodeState:
    board = instance.board
    state = instance.state
    source = np.zeros(ADMITTED, np.int32)
    row = np.full(ADMITTED, len(board), np.int32)
    limit = np.ones(ADMITTED, np.int32)
    key = np.zeros((ADMITTED, 2), np.uint32)
    history = np.full((ADMITTED, decoding.history), -1, np.int32)
    earlier = np.full((ADMITTED, state.earlier.shape[1]), -1, np.int32)
    for i, (place, waiting) in enumerate(batch):
        sample = board[place] = waiting.sample
        source[i] = waiting.source
        row[i] = place
        limit[i] = sample.limit
        key[i] = (decoding.seed, sample.sample_id)
        history[i] = _history(sample.texts, decoding.history)
        text = sample.request.earlier.get(sample.sample_id)
        if text is not None and earlier.shape[1]:
            aligned = np.concatenate([sample.prompt, text])[: earlier.shape[1]]
            earlier[i, : len(aligned)] = aligned
            sample.confidence = {"replay": FOLLOWS}
    return row_verbs.admit(
        state, prefix, Admission(source, row, limit, key, history, earlier), mesh=instance.mesh
    )


def fit(instance: Instance, wanted: int, decoding: GenerationConfig) -> None:
    """Give the slice the fewest rows that hold `wanted` samples, its live ones included."""
    board = instance.board
    mesh = instance.mesh
    size = row_bucket(max(wanted, 1), decoding.max_rows, decoding, mesh)
    if size == len(board):
        return
    live = [row for row, sample in enumerate(board) if sample is not None]
    idle = [row for row, sample in enumerate(board) if sample is None]
    kept = (live + idle)[:size]
    fresh = size - len(kept)
    state = row_verbs.resize(instance.state, np.array(kept + [0] * fresh, np.int32), mesh)
    # those past the end are dropped: one program for a size
    added = np.arange(size, dtype=np.int32) + len(kept)
    instance.state = row_verbs.retire(state, added, mesh=mesh) if fresh else state
    instance.board = [board[row] for row in kept] + [None] * fresh


def siblings(board: Board, decoding: GenerationConfig) -> np.ndarray:
    """[B, SIBLINGS] int32 rows of running samples of the same prompt, -1 for none; [B, 0] where
    nothing looks up.
    """
    found = np.full((len(board), SIBLINGS if decoding.uses_drafter("lookup") else 0), -1, np.int32)
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(board):
        if sample is not None:
            groups.setdefault(id(sample.request), []).append(row)
    for rows in groups.values() if found.size else ():
        for row in rows:
            others = [other for other in rows if other != row][:SIBLINGS]
            found[row, : len(others)] = others
    return found


def pass_on(instance: Instance, ended: Sequence[Sample], decoding: GenerationConfig) -> None:
    """What has ended is history to its siblings that run here: their lookups read it."""
    asked = {id(sample.request) for sample in ended}
    rows = [
        row for row, sample in enumerate(instance.board) if sample and id(sample.request) in asked
    ]
    for start in range(0, len(rows), ADMITTED):
        instance.state = _remember(instance, rows[start : start + ADMITTED], decoding)


def _remember(instance: Instance, rows: list[int], decoding: GenerationConfig) -> DecodeState:
    row = np.full(ADMITTED, len(instance.board), np.int32)
    history = np.full((ADMITTED, decoding.history), -1, np.int32)
    for i, place in enumerate(rows):
        sample = instance.board[place]
        assert sample is not None
        row[i] = place
        history[i] = _history(sample.texts, decoding.history)
    return row_verbs.remember(instance.state, row, history, mesh=instance.mesh)
