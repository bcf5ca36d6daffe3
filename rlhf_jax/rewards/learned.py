"""A reward that learns during a run: the head of a reward model, from labels of some responses.

Of two responses to each prompt the better one is labelled, and the head learns from that label once
(`OnePassReward`). The layers below it stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_jax.config.checks import require, require_one_of
from rlhf_jax.config.schema import Config
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.rewards.combination import Response, RewardResult, Score, Scorer
from rlhf_jax.rewards.models import RewardModel, finish_reading, read_states, start_scoring
from rlhf_jax.rewards.one_pass import CG_ABOVE, LABEL_CHOICES, OnePassReward, begun, cg_step
from rlhf_jax.runtime import to_host
from rlhf_jax.types import Memory

DAMPING = 0.8  # lambda_0 of the paper's experiments, above CG_ABOVE features
LEARNED_REWARD = "reward_model"  # folder of the model that a run leaves


@dataclasses.dataclass(frozen=True)
class LearnedReward:
    """Hold a term of the reward whose head learns from the labels of `labels`.

    The memory holds the head "theta" [d] and, up to CG_ABOVE features, the rest of `OnePassReward`.
    """

    name: str  # of the term
    model: RewardModel
    labels: Scorer  # of two responses, the one with the higher score is better
    choice: str
    seed: int
    layout: Layout = ONE_DEVICE

    @functools.cached_property
    def start(self) -> np.ndarray:
        """Return the head of the reward model: [d] float64."""
        head = self.model.model.head
        assert head is not None, "A reward model has a head."
        return np.asarray(to_host.fetch(head), np.float64)[:, 0]

    def __post_init__(self) -> None:
        features = self.model.model.config.width
        if features > CG_ABOVE and self.choice != "random":
            raise ValueError(
                f"reward.label_choice is {self.choice!r}, and the reward model has {features}"
                f" features; above {CG_ABOVE} no certainty is kept: set 'random'."
            )

    def results(self, responses: Sequence[Response], memory: Memory) -> Mapping[int, RewardResult]:
        """Return the reward of each response by the head so far, or why it has none."""
        features, failures = self._features(responses)
        return self._rated(features, memory) | failures

    def learn(
        self, responses: Sequence[Response], memory: Memory
    ) -> tuple[Mapping[int, RewardResult], Memory, dict[str, float]]:
        """Learn from labels of these responses; return the new rewards, memory and metrics.

        `labels/predicted` is the share of the labels that the head predicted before it learned.
        """
        features, failures = self._features(responses)
        groups: dict[int, list[int]] = {}
        for place, index in enumerate(features):
            groups.setdefault(responses[index].group, []).append(place)
        states = np.array([*features.values()]).reshape(-1, len(self.start))
        reward = OnePassReward.restored(memory) if memory else begun(self.start, states)
        random = np.random.default_rng((self.seed, reward.labels))
        pairs = [
            tuple(own[place] for place in reward.choose_pair(states[own], self.choice, random))
            for own in groups.values()
            if len(own) > 1
        ]
        indices = [*features]
        shown = [responses[indices[place]] for pair in pairs for place in pair]
        scores = self.labels(shown).values.reshape(-1, 2) if shown else np.zeros((0, 2))
        differ = np.flatnonzero(np.abs(scores[:, 0] - scores[:, 1]) > 0)  # not NaN
        labels = (scores[differ, 0] > scores[differ, 1]).astype(np.float64)
        chosen = [pairs[place] for place in differ]
        z = np.array([states[first] - states[second] for first, second in chosen])
        metrics = {"labels/failed": float(np.isnan(scores).any(axis=1).sum())}
        after = memory
        if chosen:
            metrics["labels/predicted"] = float(np.mean((z @ reward.theta > 0) == (labels > 0)))
            if len(self.start) > CG_ABOVE:
                reward.theta = cg_step(reward.theta, z, labels, rate=1.0, damping=DAMPING)
                reward.labels += len(labels)
            else:
                reward.learn(z, labels)
            after = reward.state()
        metrics["labels/learned"] = float(reward.labels)
        return self._rated(features, after) | failures, after, metrics

    def _features(
        self, responses: Sequence[Response]
    ) -> tuple[dict[int, np.ndarray], dict[int, RewardResult]]:
        """Return the last hidden state [d] of each response by its index, or why it has none."""
        parts, failures = start_scoring(self.model, responses, self.layout, read_states)
        found = finish_reading(parts)
        features = {index: np.asarray(found[index], np.float64) for index in sorted(found)}
        return features, {**failures}

    def _rated(self, features: Mapping[int, np.ndarray], memory: Memory) -> dict[int, RewardResult]:
        theta = memory["theta"] if memory else self.start
        return {index: Score(float(own @ theta)) for index, own in features.items()}


def check_labels(config: Config) -> None:
    """Check that one reward model learns from labels, if they are named."""
    reward = config.reward
    require_one_of(config, "reward.label_choice", LABEL_CHOICES)
    if not reward.labels:
        return
    require(
        len(reward.models) == 1,
        f"reward.labels is {reward.labels!r}, and reward.models has {len(reward.models)} models;"
        " labels teach exactly one.",
    )
    require(
        not config.generation.fuse_inference,
        "reward.labels changes the reward model, of which generation.fuse_inference keeps a copy;"
        " give one or the other.",
    )
    require(
        config.generation.samples_per_prompt > 1,
        "reward.labels compares two responses to a prompt; raise generation.samples_per_prompt to"
        " at least 2.",
    )
