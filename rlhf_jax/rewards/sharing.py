"""Share rewards out to the processes of a run: each scores some answers, and all get all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_jax.rewards.combination import Broken, Response, Scorer, Scores
from rlhf_jax.runtime import distributed


def shared_out(scorer: Scorer) -> Scorer:
    """Return a scorer by which each process scores its share of the answers, and all get all.

    All processes have all answers. It is broken where no process had a score.
    """
    if not distributed.started():
        return scorer

    def own(answers: Sequence[Response]) -> tuple[Scores, str | None]:
        try:
            return scorer(distributed.share(answers)), None
        except Broken as broken:  # other processes may have had numbers
            return broken.scores, str(broken)

    def score(answers: Sequence[Response]) -> Scores:
        found = distributed.gather_results(lambda: own(answers))
        broken = [Broken(words, scores) for scores, words in found if words is not None]
        if broken and sum(len(one.scores.values) for one in broken) == len(answers):
            raise broken[0]
        return _undealt([scores for scores, _ in found], len(answers))

    return score


def _undealt(parts: Sequence[Scores], answers: int) -> Scores:
    """Return scores in the order from which `distributed.share` dealt the answers."""
    values = np.zeros(answers, np.float32)
    failures = {}
    count = len(parts)
    for rank, part in enumerate(parts):
        values[rank::count] = part.values
        failures |= {rank + count * index: reason for index, reason in part.failures.items()}
    return Scores(values, dict(sorted(failures.items())))
