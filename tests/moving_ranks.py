"""One of several processes between whose slices samples move at random.

python tests/moving_ranks.py PORT RANK RANKS SLICES: with fewer slices than ranks, some of these share each.
"""

from __future__ import annotations

import functools
import signal
import sys

import jax
import numpy as np
import pytest
from tiny_run import CONFIG
from tiny_stage import Shuffled

from rlhf_jax import mesh as meshes
from rlhf_jax import processes
from rlhf_jax.generation import engine
from rlhf_jax.generation import tree as trees
from rlhf_jax.generation.crew import Abandoned, Crew, crew_of, failed
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.placing import Placing
from rlhf_jax.generation.rollout import Tally
from rlhf_jax.generation.samples import Decoding, Request
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.model.transformer import init, unstack
from rlhf_jax.stopping import Stopped


def main(port: str, rank: int, ranks: int, slices: int) -> int:
    """Every sample ends on one of the slices, as it would have ended alone."""
    place = processes.Place(f"localhost:{port}", ranks, rank)
    processes.start(place)
    target, wanted, tally = unstack(init(jax.random.key(0), CONFIG)), requests(), Tally()
    how = Decoding(Sampling(1.0), (trees.parse("plain"),), (), rows=6, slots=128, seed=3)
    mesh = meshes.make_mesh(1, -1, 1, slices=slices)
    whole = jax.jit(lambda: target, out_shardings=meshes.model_shardings(target, mesh, "generation"))()
    placing = Placing(Shuffled(seed=0), name="once")
    here = {s.sample_id: s for s in generate(whole, None, wanted, how, mesh, tally.add, placing=placing)}
    alone = {s.sample_id: s for s in generate(target, None, wanted, how)}
    for number, sample in here.items():
        assert sample.tokens == alone[number].tokens, number
        np.testing.assert_allclose(sample.logprobs, alone[number].logprobs, atol=1e-4)
        assert sample.rounds == alone[number].rounds and sample.accepted == alone[number].accepted
    crew = crew_of(mesh)
    assert len(crew.ranks) == max(1, ranks // slices)
    parts = processes.gather(list(here) if crew.leads else [])
    assert sorted(number for part in parts for number in part) == sorted(alone)
    moves = sum(processes.gather(tally.moves if crew.leads else 0))
    assert moves > 5, moves
    if crew.several:
        with pytest.raises(ValueError, match="give it one"):
            list(generate(whole, None, wanted, how, mesh))
    give_up(functools.partial(generate, whole, None, wanted, how, mesh), crew)
    return processes.leave(0, "", place)


def give_up(begin, crew: Crew) -> None:
    """The last to decide is stopped, at a round or at one that landed for a move: all others give the stage up, and
    none waits for a device."""
    last, landed, all_of = crew.leads and processes.rank() + len(crew.ranks) == processes.count(), [], engine._all_of
    engine._all_of = lambda *given: (landed.append(one) or one for one in all_of(*given))
    for name in ("at once", "at a move"):

        def observe(_, name=name) -> None:
            if last and (name == "at once" or landed):
                raise Stopped(signal.SIGTERM)

        with pytest.raises((Stopped, Abandoned)) as caught, failed(name):
            list(begin(observe, placing=Placing(Shuffled(seed=0), name=name)))
        ends = processes.gather(caught.type)
        assert ends.count(Stopped) == 1 and ends.count(Abandoned) == len(ends) - 1, ends


def requests() -> list[Request]:
    """Prompts of several samples, of different limits."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 300, random.integers(1, 12)).astype(np.int32) for _ in range(6)]
    limits = random.integers(20, 110, len(prompts)).tolist()
    ids = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(prompts))]
    return [Request(*asked) for asked in zip(prompts, ids, limits, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
