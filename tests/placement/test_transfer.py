"""Weights that move between layouts are equal, move in the fewest bytes, and never through the
host.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices, needs_libtpu
from jax._src.array import ArrayImpl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layouts import SIXTHS, assert_equal, lay_out

from benchmarks.compiled import LLAMA_8B
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.mesh import AXES, ROLES, Layout, abstract_mesh, make_mesh
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.placement import program, transfer
from rlhf_jax.placement.reshard_path import find_path, traffic
from rlhf_jax.placement.reshard_step import Placing, ReshardStep
from rlhf_jax.planner.shapes import model_shapes
from rlhf_jax.types import Model, ModelConfig

ITEMSIZES = {"f32": 4, "bf16": 2}


def shapes_of(count: int) -> list[tuple[int, ...]]:
    """Sizes of the axes of all meshes of so many devices."""
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    return [one for one in itertools.product(sizes, repeat=len(AXES)) if math.prod(one) == count]


LAYOUTS = list(itertools.product(shapes_of(8), ROLES))
CONFIG = ModelConfig("qwen2", 512, 64, 128, 2, 8, 8, 16, 128)
# key-value heads and vocabulary are divisible by few sizes or none
ODD = dataclasses.replace(CONFIG, num_kv_heads=2, vocab_size=321)

# From a layout to another, by (slices, data, fsdp, tensor) and role: one of each kind of step.
PAIRS = [
    # gathered
    (((1, 1, 8, 1), "training"), ((1, 8, 1, 1), "generation")),
    # cut
    (((1, 8, 1, 1), "training"), ((1, 2, 2, 2), "training")),
    # swapped, and gathered
    (((1, 1, 8, 1), "training"), ((1, 2, 1, 4), "generation")),
    (((1, 1, 1, 8), "training"), ((1, 1, 8, 1), "training")),
    # exchanged
    (((1, 2, 2, 2), "training"), ((1, 2, 1, 4), "generation")),
    (((1, 1, 2, 4), "training"), ((1, 1, 4, 2), "training")),
    (((2, 1, 2, 2), "training"), ((2, 1, 1, 4), "generation")),
    (((1, 4, 1, 2), "generation"), ((2, 1, 4, 1), "training")),
]


def placed(model: Model, layout: Layout) -> Model:
    return jax.device_put(model, model_shardings(model, layout))


def received_bytes(text: str, count: int) -> int:
    """Bytes that `count` devices receive from others in the collectives of an optimised program."""
    found = 0
    for line in text.splitlines():
        match = re.search(r" = (.*?) (all-to-all|all-gather|all-reduce|collective-permute)\(", line)
        if match is None:
            continue
        kind = match[2]
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        size = sum(
            ITEMSIZES[dtype] * math.prod(int(one) for one in dims.split(",") if one)
            for dtype, dims in arrays
        )
        if kind == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", line.split("source_target_pairs=")[1])
            found += size * sum(sender != receiver for sender, receiver in pairs)
            continue
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
        group = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
        members = len(listed[1].split(",")) if listed else int(group[1]) if group else count
        times = 2 if kind == "all-reduce" else 1
        found += times * size * (members - 1) // members * count
    return found


@pytest.fixture
def moved_bytes(monkeypatch) -> Callable[[], int]:
    """A function that tells how many bytes programs have moved since it was last asked."""
    run = program._run
    programs = {}
    counts = []

    def compiled(leaves, index, *, steps: tuple[ReshardStep, ...], **options):
        key = (steps, *options.values(), index is None)
        if key not in programs:
            programs[key] = run.lower(leaves, index, steps=steps, **options).compile()
        counts.append(received_bytes(str(programs[key].as_text()), len(steps[0].devices)))
        return programs[key](leaves, index)

    monkeypatch.setattr(program, "_run", compiled)

    def take() -> int:
        total = sum(counts)
        counts.clear()
        return total

    return take


@pytest.fixture
def sent(monkeypatch) -> list[tuple[int, int, int]]:
    """(bytes, sender, receiver) of each piece that goes from a device to another."""
    found = []
    send = program.send_pieces

    def note(pieces, devices):
        for piece, receiver in zip(pieces, devices, strict=True):
            (sender,) = piece.sharding.device_set
            if sender != receiver:
                found.append((piece.nbytes, sender.id, receiver.id))
        return send(pieces, devices)

    monkeypatch.setattr(program, "send_pieces", note)
    return found


@pytest.fixture
def unfetched(monkeypatch) -> Iterator[None]:
    """No array's values come to the host."""

    def fetch(self):
        raise AssertionError("An array was fetched.")

    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(fetch))
        yield


