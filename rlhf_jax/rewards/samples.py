"""Rewards of finished samples: their text with the prompt, scored by all terms and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.requests import Sample
from rlhf_jax.rewards.combination import (
    Broken,
    EagerScorer,
    Response,
    RewardResult,
    Scorer,
    Scores,
    as_scores,
    in_order,
)
from rlhf_jax.rewards.learned import LearnedReward
from rlhf_jax.rewards.models import RewardModel
from rlhf_jax.runtime import distributed

# known results of responses, by the reward's term and the response's index
Known = Mapping[str, Mapping[int, RewardResult]]
# from (responses, known results) to the scores, and metrics by name
RewardFunction = Callable[[Sequence[Response], Known], tuple[Scores, dict[str, float]]]


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Hold the rewards of a run."""

    # None: samples have no rewards
    function: RewardFunction | None
    tokenizer: Tokenizer
    # from (rewards [B], ended [B]) to rewards [B] for training
    clip: Callable[[np.ndarray, np.ndarray], np.ndarray]
    # terms of the reward that are models, by name
    models: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)
    # the term whose model learns from labels during the run; None: all models are fixed
    learned: LearnedReward | None = None
    # terms that score samples as they finish, by name
    eager: Mapping[str, EagerScorer] = dataclasses.field(default_factory=dict)
    # the reward of a sample whose scoring failed; None: it is not trained on
    failed: float | None = None
    # share of a roll-out's samples; the run stops if more fail
    max_failed: float = 0.5


def responses_of(
    samples: Sequence[Sample], prompts: Prompts, rows: np.ndarray, tokenizer: Tokenizer
) -> list[Response]:
    """Join each sample's text with its prompt, row and messages; rows [B] index the prompts."""
    return [
        Response(
            prompts.texts[row],
            prompts.messages[row],
            prompts.rows[row],
            tokenizer.decode(s.tokens),
            np.asarray(s.tokens).tolist(),
            s.request.id,
        )
        for s, row in zip(samples, rows, strict=True)
    ]


def penalise_and_clip(
    rewards: np.ndarray, ended: np.ndarray, missing_end: float, clip: float
) -> np.ndarray:
    """Return the rewards less `missing_end` for cut off responses, and clipped: [B] float32.

    rewards [B] float32; ended [B] bool is false for a response that was cut off. They lie within
    `clip` of 0; 0 for no limit.
    """
    rewards = np.where(ended, rewards, rewards - np.float32(missing_end))
    return np.clip(rewards, -clip, clip) if clip else rewards


def compute_rewards(
    responses: Sequence[Response], rewards: Rewards, scored: Sequence[Mapping[str, RewardResult]]
) -> tuple[np.ndarray, dict[str, float]]:
    """Compute the rewards [B] float32 of responses, and the metrics of all terms.

    scored: for each response, its known results by the term's name; these are not recomputed. A
    response whose scoring failed has `rewards.failed`, or NaN. Raises ValueError, with the first
    reason, if more than `rewards.max_failed` of them failed.
    """
    if rewards.function is None:
        return np.zeros(len(responses), np.float32), {}
    known = {
        name: {index: own[name] for index, own in enumerate(scored) if name in own}
        for name in (*rewards.models, *rewards.eager)
    }
    scores, metrics = rewards.function(responses, known)
    failed = list(scores.failures)
    if len(failed) > rewards.max_failed * len(responses):
        first = scores.failures[failed[0]].rstrip(".")
        raise ValueError(
            f"The reward failed on {len(failed)} of {len(responses)} responses, more than"
            f" reward.max_failed = {rewards.max_failed:g} of them (the first: {first}): raise that,"
            " or correct the reward and resume with checkpoint.allow_changes=True."
        )
    values = scores.values.copy()
    values[failed] = np.nan if rewards.failed is None else rewards.failed
    return values, metrics | {"reward/failed": float(len(failed))}


def table_of(
    responses: Sequence[Response],
    rewards: np.ndarray | None = None,
    measures: Mapping[str, np.ndarray] = {},
) -> list[dict[str, Any]]:
    """Make one row a sample, for people to read; a number is None where scoring failed."""
    table: list[dict[str, Any]] = [{"prompt": r.prompt, "response": r.response} for r in responses]
    numbers = {} if rewards is None else {"reward": rewards}
    for name, column in (numbers | dict(measures)).items():
        for row, value in zip(table, column, strict=True):
            row.setdefault(name, float(value) if np.isfinite(value) else None)
    return table


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
