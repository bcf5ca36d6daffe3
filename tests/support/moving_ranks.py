"""One of several processes between whose slices samples move at random.

python tests/support/moving_ranks.py PORT RANK RANKS SLICES KERNELS: with fewer slices than ranks,
some of these share each; "reference" or "interpret" is how all kernels run.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys

import jax
import numpy as np
import pytest
from tiny_run import CONFIG
from tiny_stage import Shuffled

from pallas_kernels.dispatch import Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.generation import engine
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import (
    GenerationConfig,
    GenerationCounts,
    Request,
    RoundReport,
    Sample,
)
from rlhf_jax.generation.slice_groups import SliceGroup, StageAborted, failed, slice_group_of
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.budget import expected_gains
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.speculative.tree import PLAIN
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS
from rlhf_jax.generation.strategy.predict import Choice, Situation
from rlhf_jax.mesh import Layout
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.runtime import distributed, joining
from rlhf_jax.runtime.signals import Stopped

PACKED = trees.parse("replay-chain-8-packed-3")


def main(port: str, rank: int, ranks: int, slices: int, kernels: str) -> int:
    """Every sample ends on one of the slices, as it would have ended alone."""
    place = joining.Place(f"localhost:{port}", ranks, rank)
    joining.start(place)
    target = unstack(init(jax.random.key(0), CONFIG))
    wanted = requests()
    counts = GenerationCounts()
    how = GenerationConfig(Sampling(1.0), (PLAIN,), (), max_rows=6, max_length=128, seed=3)
    mesh = meshes.make_mesh(1, -1, 1, slices=slices)
    layout = Layout(mesh, "generation", Kernels(*[kernels] * 4))
    whole = jax.jit(lambda: target, out_shardings=model_shardings(target, layout))()
    slice_group = slice_group_of(layout)
    alone = {
        s.sample_id: s for s in generate(target, None, wanted, how, Layout(kernels=layout.kernels))
    }
    assert len(slice_group.ranks) == max(1, ranks // slices)
    begin = functools.partial(generate, whole, None)
    here = list(begin(wanted, how, layout, counts.add, assignment_policy=shuffled("once")))
    check(here, counts, alone, slice_group)
    assert all(
        sample.rounds == alone[sample.sample_id].rounds and not sample.accepted for sample in here
    )
    if slice_group.several:
        pack(begin, layout, alone, slice_group, how)
        with pytest.raises(ValueError, match="give it one"):
            list(begin(wanted, how, layout))
    give_up(functools.partial(begin, wanted, how, layout), slice_group)
    return joining.leave(0, "", place)


def shuffled(name: str) -> AssignmentPolicy:
    return AssignmentPolicy(Shuffled(seed=0), name=name)


def check(
    here: list[Sample], counts: GenerationCounts, alone: dict[int, Sample], slice_group: SliceGroup
) -> None:
    """All samples ended once, some had moved, and each is what it is alone."""
    for sample in here:
        assert sample.tokens == alone[sample.sample_id].tokens, sample.sample_id
        np.testing.assert_allclose(sample.logprobs, alone[sample.sample_id].logprobs, atol=1e-4)
    parts = distributed.gather([sample.sample_id for sample in here] if slice_group.leads else [])
    assert sorted(number for part in parts for number in part) == sorted(alone)
    moves = sum(distributed.gather(counts.moves if slice_group.leads else 0))
    assert moves > 0, "how many depends on when the processes hear of each other"


class Packs:
    """Stands in for a selector that ranks the drafts of each round in its own way: the leader of a
    slice group alone chooses.
    """

    def __init__(self, leads: bool):
        self.leads = leads
        self.random = np.random.default_rng(0)
        self.packed = 0

    def choose(self, situation: Situation) -> Choice:
        assert self.leads
        rates = self.random.random((CLASSES, DEPTHS))
        return Choice(PACKED, 1.0, 1.0, None, "best", 1.0, 1.0, expected_gains(rates))

    def pace(self, live: int, rows: int, most_nodes: int, at: np.ndarray | None = None) -> float:
        return 1.0 / rows

    def observe_round(self, report: RoundReport) -> None:
        self.packed += report.strategy.packed > 0 and report.drafted > 0


def pack(
    begin, layout: Layout, alone: dict[int, Sample], slice_group: SliceGroup, how: GenerationConfig
) -> None:
    """Rounds that spend a budget on the worthiest drafts, as the leader ranks them, leave the same
    texts.
    """
    wanted = [dataclasses.replace(one, earlier=nearly(one, alone)) for one in requests()]
    selector = Packs(slice_group.leads)
    counts = GenerationCounts()
    how = dataclasses.replace(how, strategies=(PLAIN, PACKED), min_rows=6)
    check(
        list(
            begin(wanted, how, layout, counts.add, selector, assignment_policy=shuffled("packed"))
        ),
        counts,
        alone,
        slice_group,
    )
    assert selector.packed > 5 and 0 < counts.accepted < counts.drafted


def nearly(request: Request, alone: dict[int, Sample]) -> dict[int, np.ndarray]:
    """Texts that are followed up to some token, of another place in each."""
    texts = {number: np.array(alone[number].tokens, np.int32) for number in request.sample_ids}
    for number, text in texts.items():
        text[number % len(text)] += 1
    return texts


def give_up(begin, slice_group: SliceGroup) -> None:
    """The last to decide is stopped, at a round or at one that was received for a move: all others
    give the stage up, and none waits for a device.
    """
    last = slice_group.leads and distributed.rank() + len(slice_group.ranks) == distributed.count()
    received = []
    receive_all = engine.receive_all
    engine.receive_all = lambda *given: (received.append(one) or one for one in receive_all(*given))
    for name in ("at once", "at a move"):

        def observe(_, name=name) -> None:
            if last and (name == "at once" or received):
                raise Stopped(signal.SIGTERM)

        with pytest.raises((Stopped, StageAborted)) as caught, failed(name):
            list(begin(observe, assignment_policy=AssignmentPolicy(Shuffled(seed=0), name=name)))
        ends = distributed.gather(caught.type.__name__)
        assert ends.count("Stopped") == 1 and ends.count("StageAborted") == len(ends) - 1, ends


def requests() -> list[Request]:
    """Prompts of several samples, of different limits."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 300, random.integers(1, 12)).astype(np.int32) for _ in range(6)]
    limits = random.integers(20, 110, len(prompts)).tolist()
    ids = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(prompts))]
    return [Request(*asked) for asked in zip(prompts, ids, limits, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5]), kernels=sys.argv[5]))
