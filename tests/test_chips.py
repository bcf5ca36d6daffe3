"""What chips do, as one table says that both the parser of devices and the costs read."""

from __future__ import annotations

import pytest

from rlhf_jax.config.hardware import parse_hardware
from rlhf_jax.placement.chips import GPUS, TPUS, ring_bandwidth


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
