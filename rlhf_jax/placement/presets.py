"""The named plans of a config, and the one that its mesh describes.

(Colocated, interleaved and disaggregated: Adaptive Placement and Parallelism, arXiv 2312.11819.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.mesh import sizes
from rlhf_jax.placement.pipelined import fill_with_copies
from rlhf_jax.placement.plan import Placement, Plan, check, read_plan
from rlhf_jax.runtime.files import find
from rlhf_jax.types import ModelConfigs

# From (the config's mesh on all devices, the calls) to the placement of each call.
Preset = Callable[[Placement, Collection[str]], dict[str, Placement]]


def plan_of(
    config: Config,
    num_devices: int,
    default: Placement | None = None,
    layers: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan of a config, checked; without `config.plan` all calls have its mesh.

    default: dtype and kernels of every call that sets none. layers: of models by name, if known;
    they determine the copies of a critic's pipeline. Raises ValueError or FileNotFoundError in one
    sentence if the plan, or the mesh, does not fit the devices.
    """
    mesh = config.mesh
    shape = sizes(mesh.data, mesh.fsdp, mesh.tensor, num_devices, mesh.slices)
    base = dataclasses.replace(default or Placement(0, 1), first=0, count=num_devices, **shape)
    calls = derived.calls(config)
    if not config.plan:
        stages = dataclasses.replace(base, pipelined=config.training.pipelined)
        alike = {call: stages if call.endswith("_training") else base for call in calls}
        if stages.pipelined and layers:
            for role in derived.trained_critics(config):
                alike[f"{role}_training"] = fill_with_copies(stages, layers, role)
        return Plan(num_devices, alike)
    if config.training.pipelined:
        raise ValueError(
            f"training.pipelined is for config.mesh, and plan is {config.plan!r}: set plan to '',"
            " or to a file that sets pipelined for its calls, and then training.pipelined to False."
        )
    if config.plan in PRESETS:
        return Plan(num_devices, PRESETS[config.plan](base, calls))
    if not config.plan.endswith(".json"):
        raise ValueError(
            f"plan is {config.plan!r}; it must be '', {', '.join(PRESETS)}, or a file NAME.json."
        )
    plan = read_plan(Path(find(config.plan)), base)
    check(plan, f"plan: {config.plan}", calls, num_devices)
    return plan


def layer_counts(models: ModelConfigs) -> dict[str, int]:
    """Return the layers of each trained model, by the names that a plan uses."""
    return {name: model.num_layers for name, model in models.trunks.items()}


def colocated(base: Placement, calls: Collection[str]) -> dict[str, Placement]:
    """Give every call all devices: generation the config's mesh, the others rows and width."""
    whole = _by_width(base, first=0, count=base.count)
    return {call: base if call == "generation" else whole for call in calls}


def interleaved(base: Placement, calls: Collection[str]) -> dict[str, Placement]:
    """Let policy and critic work side by side, on half of the devices each.

    The reward models share the critic's devices, and so does the reference if there is no critic.
    Generation has all devices, and so has the policy's training if nothing is trained next to it.
    """
    first, second = _halves(base, "interleaved")
    critic = any(call.endswith("_training") and call != "policy_training" for call in calls)
    ours = ("", "policy", "reference") if critic else ("", "policy")
    others = {call for call in calls if call.rpartition("_")[0] not in ours}
    placements = {call: second if call in others else first for call in calls}
    if not others:
        raise ValueError(
            "plan 'interleaved' has nothing to place beside the policy: this run has no critic,"
            " reference or reward model; choose 'colocated' or 'disaggregated'."
        )
    if not critic:
        placements["policy_training"] = _by_width(base, first=0, count=base.count)
    return placements | {"generation": base}


def disaggregated(base: Placement, calls: Collection[str]) -> dict[str, Placement]:
    """Give generation the first half of the devices, and the second to all else.

    Generation keeps the config's slices and `mesh.tensor`; rows have the rest.
    """
    if "generation" not in calls:
        raise ValueError(
            "plan 'disaggregated' sets generation apart, and this run generates nothing; choose"
            " 'colocated'."
        )
    first, second = _halves(base, "disaggregated")
    fixed = base.slices * base.tensor
    if first.count % fixed:
        raise ValueError(
            f"plan 'disaggregated' gives generation {first.count} devices, which mesh.slices x"
            f" mesh.tensor = {fixed} does not divide; lower one of the two."
        )
    generation = dataclasses.replace(
        base, first=0, count=first.count, data=first.count // fixed, fsdp=1
    )
    return {call: generation if call == "generation" else second for call in calls}


PRESETS: dict[str, Preset] = {
    "colocated": colocated,
    "interleaved": interleaved,
    "disaggregated": disaggregated,
}


def _halves(base: Placement, name: str) -> tuple[Placement, Placement]:
    """Return the halves of the devices, each with rows and width split over all that it has."""
    half, rest = divmod(base.count, 2)
    if rest:
        raise ValueError(
            f"plan {name!r} halves the devices, and {base.count} cannot be halved; give an even"
            " number, or choose 'colocated'."
        )
    return _by_width(base, first=0, count=half), _by_width(base, first=half, count=half)


def _by_width(base: Placement, first: int, count: int) -> Placement:
    """Split rows, and the width of weights, over a range of devices."""
    return dataclasses.replace(
        base, first=first, count=count, slices=1, data=1, fsdp=count, tensor=1
    )
