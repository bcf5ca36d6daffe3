"""Rewards shared out to the processes of a run: each scores some responses, all get all scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_jax.rewards.combination import Broken, Response, Scorer, Scores
from rlhf_jax.runtime import distributed


def shared_out(scorer: Scorer) -> Scorer:
    """Return a scorer of responses that all processes have: each scores its share of them.

    All get all scores. Broken where no process had a score. With one process it is `scorer` itself.
    """
    if not distributed.started():
        return scorer

    def score_share(responses: Sequence[Response]) -> tuple[Scores, str | None]:
        try:
            return scorer(distributed.share(responses)), None
        except Broken as broken:  # Other processes may have had numbers.
            return broken.scores, str(broken)

    def score(responses: Sequence[Response]) -> Scores:
        found = distributed.gather_results(lambda: score_share(responses))
        broken = [Broken(words, scores) for scores, words in found if words is not None]
        parts = [scores for scores, _ in found]
        if broken and sum(len(one.scores.values) for one in broken) == len(responses):
            raise broken[0]
        return _in_order(parts, len(responses))

    return score


def _in_order(parts: Sequence[Scores], responses: int) -> Scores:
    """Return the scores of all processes in the order before `distributed.share`."""
    values = np.zeros(responses, np.float32)
    failures = {}
    count = len(parts)
    for rank, part in enumerate(parts):
        values[rank::count] = part.values
        failures |= {rank + count * index: reason for index, reason in part.failures.items()}
    return Scores(values, dict(sorted(failures.items())))
