"""Let a caller's own code hear what a run does, and end it."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from pathlib import Path

from rlhf_jax.monitoring.metrics import read_rows

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*(?P<key>\S+?)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>[-+.\deE]+)\s*")


class Callback:
    """Hear of steps and evaluations; a subclass has one of the methods or both.

    What they return says whether the run shall end: it then does what it does after its last step.
    In a run of several processes the leader's callbacks are called.
    """

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Hear the metrics of step `step`, counted from 0, as metrics.jsonl has them."""

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> bool | None:
        """Hear the means of an evaluation after `step` updates, as evaluations.jsonl has them."""


class StopAt(Callback):
    """End a run at a number of a step or an evaluation, as in 'eval/reward >= 0.95'."""

    def __init__(self, condition: str):
        """Read the condition; ValueError, in one sentence, if it is none."""
        found = CONDITION.fullmatch(condition)
        try:
            if found is None:
                raise ValueError
            self.key: str = found["key"]
            self._bound = float(found["bound"])
        except ValueError:
            raise ValueError(
                f"stop_at is {condition!r}; it must be a number's name, one of"
                f" {', '.join(COMPARISONS)} and a bound, as in 'eval/reward >= 0.95'."
            ) from None
        self._holds = COMPARISONS[found["sign"]]

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a step has the number, and it is where the run ends."""
        del step
        return self.key in metrics and bool(self._holds(metrics[self.key], self._bound))

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> bool:
        """Say the same of an evaluation."""
        return self.after_step(step, means)

    def was_met(self, workdir: Path) -> bool:
        """Return whether a step that the run in `workdir` has taken was where it ends."""
        return any(self.after_step(row["step"], row) for row in read_rows(workdir, "metrics"))
