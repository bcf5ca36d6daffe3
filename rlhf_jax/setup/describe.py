"""Describe the resources of a run, printed before it begins."""

from __future__ import annotations

import shutil
import warnings

import jax

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.earlier import defaults_of
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.memory import estimate, host
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.parts import GIGA
from rlhf_jax.memory.sizes import count_weights
from rlhf_jax.models.files.source import digest
from rlhf_jax.models.shardings import unsplit
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.monitoring import console
from rlhf_jax.placement.pipelined import is_pipelined
from rlhf_jax.placement.plan import Plan, training_layout
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.files import is_remote
from rlhf_jax.setup.run_spec import RunSpec

LINES_REASON = {
    "attention of training and inference": "plain JAX: no kernel lets samples share a prompt, so it"
    " is a loop over pairs of blocks"
}


def print_setup(spec: RunSpec) -> None:
    """Print the resources of the run; raise ValueError if it does not fit."""
    config = spec.config
    layout = training_layout(spec.layouts)
    policy = spec.policy
    parts = estimate.fullest(config, spec.models, spec.plan, spec.layouts, spec.remat)
    device = jax.local_devices()[0]
    known = estimate.device_memory(config, device)
    if known is not None:
        memory_parts.check(parts, known)
    held_out = len(spec.held_out or ())
    on_cpu = device.platform == "cpu"
    every = estimate.by_group(config, spec.models, spec.plan, spec.layouts, spec.remat)
    there = [
        spec.plan.calls_at(number)
        for number, one in enumerate(jax.devices())
        if one.process_index == device.process_index
    ]
    devices = [(there.count(calls), parts) for calls, parts in every]
    host.check(config, devices, held_out, on_cpu)
    if not distributed.leads():
        return

    model = f"{policy.config.num_layers} layers of {policy.config.width}"
    weights = abstract_weights(policy.config, layout.dtype)
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    rows = [
        ("model", f"{policy.path.name} ({model}), {layout.dtype.name}"),
        *placement_rows(devices, spec.plan),
    ]
    if distributed.started():
        rows.append(("processes", str(distributed.count())))
    if spec.models.drafter:
        rows.append(("drafter", _drafter_line(spec)))
    rows.append(("ends", "\n".join(policy.ends.lines()) or "no token ends a response"))
    rows.append(("prompts", _prompts_line(spec.prompts, config.data.train)))
    # Attention in packed lines is no choice, but users of a TPU or GPU may expect a kernel.
    reasons = spec.kernel_reasons | ({} if on_cpu else LINES_REASON)
    if spec.held_out:
        rows.append(("held out", _prompts_line(spec.held_out, config.data.eval)))
    rows += [
        *work_rows(config),
        *learning_rows(spec),
        ("workdir", config.workdir),
        *(("not split", line) for line in unsplit(weights, layout)),
        ("kernels", _kernels_lines(reasons)),
        ("activations", spec.remat_reason),
        ("disk", disk_line(spec)),
        ("memory", "\n".join(memory_parts.table(parts))),
    ]
    title = algorithm_of(config).title_of(config)
    steps = f"{config.steps:,} step{'s' * (config.steps != 1)}"
    console.describe(f"rlhf_jax: {title}, {steps}", rows)


def placement_rows(devices: str, plan: Plan) -> list[tuple[str, str]]:
    """Describe the devices and how calls share them: alike for all calls, or call by call."""
    if not plan.is_uniform:
        return [("devices", devices), ("plan", "\n".join(plan.table()))]
    shape = next(iter(plan.placements.values())).shape
    sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
    pipelined = "; training in a pipeline, each slice a stage" if is_pipelined(plan) else ""
    return [("devices", f"{devices} ({sizes}{pipelined})")]


