"""One of two processes between whose slices samples move at random: python tests/moving_ranks.py PORT RANK"""

from __future__ import annotations

import sys

import jax
import numpy as np
from tiny_run import CONFIG
from tiny_stage import Shuffled

from rlhf_jax import mesh as meshes
from rlhf_jax import processes
from rlhf_jax.generation import tree as trees
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.placing import Placing
from rlhf_jax.generation.rollout import Tally
from rlhf_jax.generation.samples import Decoding, Request
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.model.transformer import init, unstack


def main(port: str, rank: int) -> int:
    """Every sample ends on one of the two, as it would have ended alone."""
    place = processes.Place(f"localhost:{port}", 2, rank)
    processes.start(place)
    target, wanted, tally = unstack(init(jax.random.key(0), CONFIG)), requests(), Tally()
    how = Decoding(Sampling(1.0), (trees.parse("plain"),), (), rows=6, slots=128, seed=3)
    mesh = meshes.make_mesh(1, 1, 1, slices=jax.device_count())
    whole = jax.jit(lambda: target, out_shardings=meshes.model_shardings(target, mesh, "generation"))()
    placing = Placing(Shuffled(seed=0), name="once")
    here = {s.sample_id: s for s in generate(whole, None, wanted, how, mesh, tally.add, placing=placing)}
    alone = {s.sample_id: s for s in generate(target, None, wanted, how)}
    for number, sample in here.items():
        assert sample.tokens == alone[number].tokens, number
        np.testing.assert_allclose(sample.logprobs, alone[number].logprobs, atol=1e-4)
        assert sample.rounds == alone[number].rounds and sample.accepted == alone[number].accepted
    assert sorted(number for part in processes.gather(list(here)) for number in part) == sorted(alone)
    moves = sum(processes.gather(tally.moves))
    assert moves > 5, moves
    return processes.leave(0, "", place)


def requests() -> list[Request]:
    """Prompts of several samples, of different limits."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 300, random.integers(1, 12)).astype(np.int32) for _ in range(6)]
    limits = random.integers(20, 110, len(prompts)).tolist()
    ids = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(prompts))]
    return [Request(*asked) for asked in zip(prompts, ids, limits, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
