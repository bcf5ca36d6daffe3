"""A row that moves takes all of itself along, and nothing else is touched."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import mesh as meshes
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.types import ModelConfig

TARGET = ModelConfig(
    "llama", 32, 16, 16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, max_context=128
)
DRAFT = dataclasses.replace(TARGET, num_layers=1)
ROWS = 4
SLOTS = 128


def empty(layout: Layout, rows=ROWS) -> DecodeState:
    return row_verbs.empty(TARGET, DRAFT, rows, SLOTS, 8, SLOTS, layout)


def content(number: int, shape: tuple[int, ...], salt: int) -> np.ndarray:
    """What sample `number` has in a leaf: different for every sample, leaf and place."""
    return np.random.default_rng([number, salt]).integers(-(1 << 20), 1 << 20, shape)


def filled(layout: Layout, rows=ROWS) -> DecodeState:
    leaves, kind = jax.tree.flatten(empty(layout, rows))
    made = [
        np.stack([content(row, leaf.shape[1:], salt) for row in range(rows)]).astype(leaf.dtype)
        for salt, leaf in enumerate(leaves)
    ]
    return meshes.place_rows(jax.tree.unflatten(kind, made), layout)


def slices(count: int, fsdp: int = 1, tensor: int = 1):
    devices = jax.devices()[: count * fsdp * tensor]
    return Layout(meshes.make_mesh(1, fsdp, tensor, devices, slices=count)).split()


def narrowed(row: DecodeState, slots: int) -> DecodeState:
    """A row's leaves, caches and tokens up to `slots`."""

    def cut(cache):
        return ContiguousCache(tuple((k[..., :slots], v[:, :, :slots]) for k, v in cache.layers))

    assert row.draft is not None
    draft = dataclasses.replace(row.draft, cache=cut(row.draft.cache))
    return dataclasses.replace(row, tokens=row.tokens[:, :slots], cache=cut(row.cache), draft=draft)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "dtype"),
    [(1, 1, "float32"), (2, 1, "float32"), (1, 2, "bfloat16"), (2, 2, "float32")],
)
def test_a_row_arrives_as_it_left_and_the_others_stay(fsdp, tensor, dtype):
    """Caches in bfloat16 are a piece of their own, and everything else is one."""
    on_slices = slices(2, fsdp, tensor)
    here, there = (dataclasses.replace(one, dtype=jnp.dtype(dtype)) for one in on_slices)
    source = filled(here)
    target = empty(there)
    packet = row_transfer.send(
        row_transfer.pack_rows(source, np.array([3], np.int32), 64, layout=here), there
    )
    assert len(packet.pieces) == 1 + (dtype == "bfloat16")
    arrived = row_transfer.unpack_rows(target, packet, np.array([1], np.int32), layout=there)
    row = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[1:2])
    old = jax.tree.map(lambda leaf: np.asarray(leaf)[3:4], source)
    jax.tree.map(np.testing.assert_array_equal, narrowed(row(arrived), 64), narrowed(old, 64))
    others = jax.tree.map(lambda leaf: np.asarray(leaf)[[0, 2, 3]], (arrived, empty(there)))
    jax.tree.map(np.testing.assert_array_equal, *others)
    assert packet.nbytes < 0.75 * sum(leaf.nbytes for leaf in jax.tree.leaves(source)) / ROWS