@pytest.mark.parametrize(
    ("source", "target", "config"),
    [
        *((*pair, CONFIG) for pair in PAIRS[2:5]),
        *(pytest.param(*pair, CONFIG, marks=pytest.mark.slow) for pair in PAIRS[:2] + PAIRS[5:]),
        *(pytest.param(*pair, ODD, marks=pytest.mark.slow) for pair in PAIRS[::3]),
    ],
)
def test_what_moves_is_what_must_move(source, target, config, moved_bytes):
    model = init(jax.random.key(0), config)
    before = placed(model, lay_out(*source))
    layout = lay_out(*target)
    after = transfer.transfer(before, layout)
    assert_equal(after, model)
    assert transfer.is_in_place(after, layout)
    counted = transfer.bytes_moved(before, layout)
    assert moved_bytes() == counted.received <= 1.1 * counted.needed


def test_more_moves_where_xla_has_its_way():
    """So the count of bytes can tell the difference."""
    (source, target) = PAIRS[4]
    model = init(jax.random.key(0), CONFIG)
    before = placed(model, lay_out(*source))
    layout = lay_out(*target)
    change = jax.jit(lambda tree: tree, out_shardings=model_shardings(model, layout))
    text = str(change.lower(before).compile().as_text())
    assert received_bytes(text, 8) > 1.1 * transfer.bytes_moved(before, layout).needed


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["even", "odd"])
def test_every_pair_of_layouts_is_counted_at_its_least(config):
    model = init(jax.random.key(0), dataclasses.replace(config, num_layers=1))
    shapes = jax.eval_shape(lambda: model)
    layouts = [lay_out(*one) for one in LAYOUTS]
    for source, target in itertools.product(layouts, layouts):
        counted = transfer.bytes_moved(transfer.transfer(shapes, source), target)
        assert counted.needed <= counted.received <= 1.1 * counted.needed


@pytest.mark.long
@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["even", "odd"])
def test_every_pair_of_layouts_moves_its_least(config, moved_bytes):
    model = unstack(init(jax.random.key(0), dataclasses.replace(config, num_layers=1)))
    layouts = [lay_out(*one) for one in LAYOUTS]
    for source in layouts:
        before = placed(model, source)
        for target in layouts:
            after = transfer.transfer(before, target)
            assert_equal(after, model)
            assert moved_bytes() <= 1.1 * transfer.bytes_moved(before, target).needed


@pytest.mark.parametrize(
    ("order", "least"),
    [
        # axes of the torus in another order
        (np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).ravel().tolist(), True),
        ([3, 1, 4, 0, 5, 7, 2, 6], False),
    ],
)
def test_devices_may_be_in_another_order(order, least, moved_bytes, sent):
    model = init(jax.random.key(0), CONFIG)
    before = placed(model, lay_out((1, 1, 4, 2), "training"))
    layout = lay_out((1, 2, 1, 4), "generation", [jax.devices()[place] for place in order])
    assert_equal(transfer.transfer(before, layout), model)
    counted = transfer.bytes_moved(before, layout)
    assert moved_bytes() + sum(size for size, *_ in sent) == counted.received
    assert (counted.received == counted.needed) == least


