"""One of several processes that share two slices, of which the first scores while the second
decodes.

python tests/support/fused_ranks.py PORT RANK RANKS KERNELS: "reference" or "interpret" is how all
kernels run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
import time
import types
from typing import Any

import jax
import numpy as np
from places import GOLDEN
from tiny_run import CONFIG

from pallas_kernels.dispatch import Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.reallocation.planner import WAITS, ClusterView, Reallocation
from rlhf_jax.generation.requests import GenerationConfig, Request, Sample, as_sequences
from rlhf_jax.generation.slice_groups import slice_group_of
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.speculative.tree import PLAIN
from rlhf_jax.generation.stage import GenerationSettings, generate_samples
from rlhf_jax.inference.overlap import Scoring, ScoringQueue
from rlhf_jax.inference.scoring import Scored, dispatch_scores
from rlhf_jax.mesh import Layout
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.runtime import distributed, joining
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.sequences.packing import Extent

JUDGE = GOLDEN / "llama_reward"
HOW = GenerationConfig(Sampling(1.0), (PLAIN,), (), max_rows=6, max_length=64, seed=3, min_rows=6)
SHORT = HOW.max_rows  # samples that the first slice has: they end long before the others
ROWS = 2  # that are scored at one time


def main(port: str, rank: int, ranks: int, kernels: str) -> int:
    """What is scored beside generation, alike on all that share a slice; then a stop, and an error
    of one.
    """
    place = joining.Place(f"localhost:{port}", ranks, rank)
    distributed.PATIENCE = 1.0
    joining.start(place)
    mesh = meshes.make_mesh(1, -1, 1, slices=2)
    alone = models()
    layout = Layout(mesh, "generation", Kernels(*[kernels] * 4))
    stage = Stage(layout, HOW, dataclasses.replace(alone, **laid_over(layout, alone)))
    heard, scoring_queue, samples = stage.roll_out("scores")
    assert heard
    check(stage, scoring_queue, samples, alone)
    try:
        stage.roll_out("stops", then=stop)
    except Stopped as stopped:
        assert stopped.exit_code == 143
    else:
        raise AssertionError("All that is rolled out is stopped.")
    assert distributed.gather(rank) == list(range(ranks))  # no device waits for another
    try:
        stage.roll_out("fails", feeds=fail if distributed.leads() else lambda: None)
    except ValueError as error:
        return joining.leave(2, f"error: {error}", place)
    return joining.leave(0, "", place)


def models() -> Scoring:
    """Of policy, reference, critic and a reward model, as one device has them."""
    policy, reference = (unstack(init(jax.random.key(seed), CONFIG)) for seed in range(2))
    critic = unstack(
        init(jax.random.key(2), dataclasses.replace(CONFIG, scalar_head=True, tied=False))
    )
    source = open_source(JUDGE)
    reward_model = RewardModel(source, unstack(source.load(np.float32)), rows=ROWS)
    return Scoring(
        {"policy": policy, "reference": reference, "critic": critic},
        1.0,
        rows=ROWS,
        max_length=HOW.max_length,
        rewards={"judge": reward_model},
    )


def laid_over(layout: Layout, alone: Scoring) -> dict:
    """The models repeated over a mesh."""
    reward_model = alone.rewards["judge"]
    tree = {"models": dict(alone.models), "rewards": reward_model.model}
    tree = jax.jit(lambda: tree, out_shardings=model_shardings(tree, layout))()
    return tree | {"rewards": {"judge": dataclasses.replace(reward_model, model=tree["rewards"])}}


@dataclasses.dataclass
class Stage:
    """Samples that are rolled out over a mesh, beside which slices score."""

    layout: Layout
    how: GenerationConfig
    scoring: Scoring

    @functools.cached_property
    def slice_group(self):
        return slice_group_of(self.layout)

    def roll_out(
        self, name: str, then=lambda: None, feeds=lambda: None
    ) -> tuple[bool, ScoringQueue, list[Sample]]:
        """Whether the second slice decoded when the first had all that it could score; its queue;
        all samples.

        The second slice dawdles until the first is fed, waits for the rest, and does `then`. Who
        feeds a slice does `feeds` first.
        """
        scoring_queue = Told(self, name, feeds)
        heard = []
        hears = self.slice_group.leads and self.slice_group.ranks[0] != 0

        def observe(_) -> None:
            if heard or not hears:
                return
            if distributed.read_published(f"{name}/slice 0 fed 1", bool) is None:
                time.sleep(0.05)
                return
            assert distributed.wait_published(f"{name}/slice 0 fed {SHORT // ROWS}", bool, 60.0)
            heard.append(True)
            then()

        def finished(sample: Sample) -> None:
            scoring_queue.add(sample, answer(sample))

        settings = GenerationSettings(self.how, self.layout, 0, 0, 0)
        samples = generate_samples(
            (self.scoring.models["policy"], None),
            requests(),
            self.how,
            settings,
            AssignmentPolicy(given_away, name=name),
            observe=observe,
            finished=finished,
            idle_work=scoring_queue,
        )
        return any(distributed.gather(bool(heard))), scoring_queue, samples


class Told(ScoringQueue):
    """It tells of each slice that it feeds. Who follows never sees that any of it is done, and
    feeds as it is told.
    """

    def __init__(self, stage: Stage, name: str, feeds):
        super().__init__(stage.scoring)
        self.leads = stage.slice_group.leads
        self.name = name
        self.feeds = feeds
        self.fed = 0

    def feed(self, number: int, layout: Layout) -> Any:
        self.feeds()
        self.fed += 1
        distributed.publish(f"{self.name}/slice {number} fed {self.fed}", True)
        done = super().feed(number, layout)
        return done if self.leads else types.SimpleNamespace(is_ready=lambda: False)


def given_away(view: ClusterView) -> Reallocation:
    """The first slice decodes the short samples, and then nothing more."""
    waiting = np.flatnonzero(view.place == WAITS)
    begins = (view.place == WAITS).all() and not view.freed[0]
    first = [(index, 0) for index in waiting[: SHORT * begins].tolist()]
    room = view.rows - int((view.place == 1).sum())
    others = [(index, 1) for index in waiting[len(first) :][:room].tolist()]
    return Reallocation(
        first + others, [], np.array([not begins and not (view.place == 0).any(), False])
    )


def requests() -> list[Request]:
    """One sample each; so many that the second slice has twice its rows to begin."""
    limits = [4] * SHORT + [30] * 2 * HOW.max_rows
    prompts = np.random.default_rng(0).integers(0, 300, (len(limits), 5)).astype(np.int32)
    return [
        Request(prompt, (i,), limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


@functools.cache
def chat() -> list[dict[str, str]]:
    return json.loads((JUDGE / "scores.json").read_text())[0]["messages"]


def answer(sample: Sample) -> Response:
    """What the reward model reads: another text for each sample."""
    return Response("", chat()[:-1], {}, chat()[-1]["content"] + " so" * sample.sample_id)


def check(stage: Stage, scoring_queue: ScoringQueue, samples: list[Sample], alone: Scoring) -> None:
    """All short samples were scored where they had been decoded, each as it is on one device."""
    found = scoring_queue.scored()
    for rank, other in enumerate(distributed.gather(found)):
        if rank in stage.slice_group.ranks:
            assert other.keys() == found.keys()
            assert all(same(other[number], found[number]) for number in found)
    assert stage.slice_group.ranks[0] != 0 or found.keys() == set(range(SHORT))
    chosen = [sample for sample in samples if sample.sample_id in found]
    assert len(chosen) == len(found) == sum(len(batch.samples) for batch in scoring_queue.batches)
    numbers = {}
    if chosen:
        texts = as_sequences(chosen, alone.max_length)
        how = (alone.temperature, Extent(alone.rows), Layout())
        numbers = dispatch_scores(alone.models, texts, *how).fetch()
        assert numbers.keys() == {"logprobs", "reference_logprobs", "values"}
    for name, wanted in numbers.items():
        given = np.stack([found[sample.sample_id].columns[name] for sample in chosen])
        np.testing.assert_allclose(given, wanted, atol=1e-4, rtol=0)
        assert np.abs(given).max() > 1e-2, name
    wanted = (
        model_scorer(alone.rewards["judge"])([answer(sample) for sample in chosen]).values
        if chosen
        else []
    )
    given = [found[sample.sample_id].rewards["judge"] for sample in chosen]
    np.testing.assert_allclose(given, wanted, atol=1e-4, rtol=0)


def same(one: Scored, other: Scored) -> bool:
    """Bit for bit."""
    alike = [np.array_equal(one.columns[name], other.columns[name]) for name in one.columns]
    alike.append(one.columns.keys() == other.columns.keys())
    return all(alike) and one.rewards == other.rewards


def stop() -> None:
    raise Stopped(signal.SIGTERM)


def fail() -> None:
    raise ValueError("this rank alone.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:4]), kernels=sys.argv[4]))