def learning_rows(spec: RunSpec) -> list[tuple[str, str]]:
    """Describe the policy's learning rate, and name options that do not change what it learns."""
    config = spec.config
    if not derived.trains(config, "policy"):
        return []
    rate = config.training.learning_rate
    weights = count_weights(spec.policy.config)
    algorithm = algorithm_of(config)
    usual = algorithm.learning_rate(weights)
    why = f"as usual for {weights / 1e6:,.0f} million weights" if rate == usual else "as configured"
    falls = {"constant": "", "linear": ", falling linearly", "cosine": ", falling as a cosine"}
    rows = [("learns at", f"{rate:.2g}{falls[config.training.schedule]}, {why}")]
    values = flat(config)
    usual_values = defaults_of(config.algorithm.name)
    unread = [key for key in algorithm.unread if values[key] != usual_values[key]]
    if unread:
        named = ", ".join(f"{key}={values[key]}" for key in unread)
        title = algorithm.title_of(config)
        rows.append(("no effect", f"{named}: {title} has no advantages and no KL penalty"))
    return rows


def disk_line(spec: RunSpec) -> str:
    """Describe the disk space that checkpoints and exported models need, and the free space.

    A checkpoint holds float32 weights and the optimizer's two moments of each.
    """
    config = spec.config
    models = spec.models
    shapes = [models.policy] + [models.critics[role] for role in derived.trained_critics(config)]
    if spec.student is not None:
        shapes.append(spec.student)
    weights = 4 * sum(map(count_weights, shapes))
    checkpoint = 3 * weights
    kept = config.checkpoint.keep * bool(config.checkpoint.every)
    # A checkpoint being written exists in addition to those that are kept.
    folders = 4 * count_weights(models.policy) * (1 + bool(config.checkpoint.best))
    if config.reward.labels:
        folders += 4 * count_weights(models.rewards[0])
    total = (kept + bool(kept)) * checkpoint + folders
    size = f"up to {total / GIGA:.1f} GB"
    if kept:
        size += f", as a checkpoint takes {checkpoint / GIGA:.1f} and {kept} stay"
    if is_remote(config.workdir):
        return size
    place = next(one for one in spec.workdir.absolute().parents if one.exists())
    free = shutil.disk_usage(place).free
    if free < total:
        warnings.warn(
            f"The run may take {total / GIGA:.1f} GB in {config.workdir}, and {free / GIGA:.1f} are"
            " free: lower checkpoint.keep, make room, or name another workdir.",
            stacklevel=1,
        )
    return f"{size}; {free / GIGA:,.0f} GB are free"


def work_rows(config: Config) -> list[tuple[str, str]]:
    """Describe how much a step and all steps generate, or are given."""
    samples = derived.samples(config)
    tokens = samples * derived.response_tokens(config)
    way = config.generation.strategy if derived.generates(config) else "given"
    return [
        ("a step", f"{samples} samples, up to {tokens:,} tokens, {way}"),
        ("all steps", f"up to {config.steps * tokens:,} tokens"),
    ]


def _kernels_lines(reasons: dict[str, str]) -> str:
    """Write one line for each choice and its reason, after the kernels it holds for."""
    alike: dict[str, list[str]] = {}
    for kernel, reason in reasons.items():
        alike.setdefault(reason, []).append(kernel)
    if len(alike) == 1:
        return next(iter(alike))
    return "\n".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in alike.items())


def _drafter_line(spec: RunSpec) -> str:
    """Describe the drafter and the source of its weights.

    It includes their digest, as another run may find other weights in the same place.
    """
    drafter = spec.drafter
    begins = f"{drafter.path.name} ({digest(drafter)})" if drafter else "the model's own layers"
    if spec.student is None:
        return f"{begins}, as it is"
    learns = "kept current" if spec.config.drafter.learning_rate else "as it is"
    return f"student of {spec.student.num_layers} layers, from {begins}, {learns}"


def _prompts_line(prompts: Prompts, path: str) -> str:
    """Count the prompts of a file, and the dropped ones by reason."""
    dropped = [f", {count} {reason} dropped" for reason, count in prompts.dropped.items()]
    return f"{len(prompts)} from {path}{''.join(dropped)}"
