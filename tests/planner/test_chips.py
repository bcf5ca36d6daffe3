"""What chips do, as one table says that both the parser of devices and the costs read."""

from __future__ import annotations

import numpy as np
import pytest
from compilers import devices, needs_libtpu

from rlhf_jax.mesh import make_mesh
from rlhf_jax.planner.chips import GPUS, TPUS, is_box, ring_bandwidth
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.search.parts import part_sizes, part_starts


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("v5p:4x4x4", TPUS["v5p"]),
        ("v5litepod-16", TPUS["v5e"]),
        ("gpu:8x8:h100", GPUS["h100"]),
        ("cpu:2", None),
    ],
)
def test_named_devices_know_their_chip(text, chip):
    found = parse_hardware(text)
    assert found.chip == chip
    if chip:
        assert (found.gigabytes, found.compute_capability) == (
            chip.gigabytes,
            chip.compute_capability,
        )


@needs_libtpu
@pytest.mark.parametrize(
    ("text", "kinds"),
    [("v5p:4x4x4", {True, False}), ("v5p:8x8x16", {True}), ("v6e:4x8", {True, False})],
)
def test_boxes_are_those_of_the_compilers_coordinates(text, kinds):
    chips = devices(text)
    of_block = len(chips) // 16
    found = set()
    for size in part_sizes(16):
        for first in part_starts(size, 16):
            part = range(first * of_block, (first + size) * of_block)
            places = np.array([chips[number].coords for number in part])
            wanted = bool(np.prod(np.ptp(places, axis=0) + 1) == len(part))
            assert is_box(parse_hardware(text).torus, part) == wanted, part
            found.add(wanted)
            if not wanted:
                with pytest.raises(ValueError, match="are no box of their torus"):
                    make_mesh(devices=[chips[number] for number in part])
    assert found == kinds


def test_a_product_has_the_usual_torus_of_so_many_chips():
    assert parse_hardware("v5p-128").torus == (4, 4, 4)
    assert parse_hardware("v5litepod-64").torus == (8, 8)
    assert parse_hardware("v5p-94").torus == parse_hardware("gpu:8x8:h100").torus == ()


@pytest.mark.parametrize("chip", [*TPUS.values(), *GPUS.values()])
def test_links_are_slower_than_memory_and_networks_than_links(chip):
    links = 2 * chip.torus_axes or 1
    assert chip.network_bandwidth < links * chip.link_bandwidth < chip.memory_bandwidth
    assert 50 < chip.flops / chip.memory_bandwidth < 600, "FLOPs for each byte of memory"


@pytest.mark.parametrize(("group", "links"), [(2, 2), (4, 2), (16, 4), (64, 6)])
def test_a_torus_gives_two_links_for_each_axis_that_a_group_fills(group, links):
    chip = TPUS["v5p"]
    found = ring_bandwidth(chip, devices=64, nodes=1, group=group, stride=1)
    assert found == links * chip.link_bandwidth


@pytest.mark.parametrize(
    ("group", "stride", "bandwidth"), [(8, 1, 450e9), (64, 1, 400e9), (16, 4, 100e9), (8, 8, 50e9)]
)
def test_gpus_of_several_nodes_share_the_networks_of_each(group, stride, bandwidth):
    found = ring_bandwidth(GPUS["h100"], devices=64, nodes=8, group=group, stride=stride)
    assert found == bandwidth


def test_the_crossover_is_below_a_thousand_tokens_at_400_gigabits_and_3000_at_100():
    chip = parse_hardware("gpu:8:h100").chip
    assert chip is not None
    for network, tokens in ((5e10, 750), (1.25e10, 3100)):
        slower = chip._replace(network_bandwidth=network)
        assert slower.crossover_tokens(8) == pytest.approx(tokens, rel=0.05)
    small = chip._replace(flops=2e12, network_bandwidth=1e9)
    assert small.crossover_tokens(4) == pytest.approx(150)
