"""Divide rewards among the processes of a run: each scores some responses, all get all scores."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_jax.rewards.combination import Broken, Response, Scorer, Scores, as_scores, in_order
from rlhf_jax.runtime import distributed


def shared_out(scorer: Scorer) -> Scorer:
    """Return a scorer of responses that all processes have: each scores its share of them.

    All get all scores. Broken if no process has a score. With one process it is `scorer` itself.
    """
    if not distributed.started():
        return scorer

    def score_share(responses: Sequence[Response]) -> tuple[Scores, str | None]:
        shares = _shares(responses)
        try:
            return scorer([responses[index] for index in shares[distributed.rank()]]), None
        except Broken as broken:  # Other processes may have had numbers.
            return broken.scores, str(broken)

    def score(responses: Sequence[Response]) -> Scores:
        gathered = distributed.gather_results(lambda: score_share(responses))
        broken = [Broken(words, scores) for scores, words in gathered if words is not None]
        if broken and sum(len(one.scores.values) for one in broken) == len(responses):
            raise broken[0]
        own = [map(scores.result, range(len(scores.values))) for scores, _ in gathered]
        return as_scores(in_order(_shares(responses), own))

    return score


def _shares(responses: Sequence[Response]) -> list[list[int]]:
    """Return the indices of the responses that each process scores; groups stay together."""
    order = {group: place for place, group in enumerate(dict.fromkeys(r.group for r in responses))}
    shares: list[list[int]] = [[] for _ in range(distributed.count())]
    for index, response in enumerate(responses):
        shares[order[response.group] % len(shares)].append(index)
    return shares
