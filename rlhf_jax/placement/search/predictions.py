"""Predict all calls of an iteration that are placed."""

from __future__ import annotations

from rlhf_jax.config import derived
from rlhf_jax.config.hardware import Hardware
from rlhf_jax.config.sizes import PlannedRun
from rlhf_jax.mesh import AXES
from rlhf_jax.placement.search.costs import CallCost, PlacedRun, predict_call
from rlhf_jax.placement.search.pipelines import joint_training


def predict_calls(
    run: PlannedRun, hardware: Hardware, tokens_per_round: float = 1.0
) -> list[CallCost]:
    """Predict each call of an iteration in which all prompts and responses have full length.

    No prompt is taken to be shared by its samples. Drafting and the training of a student are left
    out. tokens_per_round: that a row gains in a round of generation, 1 without drafts. The
    hardware's chip must be known. Calls that train as pipelines have shares of the seconds of both.
    """
    found = []
    pipelined = []
    for call in derived.calls(run.config):
        own = run.at(call) or run
        placed = PlacedRun(own, hardware.part(own.layout.extent(AXES)))
        if own.is_pipelined:
            pipelined.append((call, placed))
        else:
            found.append(predict_call(placed, call, tokens_per_round))
    return found + (list(joint_training(pipelined).costs) if pipelined else [])
