"""What a run may be for: an objective is found in a registry by `config.objective`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rlhf_jax.config.schema import Config
from rlhf_jax.runtime.extensions import Table, load_named


class Objective(Protocol):
    """Say what a run learns, and take its steps.

    What stands around a step (checkpoints, logs, evaluations, signals) is the same for all. The
    class that defines `step` says by `may_lag = True` that it also learns from samples of older
    weights (`training.lag`), and by `may_pipeline = True` that its gradients may be taken by
    pipelines (`training.pipelined`).
    """

    # samples have rewards: reward functions or models, an advantage and a KL penalty are asked for
    uses_rewards: bool
    # the policy is trained, and written to a folder at the end
    trains_policy: bool
    # a student is trained whatever the drafting strategy is, on all samples of a step
    distills: bool

    def title(self, config: Config) -> str:
        """Name what is done, for people to read and for the report: "GRPO"."""
        ...

    def validate(self, config: Config) -> None:
        """Raise ValueError, in one sentence, for what this objective cannot use."""
        ...

    def compile_step(self, state: Any, run: Any) -> None:
        """Compile what a step will need, beside the first evaluation; it may do nothing."""
        ...

    def step(self, state: Any, run: Any, observe: Any) -> tuple[Any, Any]:
        """Take one step: (`RunState`, `Run`, `Observer`) to (`RunState`, `StepReport`)."""
        ...

    def report_names(self) -> Mapping[str, str]:
        """Name the numbers that mean something else here, by their key in metrics.jsonl.

        The report heads their curves so; a name says the unit, too.
        """
        ...


def _no_objective(found: object) -> str:
    """Say why an object of a file is none."""
    lacking = [name for name in ("title", "validate", "step") if not hasattr(found, name)]
    return f"is no objective: it has no {lacking[0]}" if lacking else ""


# By name: an objective, its class, or where that is, so that only what runs is imported.
OBJECTIVES: Table[Objective | type[Objective] | str] = Table(
    "objective",
    _no_objective,
    {
        "reward": "rlhf_jax.objectives.reward:RewardObjective",
        "distill": "rlhf_jax.objectives.distillation:DistillationObjective",
    },
)


def register(name: str, objective: Objective) -> None:
    """Let `config.objective` name an objective."""
    OBJECTIVES[name] = objective


def objective_of(config: Config) -> Objective:
    """Return the objective that a config names; KeyError where it is not registered."""
    entry = OBJECTIVES[config.objective]
    if isinstance(entry, str):
        entry = load_named(entry, "objective")
    return entry() if isinstance(entry, type) else entry


def step_may(objective: Objective, word: str) -> bool:
    """Tell whether an objective says of its step that it may do something, as by `may_lag`.

    A class that defines another step inherits nothing that was said of the one before.
    """
    for where in (objective, *type(objective).__mro__):
        said = getattr(where, "__dict__", {})
        if word in said or "step" in said:
            return bool(said.get(word, False))
    return False