# To other devices, by (slices, data, fsdp, tensor).
CROSSINGS = [
    ((1, 2, 2, 1), (1, 1, 1, 4), SIXTHS),
    ((1, 1, 2, 2), (1, 2, 1, 2), SIXTHS),
    # three copies, of sizes that three divides, and does not
    ((1, 3, 2, 1), (1, 1, 1, 2), SIXTHS),
    ((1, 3, 2, 1), (1, 1, 1, 2), CONFIG),
    ((1, 1, 2, 1), (1, 3, 1, 2), SIXTHS),
    ((1, 1, 2, 1), (1, 3, 1, 2), CONFIG),
    # parts of 1/6, of 1/2 and of 1/3
    ((1, 1, 6, 1), (1, 1, 1, 2), SIXTHS),
    ((1, 1, 1, 2), (1, 1, 6, 1), SIXTHS),
    ((1, 1, 2, 1), (1, 1, 3, 2), SIXTHS),
    # neither number of devices divides the other
    ((1, 1, 4, 1), (1, 1, 3, 1), SIXTHS),
    ((1, 1, 3, 1), (1, 2, 1, 2), SIXTHS),
    ((1, 1, 3, 1), (1, 1, 5, 1), CONFIG),
]


@pytest.mark.parametrize(
    ("source", "target", "config"),
    [
        *CROSSINGS[::3],
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for number, one in enumerate(CROSSINGS)
            if number % 3
        ),
    ],
)
def test_one_copy_goes_to_other_devices(source, target, config, moved_bytes, sent):
    model = init(jax.random.key(0), config)
    before = placed(model, lay_out(source, "training", jax.devices()[: math.prod(source)]))
    own = jax.devices()[-math.prod(target) :]
    layout = lay_out(target, "training" if target[2] > 1 else "generation", own)
    assert_equal(transfer.transfer(before, layout), model)
    counted = transfer.bytes_moved(before, layout)
    total = sum(size for size, *_ in sent)
    crossed = sum(size for size, sender, _ in sent if sender < math.prod(source))
    assert crossed == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert moved_bytes() + total == counted.received <= 2 * counted.needed


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # some devices in common
        (((1, 1, 4, 1), 0), ((1, 1, 1, 4), 2)),
        (((1, 1, 4, 2), 0), ((1, 1, 1, 4), 2)),
        # and numbers of devices that do not divide each other
        (((1, 1, 4, 1), 0), ((1, 1, 1, 6), 2)),
        (((1, 1, 6, 1), 0), ((1, 2, 1, 2), 2)),
        # the same, whose meshes have no axes in common
        (((1, 1, 3, 2), 0), ((1, 1, 2, 3), 0)),
        # one device, and nothing to split
        (((1, 1, 1, 1), 0), ((1, 2, 2, 2), 0)),
    ],
)
def test_any_devices_may_send_to_any(source, target, moved_bytes, sent):
    model = init(jax.random.key(0), SIXTHS)
    (sizes, first), (new_sizes, new_first) = source, target
    every = jax.devices()
    before = placed(model, lay_out(sizes, "training", every[first : first + math.prod(sizes)]))
    own = every[new_first : new_first + math.prod(new_sizes)]
    layout = lay_out(new_sizes, "generation", own)
    assert_equal(transfer.transfer(before, layout), model)
    counted = transfer.bytes_moved(before, layout)
    total = sum(size for size, *_ in sent)
    assert moved_bytes() + total == counted.received <= 2 * counted.needed


def placings(model: Model, first: int, shape: Sequence[int]) -> list[Placing]:
    """Where each leaf lies on devices that are not here; where width is split, it is trained."""
    role = "training" if shape[2] > 1 else "generation"
    layout = Layout(abstract_mesh(dict(zip(AXES, shape, strict=True))), role)
    found = []
    for place in jax.tree.leaves(model_shardings(model, layout)):
        axes = [(own,) if isinstance(own, str) else own or () for own in place.spec]
        split = tuple(tuple(AXES.index(name) for name in own) for own in axes)
        found.append(Placing(tuple(range(first, first + math.prod(shape))), tuple(shape), split))
    return found


