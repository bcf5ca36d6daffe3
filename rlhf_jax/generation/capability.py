"""Dynamic sampling: fewer samples, or hotter ones, of prompts that the policy has mastered.

ESRL (Wang et al. 2024) adapts the number of samples and the temperature to the policy's capability.
The rule is our design: a prompt's capability is the moving average of its mean rewards, as a share
of the range of all rewards so far. A prompt without an earlier visit has capability 0, so nothing
changes on data whose prompts do not repeat.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.types import Memory

WEIGHT = 0.5  # of the latest visit


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Hold the samples and temperatures of prompts of capability 0 and 1."""

    most: int  # samples of a prompt of capability 0
    fewest: int  # of capability 1
    temperature: float  # of capability 0
    hottest: float  # of capability 1

    @classmethod
    def from_config(cls, config: Config) -> DynamicSampling | None:
        """Return the shares of prompts in samples and temperature; None if they are equal."""
        if not derived.samples_dynamically(config):
            return None
        generation = config.generation
        return cls(
            most=generation.samples_per_prompt,
            fewest=generation.fewest_samples or generation.samples_per_prompt,
            temperature=generation.temperature,
            hottest=generation.hottest or generation.temperature,
        )

    def samples(self, capability: np.ndarray) -> np.ndarray:
        """Return the number of samples of each prompt."""
        return np.rint(self.most - capability * (self.most - self.fewest)).astype(int)

    def temperatures(self, capability: np.ndarray) -> np.ndarray:
        """Return the temperature of each prompt's samples."""
        return self.temperature + capability * (self.hottest - self.temperature)


def capabilities(memory: Memory, rows: np.ndarray) -> np.ndarray:
    """Return the capability of prompts by their rows in the data, in 0 .. 1."""
    if not memory:
        return np.zeros(len(rows))
    known = dict(zip(memory["rows"].tolist(), memory["means"].tolist(), strict=True))
    low, high = memory["range"].tolist()
    means = np.array([known.get(row, low) for row in rows.tolist()])
    return (means - low) / (high - low) if high > low else np.zeros(len(rows))


def after_visit(memory: Memory, rows: np.ndarray, rewards: np.ndarray) -> Memory:
    """Return the memory after rewards [P, n] of prompts, NaN where there is none."""
    if np.isnan(rewards).all():
        return memory
    known = (
        dict(zip(memory["rows"].tolist(), memory["means"].tolist(), strict=True)) if memory else {}
    )
    for row, own in zip(rows.tolist(), rewards, strict=True):
        if not np.isnan(own).all():
            mean = float(np.nanmean(own))
            known[row] = mean if row not in known else known[row] + WEIGHT * (mean - known[row])
    seen = [*memory.get("range", ()), np.nanmin(rewards), np.nanmax(rewards)]
    return {
        "rows": np.array([*known], np.int64),
        "means": np.array([*known.values()], np.float64),
        "range": np.array([min(seen), max(seen)], np.float64),
    }
