"""Check that a host can hold the arrays of a CPU's devices, idle models, and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.memory.parts import NO_OFFLOAD, SPLIT_OR_OFFLOAD, Part
from rlhf_jax.runtime.host_memory import host_memory

TOKEN = 4  # bytes of a token's id


def check(
    config: Config, devices: Sequence[tuple[int, list[Part]]], held_out: int, on_cpu: bool = False
) -> None:
    """Raise ValueError if this host cannot hold a run, with a hint.

    devices: the number of this host's devices with the same calls, and the parts of each; they use
    the host's memory if they are a CPU's (`on_cpu`). held_out: the number of prompts for
    evaluation.
    """
    held = [
        dataclasses.replace(part, bytes=count * part.bytes)
        for count, parts in devices
        for part in parts
    ]
    waiting = [
        Part(f"{part.name}, waiting on the host", "always", part.bytes, NO_OFFLOAD)
        for part in held
        if config.mesh.idle_on_host and part.hint == SPLIT_OR_OFFLOAD
    ]
    own = held if on_cpu else []
    # Texts that grow with the config, at their longest. Earlier responses are not among them:
    # `history.MOST_TOKENS` bounds them.
    text = derived.text_tokens(config)
    fewer = "generation.prompts_per_step" if derived.generates(config) else "data.rows_per_step"
    evaluated = held_out * config.evaluation.samples_per_prompt
    sizes = {
        "samples of a step": (derived.samples(config) * text, f"lower {fewer}"),
        "samples of an evaluation": (evaluated * text, "lower evaluation.samples_per_prompt"),
    }
    texts = [
        Part(f"{name}, on the host", "always", TOKEN * size, hint)
        for name, (size, hint) in sizes.items()
    ]
    memory_parts.check([*own, *waiting, *texts], host_memory(), "The host")
