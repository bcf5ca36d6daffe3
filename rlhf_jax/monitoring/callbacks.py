"""Let a caller's own code observe a run, and end it."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from pathlib import Path

from rlhf_jax.monitoring.metrics import read_rows

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*(?P<key>\S+?)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>[-+.\deE]+)\s*")


class Callback:
    """Observe steps and evaluations; a subclass has one of the methods or both.

    A method returns True to end the run, which then finishes as after its last step. In a run of
    several processes the leader's callbacks are called.
    """

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Observe the metrics of step `step`, counted from 0, as in metrics.jsonl."""

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> bool | None:
        """Observe the means of an evaluation after `step` updates, as in evaluations.jsonl."""


class StopAt(Callback):
    """End a run when a metric meets a condition, such as 'eval/reward >= 0.95'."""

    def __init__(self, condition: str):
        """Parse the condition; ValueError, in one sentence, if it is invalid."""
        match = CONDITION.fullmatch(condition)
        try:
            if match is None:
                raise ValueError
            self.key: str = match["key"]
            self._bound = float(match["bound"])
        except ValueError:
            raise ValueError(
                f"stop_at is {condition!r}; it must be a number's name, one of"
                f" {', '.join(COMPARISONS)} and a bound, as in 'eval/reward >= 0.95'."
            ) from None
        self._holds = COMPARISONS[match["sign"]]

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a step has the metric, and it meets the condition."""
        del step
        return self.key in metrics and bool(self._holds(metrics[self.key], self._bound))

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> bool:
        """Return the same for an evaluation."""
        return self.after_step(step, means)

    def was_met(self, workdir: Path) -> bool:
        """Return whether an earlier step of the run in `workdir` met the condition."""
        return any(self.after_step(row["step"], row) for row in read_rows(workdir, "metrics"))