@pytest.mark.parametrize("piece", [256, 5000])
def test_a_row_travels_in_several_pieces_as_in_one(piece, monkeypatch):
    """Two rows, and larger leaves than a piece; however they are shared out, all comes to its
    place.
    """
    programs: list[Any] = [row_transfer.pack_rows, row_transfer._begins, row_transfer._put]
    rows = np.array([3, 0], np.int32)
    whole = row_transfer.pack_rows(filled(ONE_DEVICE), rows, 64)
    wanted = jax.device_get(row_transfer.unpack_rows(empty(ONE_DEVICE), whole, rows[::-1]))
    monkeypatch.setattr(row_transfer, "PIECE_BYTES", piece)
    for program in programs:
        program.clear_cache()
    packet = row_transfer.pack_rows(filled(ONE_DEVICE), rows, 64)
    arrived = row_transfer.unpack_rows(empty(ONE_DEVICE), packet, rows[::-1])
    for program in programs:
        program.clear_cache()
    assert len(packet.pieces) > len(whole.pieces) == 1 and packet.nbytes == whole.nbytes
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrived), wanted)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_no_program_of_a_move_gathers_the_batch(fsdp):
    here, _ = slices(2, fsdp, 2)
    state = empty(here)
    row = np.array([3], np.int32)
    compiled: Any = row_transfer.pack_rows.lower(state, row, 64, layout=here).compile()
    leaving = compiled.as_text()
    packet = row_transfer.send(row_transfer.pack_rows(state, row, 64, layout=here), here)
    compiled = row_transfer._put.lower(
        state, packet, row, row_transfer._begins(state, 64, here), here
    ).compile()
    # all goes from the packet to its place
    assert compiled.memory_analysis().temp_size_in_bytes < 1000
    arriving = compiled.as_text()
    for program in (leaving, arriving):
        assert "all-gather" not in program and "all-to-all" not in program
    assert ("all-reduce" in leaving) == (fsdp > 1)
    assert compiled.memory_analysis().alias_size_in_bytes >= max(
        leaf.nbytes for leaf in jax.tree.leaves(state)
    ) / (2 * fsdp)


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 2)])
def test_a_pair_of_slices_passes_a_row_on_without_the_others(fsdp, tensor):
    here, *_, there = slices(8 // (fsdp * tensor), fsdp, tensor)
    row = np.array([2], np.int32)
    packet = row_transfer.pack_rows(filled(here), row, 64, layout=here)
    blank = row_transfer.pack_rows(empty(there), row, 64, layout=there)
    wanted = jax.device_get(packet)
    passed = row_transfer.send_to_process([packet, blank], there, here, there)
    assert {shard.device for shard in passed.pieces[0].addressable_shards} == set(
        there.devices.flat
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(passed), wanted)


def test_the_program_of_a_pair_only_permutes():
    here, there = slices(2, 2, 2)
    devices = np.concatenate([here.devices, there.devices])
    pair = Layout(jax.sharding.Mesh(devices, meshes.AXES))
    row = np.array([2], np.int32)
    packets = [row_transfer.pack_rows(empty(layout), row, 64, layout) for layout in (here, there)]
    both = jax.tree.map(functools.partial(row_transfer._on, pair), *packets)
    compiled: Any = row_transfer._passed.lower(both, pair=pair).compile()
    program = compiled.as_text()
    assert len(both.pieces) == 1
    assert program.count(" collective-permute(") + program.count(" collective-permute-start(") == 1
    assert not any(
        name in program for name in ("all-gather", "all-to-all", "all-reduce", "concatenate")
    )
    assert compiled.memory_analysis().temp_size_in_bytes == 0  # nothing is copied beside it


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("slots", [64, 128])
def test_what_travels_is_what_the_slots_hold(drafted, slots):
    """Of caches 2 layers x 2 heads x 4 wide, keys and values, the draft model's one layer, tokens;
    and whatever is not of slots, in words of 4 bytes.
    """
    state = row_verbs.empty(TARGET, DRAFT if drafted else None, ROWS, SLOTS, 8, SLOTS, ONE_DEVICE)
    packet = row_transfer.pack_rows(state, np.array([2, 0], np.int32), slots)
    cached = 2 * 2 * 4 * (3 if drafted else 2) * slots
    few = [state.length, state.limit, state.done, state.key, state.temperature]
    few += [state.history, state.earlier]
    lengths = [] if state.draft is None else [state.draft.length]
    words = cached + slots + sum(leaf[0].size for leaf in (*few, *lengths))
    assert packet.nbytes == 2 * 4 * words


def test_what_was_moved_reads_nothing_beyond_its_length():
    """Slots beyond the width of the packet may hold anything."""
    here, there = slices(2)
    poisoned = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, jnp.nan) if leaf.dtype == jnp.float32 else leaf,
        empty(there),
    )
    packet = row_transfer.send(
        row_transfer.pack_rows(filled(here), np.array([0], np.int32), 64, layout=here), there
    )
    arrived = row_transfer.unpack_rows(poisoned, packet, np.array([0], np.int32), layout=there)
    assert all(np.isfinite(leaf[0]).all() for leaf in jax.tree.leaves(narrowed(arrived, 64).cache))


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(1, 64), (64, 64), (65, 128), (129, 150), (150, 150)]
)
def test_widths_are_few(tokens, wanted):
    assert row_transfer.packet_length(tokens, 150) == wanted


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (1000, [[0, 1, 3, 5], [2, 4]]),  # by dtype, all but narrow floats as int32
        (64, [[0, 1], [3], [5], [2], [4]]),
        (72, [[0, 1, 3], [5], [2], [4]]),  # 16 + 48 + 8, which is all that fits
        (71, [[0, 1], [3], [5], [2], [4]]),
        (1, [[0], [1], [3], [5], [2], [4]]),
    ],
)
def test_leaves_share_pieces_of_their_dtype_up_to_a_size(limit, wanted, monkeypatch):
    """Bytes a row: 16, 48, 4, 8, 400 and 80."""
    monkeypatch.setattr(row_transfer, "PIECE_BYTES", limit)
    kinds = [
        ((9, 8), "bfloat16"),
        ((9, 3, 8), "bfloat16"),
        ((9,), "float32"),
        ((9, 4), "bfloat16"),
        ((9, 100), "uint32"),
        ((9, 40), "bfloat16"),
    ]
    shares = row_transfer._shares([jnp.zeros(shape, dtype) for shape, dtype in kinds])
    assert shares == wanted


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("state",))
def grown(state: DecodeState, layout) -> DecodeState:
    """Every row that is not done gets its next slot, of what only (sample, position) decide."""
    at = state.length
    rows = jnp.arange(len(state.length))
    number = state.key[:, 1].astype(jnp.float32)

    def write(leaf, axis):
        mark = number * 1000 + at.astype(jnp.float32)
        mark = mark.reshape(-1, *(1,) * (leaf.ndim - 2))
        old = leaf[rows, ..., at] if axis == 3 else leaf[rows, :, at]
        new = jnp.where(
            state.done.reshape(-1, *(1,) * (leaf.ndim - 2)), old, jnp.broadcast_to(mark, old.shape)
        )
        return leaf.at[rows, :, :, at].set(new) if axis == 3 else leaf.at[rows, :, at].set(new)

    def write_all(cache):
        return ContiguousCache(tuple((write(k, 3), write(v, 2)) for k, v in cache.layers))

    assert state.draft is not None
    draft = dataclasses.replace(state.draft, cache=write_all(state.draft.cache))
    length = jnp.where(state.done, at, at + 1)
    return meshes.pin_rows(
        dataclasses.replace(state, cache=write_all(state.cache), draft=draft, length=length), layout
    )


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("state",))
def begun(state: DecodeState, row, number, layout) -> DecodeState:
    """A sample arrives in a row."""
    key = state.key.at[row].set(jnp.stack([jnp.zeros_like(number), number]).astype(jnp.uint32))
    length = state.length.at[row].set(0)
    done = state.done.at[row].set(False)
    return meshes.pin_rows(dataclasses.replace(state, key=key, length=length, done=done), layout)


