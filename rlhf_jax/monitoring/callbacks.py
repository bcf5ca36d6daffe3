"""Let a caller's own code hear what a run does, and end it."""

from __future__ import annotations

from collections.abc import Mapping


class Callback:
    """Hear of steps and evaluations; a subclass has one of the methods or both.

    What they return says whether the run shall end: it then does what it does after its last step.
    In a run of several processes the leader's callbacks are called.
    """

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Hear the metrics of step `step`, counted from 0, as metrics.jsonl has them."""

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> bool | None:
        """Hear the means of an evaluation after `step` updates, as evaluations.jsonl has them."""
