"""TPUs that are not here, to compile for: their compiler comes with the extra `pod`."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest
from jax.sharding import SingleDeviceSharding

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU needs its compiler: pip install -e '.[pod]'",
)
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is taken: another process may compile, too
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
EIGHT = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}  # of them


@functools.cache
def devices(topology: str) -> list:
    """The devices of a topology by its name: the same ones each time, or programs would mix two machines."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, platform="tpu").devices)


def one(chip: str) -> SingleDeviceSharding:
    """One chip, by a name of CHIPS."""
    return SingleDeviceSharding(devices(CHIPS[chip])[0])
