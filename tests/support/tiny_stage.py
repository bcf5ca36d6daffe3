"""A stage that takes seconds: a few prompts of several samples, and a plan that places them as it
likes.
"""

from __future__ import annotations

import numpy as np

from rlhf_jax.generation.reallocation.planner import ClusterView, Reallocation
from rlhf_jax.generation.requests import Request


def requests(count: int = 6, samples: int = 4) -> list[Request]:
    """Short prompts of `samples` samples each, with limits of their own and two earlier texts."""
    random = np.random.default_rng(0)
    return [
        Request(
            prompt=random.integers(0, 300, random.integers(1, 12)).astype(np.int32),
            sample_ids=tuple(range(i * samples, (i + 1) * samples)),
            max_new_tokens=int(random.integers(1, 40)),
            history=tuple(random.integers(0, 300, 20).astype(np.int32) for _ in range(2)),
        )
        for i in range(count)
    ]


class Shuffled:
    """Stands in for a plan: admits and moves what it likes, whenever it is asked."""

    def __init__(self, seed: int, share: float = 0.5):
        self.random = np.random.default_rng(seed)
        self.share = share
        self.moves = 0

    def __call__(self, view: ClusterView) -> Reallocation:
        free = view.rows - np.bincount(view.place[view.place >= 0], minlength=view.slices)
        admissions = []
        moves = []
        for index, place in enumerate(view.place.tolist()):
            to = int(self.random.integers(view.slices))
            if free[to] > 0 and to != place and self.random.random() < self.share:
                (admissions if place < 0 else moves).append((index, to))
                free[to] -= 1
        self.moves += len(moves)
        return Reallocation(admissions, moves, np.zeros(view.slices, bool))
