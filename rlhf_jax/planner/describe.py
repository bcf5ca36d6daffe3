"""Print the resources of a run on absent devices."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.sizes import PlannedRun, bubble_warnings
from rlhf_jax.models.shardings import unsplit
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.monitoring import console
from rlhf_jax.placement.plan import training_layout
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.planned import Planned
from rlhf_jax.planner.search.costs import CallCost, PlacedRun, predict_call
from rlhf_jax.planner.search.pipelines import joint_training
from rlhf_jax.setup.describe import placement_rows, work_rows
from rlhf_jax.setup.validation import check_batches, check_rows


def print_plan(config: Config, planned: Planned, more: Sequence[tuple[str, str]] = ()) -> None:
    """Print the resources of a run on absent devices, and `more` rows."""
    layout = training_layout(planned.layouts)
    policy = planned.models.policy
    model = f"{policy.num_layers} layers of {policy.width}, {layout.dtype.name}"
    weights = abstract_weights(policy, layout.dtype)
    rows = [
        ("model", f"{config.model.path} ({model})"),
        *placement_rows(str(planned.hardware), planned.plan),
        *work_rows(config),
        *(("not split", line) for line in unsplit(weights, layout)),
        ("activations", planned.remat_reason),
        ("memory", "\n".join(memory_parts.table(planned.parts))),
        *_predicted_rows(config, planned),
        *(("bubbles", sentence) for sentence in bubble_warnings(planned.run(config))),
        *more,
        *_refused_rows(config, planned),
    ]
    console.describe(f"rlhf_jax: a plan of {config.steps} steps", rows)


def _refused_rows(config: Config, planned: Planned) -> list[tuple[str, str]]:
    """Return why a run would be refused for its rows, which its memory does not depend on."""
    try:
        check_batches(config)
        check_rows(config, planned.plan, config.plan)
    except ValueError as error:
        return [("not yet", f"a run would be refused: {error}")]
    return []


def _predicted_rows(config: Config, planned: Planned) -> list[tuple[str, str]]:
    """Describe the predicted time of each call of a step; empty if the devices are unknown."""
    if planned.hardware.chip is None:
        return []
    calls = predict_calls(planned.run(config), planned.hardware)
    lines = [
        f"{call.seconds:8.1f} s  {call.name:20} {call.flops / 1e15:8.1f} PFLOP"
        f" {call.received / 1e9:8.1f} GB"
        for call in calls
    ]
    step = f"{sum(call.seconds for call in calls):8.1f} s  a step, predicted by formulas"
    note = "calls on devices of their own run side by side: --search predicts a step"
    lines += [
        step if planned.plan.is_uniform else note,
        "PFLOP of all devices; GB that each receives; not measured",
        f"prompts of {config.data.max_prompt_tokens} tokens, every response of"
        f" {derived.response_tokens(config)}, no drafts",
    ]
    return [("predicted", "\n".join(lines))]


def predict_calls(run: PlannedRun, hardware: Hardware) -> list[CallCost]:
    """Predict each call of an iteration in which all prompts and responses have full length.

    It assumes that samples share no prompt. Drafts and the training of a student are left out. The
    hardware's chip must be known. Calls that train as pipelines have shares of the seconds of both.
    """
    costs = []
    pipelined = []
    for call in derived.calls(run.config):
        placed = PlacedRun.on_part(run.at(call) or run, hardware)
        if placed.run.is_pipelined:
            pipelined.append((call, placed))
        else:
            costs.append(predict_call(placed, call))
    return costs + (joint_training(pipelined).costs if pipelined else [])