def assert_few_bytes(model: Model, first: int, source: Sequence[int], target: Sequence[int]):
    """To devices from `first` on go at most twice the bytes that they lack; to others, one copy."""
    needed = received = 0
    ends = (placings(model, 0, source), placings(model, first, target))
    for leaf, *pair in zip(jax.tree.leaves(model), *ends, strict=True):
        path = find_path(leaf.shape, *pair)
        if first >= math.prod(source):
            assert path.second is not None
            pieces = sum(map(len, path.crossing))
            assert pieces * math.prod(path.second.part_shape()) == math.prod(leaf.shape)
        counted = traffic(leaf.shape, *pair)
        needed += counted.needed
        received += counted.received
    assert received <= 2 * needed


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 3, 16, 1), (1, 2, 1, 8)),
        ((1, 1, 48, 1), (1, 2, 1, 8)),
        ((1, 1, 3, 16), (1, 2, 1, 8)),
        ((1, 3, 2, 8), (1, 2, 1, 8)),
        ((1, 1, 16, 1), (1, 3, 1, 16)),
        ((1, 1, 16, 1), (1, 3, 16, 1)),
        ((1, 1, 2, 8), (1, 1, 48, 1)),
    ],
)
@pytest.mark.parametrize("width", [4096, 6144])
def test_one_copy_goes_from_three_quarters_to_a_quarter_and_back(source, target, width):
    """Of a model of that width, which three divides or not."""
    config = dataclasses.replace(LLAMA_8B, width=width, num_layers=1)
    model = jax.eval_shape(lambda: unstack(init(jax.random.key(0), config)))
    assert_few_bytes(model, math.prod(source), source, target)


@pytest.mark.parametrize(
    ("senders", "receivers", "first"),
    [(6, 2, 6), (2, 6, 2), (4, 6, 4), (3, 8, 3), (4, 6, 2), (6, 4, 2), (2, 6, 0), (6, 6, 0)],
)
@pytest.mark.parametrize("config", [CONFIG, SIXTHS], ids=["even", "sixths"])
def test_every_pair_of_unequal_layouts_is_counted_near_its_least(senders, receivers, first, config):
    one_layer = dataclasses.replace(config, num_layers=1)
    model = jax.eval_shape(lambda: unstack(init(jax.random.key(0), one_layer)))
    for source, target in itertools.product(shapes_of(senders), shapes_of(receivers)):
        assert_few_bytes(model, first, source, target)


def test_what_a_part_of_the_devices_repeats_is_not_moved():
    model = init(jax.random.key(0), CONFIG)
    before = placed(model, lay_out((2, 1, 1, 4), "generation"))
    layout = lay_out((1, 1, 1, 4), "generation", jax.devices()[4:])
    assert transfer.bytes_moved(before, layout) == (0, 0)
    assert_equal(transfer.transfer(before, layout), model)


def test_weights_are_cast_on_the_way():
    model = init(jax.random.key(0), CONFIG)
    (source, target) = PAIRS[2]
    before = placed(model, lay_out(*source))
    after = transfer.transfer(before, lay_out(*target), jnp.bfloat16)
    assert_equal(after, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))
    wide = transfer.bytes_moved(before, lay_out(*target))
    half = transfer.bytes_moved(before, lay_out(*target), jnp.bfloat16)
    assert half.received * 2 == wide.received