class Schedule:
    """Slices on which samples arrive, grow, move and finish, and what each must have by now."""

    def __init__(self, layouts, random: np.random.Generator):
        self.layouts = layouts
        self.random = random
        self.states = [empty(layout) for layout in layouts]
        self.placed: list[list[int | None]] = [[None] * ROWS for _ in layouts]
        self.length: dict[int, int] = {}
        self.count = 0

    def any_row(self, live: bool) -> tuple[int, int] | None:
        rows = [
            (s, r)
            for s, numbers in enumerate(self.placed)
            for r, held in enumerate(numbers)
            if (held is None) != live
        ]
        return rows[self.random.integers(len(rows))] if rows else None

    def grow(self):
        self.states = [
            grown(state, layout=layout)
            for state, layout in zip(self.states, self.layouts, strict=True)
        ]
        self.length = {number: size + 1 for number, size in self.length.items()}

    def unpack_rows(self):
        if place := self.any_row(live=False):
            s, r = place
            self.states[s] = begun(
                self.states[s], np.int32(r), np.int32(self.count), layout=self.layouts[s]
            )
            self.placed[s][r] = self.count
            self.length[self.count] = 0
            self.count += 1

    def finish(self):
        if place := self.any_row(live=True):
            s, r = place
            self.states[s] = row_verbs.retire(
                self.states[s], np.array([r], np.int32), layout=self.layouts[s]
            )
            number = self.placed[s][r]
            self.placed[s][r] = None
            self.length = {other: size for other, size in self.length.items() if other != number}

    def move(self):
        old = self.any_row(live=True)
        new = self.any_row(live=False)
        if old and new:
            (s, r) = old
            (to, place) = new
            leaving = np.array([r], np.int32)
            coming = np.array([place], np.int32)
            packet = row_transfer.send(
                row_transfer.pack_rows(self.states[s], leaving, 64, layout=self.layouts[s]),
                self.layouts[to],
            )
            self.states[s] = row_verbs.retire(self.states[s], leaving, layout=self.layouts[s])
            self.states[to] = row_transfer.unpack_rows(
                self.states[to], packet, coming, layout=self.layouts[to]
            )
            self.placed[to][place] = self.placed[s][r]
            self.placed[s][r] = None

    def check(self):
        """Every sample is in one row, with the caches of one that never moved."""
        held = [number for numbers in self.placed for number in numbers if number is not None]
        assert sorted(held) == sorted(self.length)
        for state, numbers in zip(jax.device_get(self.states), self.placed, strict=True):
            assert state.done.tolist() == [number is None for number in numbers]
            for row, number in enumerate(numbers):
                if number is not None:
                    check_row(state, row, number, self.length[number])


def check_row(state: DecodeState, row: int, number: int, length: int) -> None:
    assert state.key[row, 1] == number and state.length[row] == length
    wanted = number * 1000 + np.arange(length, dtype=np.float32)
    assert isinstance(state.cache, ContiguousCache) and state.draft is not None
    assert isinstance(state.draft.cache, ContiguousCache)
    for key, value in (*state.cache.layers, *state.draft.cache.layers):
        np.testing.assert_array_equal(
            key[row][..., :length], np.broadcast_to(wanted, (2, 4, length))
        )
        np.testing.assert_array_equal(
            value[row][:, :length], np.broadcast_to(wanted[:, None], (2, length, 4))
        )


def test_no_sample_is_lost_or_overwritten_whatever_comes_goes_and_moves():
    meshed = slices(3)
    random = np.random.default_rng(0)
    for _ in range(1000):
        schedule = Schedule(meshed, random)
        acts = (
            schedule.unpack_rows,
            schedule.grow,
            schedule.grow,
            schedule.move,
            schedule.move,
            schedule.finish,
        )
        for act in random.integers(len(acts), size=random.integers(5, 25)):
            acts[act]()
        schedule.check()
