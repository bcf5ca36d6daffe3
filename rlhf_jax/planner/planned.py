"""Plan a run for absent devices, from its config and the shapes of its models."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.parts import Part
from rlhf_jax.memory.sizes import PlannedRun
from rlhf_jax.models.files.source import SMOLLM2_NAME
from rlhf_jax.models.published import is_published, shape_of
from rlhf_jax.placement.plan import CallLayouts, Plan
from rlhf_jax.planner.chips import check_boxes
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.setup.run_spec import count_devices, place_calls, register_own
from rlhf_jax.training.distill import student_config
from rlhf_jax.types import ModelConfig, ModelConfigs


class Planned(NamedTuple):
    """Hold the resources of a run on devices of a kind."""

    hardware: Hardware
    plan: Plan  # of calls
    layouts: CallLayouts  # on abstract meshes
    models: ModelConfigs
    parts: list[Part]
    remat: bool
    remat_reason: str

    def run(self, config: Config) -> PlannedRun:
        """Return the planned run of a config, with the layout of each call."""
        layout = next(iter(self.layouts.values()))
        return PlannedRun(config, self.models, layout, self.remat, self.layouts)


def plan_run(config: Config, hardware: Hardware) -> Planned:
    """Plan a run; raises ValueError or FileNotFoundError for an invalid config.

    Prompts and rewards are ignored.
    """
    register_own(config)
    models = _models(config)
    plan, _ = place_calls(config, models, hardware, hardware.count, hardware.count)
    check_boxes(plan, f"plan: {config.plan or 'mesh'}", hardware.torus)
    layouts = plan.layouts(hardware.platform)
    gigabytes = config.mesh.device_memory_gb
    limit = min(filter(None, (hardware.gigabytes, gigabytes)), default=0.0)
    known = limit * memory_parts.GIGA if limit else None
    predicted = functools.partial(estimate.fullest, config, models, plan, layouts)
    remat, reason = estimate.settle_remat(config, predicted(remat=False), known)
    parts = predicted(remat=remat)
    return Planned(hardware._replace(gigabytes=limit), plan, layouts, models, parts, remat, reason)


def missing_inputs(config: Config) -> str:
    """Describe the devices or weights that a run lacks here; '' if it could begin.

    Weights of a hub name count as missing: planning does not fetch them.
    """
    sizes = config.mesh
    shape = (sizes.slices, sizes.data, sizes.fsdp, sizes.tensor)
    here = count_devices()
    if -1 not in shape and math.prod(shape) != here:
        return f"the config needs {math.prod(shape)} devices, and {here} are here"
    paths = (
        config.model.path,
        config.drafter.path,
        config.critic.path,
        config.kl.reference,
        *derived.reward_models(config),
    )
    missing = [
        path
        for path in paths
        if path != SMOLLM2_NAME and is_published(path) and not Path(path).expanduser().exists()
    ]
    return f"there are no weights in {', '.join(missing)}" if missing else ""


def hardware_of(config: Config) -> Hardware:
    """Return the devices that a config's mesh requires, or those that are present."""
    sizes = config.mesh
    shape = (sizes.slices, sizes.data, sizes.fsdp, sizes.tensor)
    if -1 not in shape and sizes.device_memory_gb:
        return Hardware("gpu", "device", math.prod(shape), sizes.device_memory_gb, 9.0)
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", 0) or 0)
    known = (estimate.memory_for_remat(config, device) or 0.0) / memory_parts.GIGA
    return Hardware(device.platform, device.device_kind, count_devices(), known, capability)


def _models(config: Config) -> ModelConfigs:
    """Return the shapes of all models of a run."""
    policy = shape_of(config.model.path)
    drafter: ModelConfig | None = None
    if drafting.has_drafter(config):
        layers = config.drafter.layers
        drafter = student_config(policy, layers) if layers else shape_of(config.drafter.path)
    critics = {
        role: shape_of(config.critic.path) if config.critic.path else policy
        for role in derived.critics(config)
    }
    rewards = tuple(map(shape_of, derived.reward_models(config)))
    reference = shape_of(config.kl.reference) if config.kl.reference else None
    return ModelConfigs(policy, drafter, critics, rewards, reference)
