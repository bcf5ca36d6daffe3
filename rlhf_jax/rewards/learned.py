"""A reward that learns during a run: the head of a reward model, from labels of some responses.

Of two responses to each prompt the better one is labelled, and the head learns from that label once
(`OnePassReward`). The layers below it stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.rewards.combination import Response, RewardResult, Score, Scorer
from rlhf_jax.rewards.models import RewardModel, finish_reading, read_states, start_scoring
from rlhf_jax.rewards.one_pass import CG_ABOVE, OnePassReward, cg_step
from rlhf_jax.runtime import to_host
from rlhf_jax.types import Memory

CHOICES = ("active", "deployment", "random")
OPTIMISM = 1.0  # beta of the choice in deployment
DAMPING = 0.8  # lambda_0 of the paper's experiments, above CG_ABOVE features


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
        for index in features:
            groups.setdefault(responses[index].group, []).append(index)
        reward = self._restored(memory, features)
        pairs = [*self._pairs(groups, features, reward)]
        shown = [responses[index] for pair in pairs for index in pair]
        scores = self.labels(shown).values.reshape(-1, 2) if shown else np.zeros((0, 2))
        differ = np.flatnonzero(np.abs(scores[:, 0] - scores[:, 1]) > 0)  # not NaN
        labels = (scores[differ, 0] > scores[differ, 1]).astype(np.float64)
        chosen = [pairs[place] for place in differ]
        z = np.array([features[first] - features[second] for first, second in chosen])
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
        return {index: np.asarray(found[index], np.float64) for index in sorted(found)}, {
            **failures
        }

    def _rated(self, features: Mapping[int, np.ndarray], memory: Memory) -> dict[int, RewardResult]:
        theta = memory["theta"] if memory else self.start
        return {index: Score(float(own @ theta)) for index, own in features.items()}

    def _restored(self, memory: Memory, features: Mapping[int, np.ndarray]) -> OnePassReward:
        """Return the reward of the labels so far.

        Before the first one a head is about as uncertain as the features vary: by a unit of reward.
        """
        if memory:
            return OnePassReward.restored(memory)
        states = np.array([*features.values()]).reshape(-1, len(self.start))
        spread = float(states.var(axis=0).sum()) if len(states) > 1 else 0.0
        return OnePassReward.begin(len(self.start), spread or 1.0, theta=self.start)

    def _pairs(
        self,
        groups: Mapping[int, list[int]],
        features: Mapping[int, np.ndarray],
        reward: OnePassReward,
    ) -> Iterator[tuple[int, int]]:
        """Yield the two responses to each prompt that are labelled."""
        random = np.random.default_rng((self.seed, reward.labels))
        for members in groups.values():
            if len(members) < 2:
                continue
            states = np.array([features[index] for index in members])
            first, second = random.permutation(len(members))[:2].tolist()
            if self.choice == "active":
                places = np.array(np.triu_indices(len(members), 1)).T
                differences = states[places[:, 0]] - states[places[:, 1]]
                first, second = places[reward.choose_active(differences)].tolist()
            elif self.choice == "deployment":
                best, other = reward.choose_deployment(states, OPTIMISM)
                first, second = (
                    best,
                    other if other != best else (second if second != best else first),
                )
            yield members[first], members[second]