@pytest.mark.slow
def test_one_program_serves_all_layers_and_steps(compilations):
    source, _ = PAIRS[4]
    layout = lay_out((1, 1, 1, 4), "generation", jax.devices()[4:])
    seen = []
    for depth in (2, 5):
        config = dataclasses.replace(CONFIG, num_layers=depth, width=64 + 8 * depth)
        model = init(jax.random.key(0), config)
        before = placed(model, lay_out(*source))
        with compilations() as made:
            jax.block_until_ready(transfer.transfer(before, layout))
        seen.append(len(made))
        again = jax.tree.map(lambda leaf: leaf + 1, before)
        with compilations() as made:
            jax.block_until_ready(transfer.transfer(again, layout))
        assert not made
    assert seen[0] == seen[1]


def test_layers_are_written_in_place():
    model = init(jax.random.key(0), CONFIG)
    layout = lay_out((1, 2, 2, 2), "training")
    stacked = placed(model, layout).layers
    (layer, *_) = transfer.transfer_layers(placed(model, layout), layout)
    write = transfer._write.lower(stacked, layer, np.int32(0), layout=layout).compile()
    text = str(write.as_text())
    assert text.count("may-alias") == len(jax.tree.leaves(stacked))
    assert not re.search("all-|collective", text)


@pytest.mark.parametrize("receivers", [8, 4])
def test_nothing_goes_through_the_host(receivers, unfetched):
    model = init(jax.random.key(0), CONFIG)
    before = jax.jit(
        lambda tree: tree, out_shardings=model_shardings(model, lay_out(*PAIRS[2][0]))
    )(model)
    layout = lay_out((1, 1, 1, receivers), "generation", jax.devices()[-receivers:])
    with pytest.raises(AssertionError, match="was fetched"):
        jax.device_put(before, model_shardings(model, layout))
    jax.block_until_ready(transfer.transfer(before, layout))
    jax.block_until_ready(decoding_weights(before, layout))


def test_of_shapes_it_is_shapes():
    model = init(jax.random.key(0), CONFIG)
    layout = lay_out((1, 2, 2, 2), "training")
    shapes = transfer.transfer(jax.eval_shape(lambda: model), layout, jnp.bfloat16)
    arrays = transfer.transfer(model, layout, jnp.bfloat16)

    def check(shape: jax.ShapeDtypeStruct, array: jax.Array) -> None:
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)

    jax.tree.map(check, shapes, arrays)
    assert transfer.transfer(arrays, layout, jnp.bfloat16) is arrays


@needs_libtpu
@pytest.mark.slow
def test_a_layer_of_8b_needs_room_for_itself_alone(uncached):
    """Its program for a TPU, whose two meshes have their devices in other orders."""
    chips = devices("v5p:2x2x2")
    source = Layout(make_mesh(1, 4, 2, chips), "training")
    target = Layout(make_mesh(1, 1, 8, chips), "generation")
    assert source.devices.ravel().tolist() != target.devices.ravel().tolist()
    layers = model_shapes(LLAMA_8B, source).layers
    steps = []
    given = []
    one_layer = transfer._one_layer(layers)
    ends = jax.tree.leaves(model_shardings(one_layer, target))
    for leaf, one, end in zip(
        jax.tree.leaves(layers), jax.tree.leaves(one_layer), ends, strict=True
    ):
        placings = (transfer._placing(place, one.ndim) for place in (one.sharding, end))
        (step, *_) = path = find_path(one.shape, *placings)
        assert path.second is None
        by_id = {chip.id: chip for chip in chips}
        places = np.array([by_id[number] for number in step.devices])
        grid = Mesh(places.reshape(*step.changes[0].sizes, 1), (*step.names, "one"))
        steps.append(step)
        given.append((leaf.update(sharding=NamedSharding(grid, step.spec(stacked=True))),))
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(grid, PartitionSpec()))
    options = dict(steps=tuple(steps), grid=grid, dtype=jnp.dtype(jnp.bfloat16))
    needed = program._run.lower(given, index, **options).compile().memory_analysis()
    assert needed is not None
    # in bfloat16, on eight chips; norms are repeated
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(one_layer)) * 2 // 8
    assert size <= needed.output_size_in_bytes <= 1.01 * size
    assert needed.temp_size_in_bytes <= size
