"""One of four processes of two devices each, between which weights go to unequal numbers of them.

python tests/support/weight_ranks.py PORT RANK
"""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
from layouts import SIXTHS, assert_equal, lay_out

from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.placement.transfer import bytes_moved, transfer
from rlhf_jax.runtime import distributed, joining, to_host

RANKS = 4
# (slices, data, fsdp, tensor) of the source, its first device, and the same of the target
PAIRS = [
    ((1, 1, 6, 1), 0, (1, 1, 1, 2), 6),
    ((1, 1, 2, 1), 0, (1, 2, 1, 3), 2),
    ((1, 1, 4, 1), 0, (1, 3, 2, 1), 2),
]


def main(port: str, rank: int) -> int:
    """Weights arrive as they left, and at most twice what their devices lack is sent."""
    place = joining.Place(f"localhost:{port}", RANKS, rank)
    joining.start(place, sends=True)
    distributed.divide()
    make = functools.partial(init, jax.random.key(0), SIXTHS)
    for shape, first, receivers, start in PAIRS:
        source = lay_out(shape, "training", jax.devices()[first:][: np.prod(shape)])
        target = lay_out(receivers, "generation", jax.devices()[start:][: np.prod(receivers)])
        there = model_shardings(jax.eval_shape(make), source)
        model = jax.jit(make, out_shardings=there)()
        wanted = to_host.fetch(model)
        assert_equal(to_host.fetch(transfer(model, target)), wanted)
        moved = bytes_moved(model, target)
        if rank == 0:
            print(f"{shape} to {receivers}: {moved.received / moved.needed:.2f}")
        assert moved.received <= 2 * moved.needed
    return joining.leave(0, "", place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
