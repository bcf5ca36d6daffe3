"""Choose among strategies with predicted tokens and seconds: most tokens per second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.generation.strategy.settings import SELECTOR_SETTINGS
from rlhf_jax.types import Strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold a strategy for the next round, its expected figures, and those of plain decoding."""

    strategy: Strategy
    tokens: float  # expected of the round, all rows together
    seconds: float
    not_yet_compiled: Strategy | None  # a better strategy, whose programs are not compiled yet
    reason: str  # "best", "kept" (nothing is clearly better) or "probe"
    plain_rate: float  # tokens per second of plain decoding
    best_rate: float  # of the best strategy that is ready
    # Of a packed round's drafts, by class and depth (`budget.allocate_budget`).
    expected_gain: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def why(self) -> str:
        """Describe the choice in one sentence."""
        name = trees.name_of(self.strategy)
        rate = self.tokens / self.seconds
        others = f"plain {self.plain_rate:,.1f}, best {self.best_rate:,.1f}"
        predicted = f"{rate:,.1f} tokens/s predicted, {others}"
        better = ""
        if self.not_yet_compiled:
            better = f"; {trees.name_of(self.not_yet_compiled)} would be better, once compiled"
        return f"{name} ({self.reason}): {predicted}{better}"


def best_of(
    choices: Candidates,
    tokens: np.ndarray,
    seconds: np.ndarray,
    ready: Callable[[Strategy], bool],
    current: Strategy | None,
) -> tuple[int, int, int | None]:
    """Return (chosen, best, not_yet_compiled) as indices: most tokens per second of those ready.

    tokens, seconds [S] expected of a round. `current` stays unless another is clearly better
    (`SelectorSettings.switch_gain`); if the outcome is not clearly better than plain decoding
    (`gain_over_plain`), that is chosen at once. If nothing is ready it is the first candidate:
    plain, or the only one. `not_yet_compiled` is not ready, and clearly better than the chosen one;
    or None.
    """
    strategies = choices.strategies
    switch = 1 + SELECTOR_SETTINGS.switch_gain
    rate = tokens / seconds
    order = np.argsort(-rate, kind="stable").tolist()
    best = next((one for one in order if ready(strategies[one])), 0)

    chosen = best
    held = choices.place.get(current)
    if held is not None and held != best and ready(strategies[held]):
        chosen = held if rate[best] <= switch * rate[held] else best
    if rate[chosen] < (1 + SELECTOR_SETTINGS.gain_over_plain) * rate[0] and ready(strategies[0]):
        chosen = 0

    top = order[0]
    better = top == chosen or rate[top] > switch * rate[chosen]
    return chosen, best, top if better and not ready(strategies[top]) else None
