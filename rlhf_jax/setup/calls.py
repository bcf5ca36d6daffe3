"""Place the calls of a run on devices, present or only described."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Device, choose
from rlhf_jax.config.schema import Config
from rlhf_jax.memory.sizes import parameter_counts
from rlhf_jax.models import kernels as mesh_kernels
from rlhf_jax.placement.pipelined import check_layers, check_pipelines, is_pipelined
from rlhf_jax.placement.plan import Placement, Plan, check_kernels, check_models, check_parts
from rlhf_jax.placement.presets import layer_counts, plan_of
from rlhf_jax.setup.validation import check_pipelined_training
from rlhf_jax.types import ModelConfigs


def count_devices() -> int:
    """Count the devices; ValueError if JAX cannot use the requested platform."""
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:
        # AssertionError if a platform is known but not installed
        reason = (str(error).splitlines() or ["it is not installed"])[0].rstrip(".")
        raise ValueError(
            f"JAX cannot use the platform {jax.config.values['jax_platforms']!r} ({reason});"
            " install JAX for it,"
            " or change JAX_PLATFORMS."
        ) from error


def place_calls(
    config: Config, models: ModelConfigs, device: Device, count: int, in_slice: int
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of a run on `count` equal devices, and the reason for each kernel.

    in_slice: the devices of one TPU slice; all, if there is only one. Raises ValueError or
    FileNotFoundError if the config's plan does not fit devices or models.
    """
    named = config.model.compute_dtype
    if named == "auto":
        ampere = float(getattr(device, "compute_capability", 0) or 0) >= 8
        named = "bfloat16" if device.platform == "tpu" or ampere else "float32"
    shapes = [mesh_kernels.shape_of(model) for model in models[:2] if model]
    kernels, reasons = choose(config.kernels, device, jnp.dtype(named).itemsize, shapes)
    layers = layer_counts(models)
    plan = plan_of(config, count, Placement(0, count, dtype=named, kernels=kernels), layers)
    source = f"plan: {config.plan or 'mesh'}"
    check_kernels(plan, source, device.platform)
    check_parts(plan, source, device.device_kind, in_slice)
    if is_pipelined(plan):
        check_pipelined_training(config)
    check_pipelines(plan, source)
    check_layers(plan, source, layers)
    if plan.parameters:
        check_models(plan, source, parameter_counts(models))
    return plan, reasons
