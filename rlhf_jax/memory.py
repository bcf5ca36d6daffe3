"""What a run will hold on each device, by part and before anything is loaded: shapes and arithmetic only."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import mesh as meshes
from rlhf_jax.generation import rows, tree
from rlhf_jax.generation.engine import PREFILLED, prompt_width, slack
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.model import cache, transformer
from rlhf_jax.types import ModelConfig

GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes on the fullest device, in one stage ("generation" or "training") or throughout ("always")."""

    name: str
    stage: str
    bytes: int
    remedy: str  # what makes it smaller


def plan(
    config: Any, policy: ModelConfig, drafter: ModelConfig | None, shape: dict[str, int], dtype: Any
) -> list[Part]:
    """Every part of a run that matters, for mesh sizes `shape` and the compute dtype.

    Weights, optimizer and caches are exact; activations are an upper estimate. Generation and training follow
    each other, so the peak is what is always there plus the larger of the two (`peak`).
    """
    mesh = meshes.abstract_mesh(shape)
    master = _weights(policy, jnp.float32, "training", mesh)
    copy = _weights(policy, dtype, "training", mesh)
    parts = [
        Part("policy, float32", "always", master, "raise mesh.fsdp"),
        Part("optimizer, two moments", "always", 2 * master, "raise mesh.fsdp"),
        Part("reference", "always", copy if config.training.kl_coefficient else 0, "raise mesh.fsdp"),
        Part("drafter", "always", _weights(drafter, dtype, "generation", mesh), "raise mesh.tensor"),
        *_generation(config, policy, drafter, mesh, dtype),
        *_gradients(master, copy),
        *_activations(config, policy, shape, jnp.dtype(dtype).itemsize),
    ]
    return [part for part in parts if part.bytes]


def peak(parts: list[Part]) -> tuple[str, int]:
    """The stage that needs most, and the bytes a device holds in it."""
    totals = {stage: _total(parts, "always") + _total(parts, stage) for stage in ("generation", "training")}
    stage = max(totals, key=totals.__getitem__)
    return stage, totals[stage]


def check(parts: list[Part], limit: float) -> None:
    """Raise ValueError, in one sentence with what to change, where the peak is above `limit` bytes."""
    stage, needed = peak(parts)
    if needed <= limit:
        return
    worst = max((part for part in parts if part.stage in ("always", stage)), key=lambda part: part.bytes)
    raise ValueError(
        f"A device needs {needed / GIGA:.1f} GB in {stage} and has {limit / GIGA:.1f} GB; the largest part"
        f" is {worst.name} ({worst.bytes / GIGA:.1f} GB): {worst.remedy}."
    )


def device_memory(config: Any, device: Any) -> float | None:
    """Bytes a device may hold: `mesh.device_memory_gb`, or what the device says; None if neither is known."""
    if config.mesh.device_memory_gb:
        return config.mesh.device_memory_gb * GIGA
    return (device.memory_stats() or {}).get("bytes_limit")


def table(parts: list[Part]) -> list[str]:
    """The plan as lines of text, the peak last."""
    stage, needed = peak(parts)
    lines = [f"{part.bytes / GIGA:8.2f} GB  {part.stage:10}  {part.name}" for part in parts]
    return [*lines, f"{needed / GIGA:8.2f} GB  {'peak':10}  in {stage}"]


def _total(parts: list[Part], stage: str) -> int:
    return sum(part.bytes for part in parts if part.stage == stage)


def _weights(model: ModelConfig | None, dtype: Any, role: str, mesh) -> int:
    if model is None:
        return 0
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model, dtype))
    return meshes.bytes_per_device(shapes, meshes.model_shardings(shapes, mesh, role))


def _generation(config: Any, policy: ModelConfig, drafter: ModelConfig | None, mesh, dtype: Any) -> list[Part]:
    """The policy's copy, running samples and one leaf again when a batch shrinks, prompts, logits."""
    generation, strategy = config.generation, tree.parse(config.generation.strategy)
    slots = config.data.max_prompt_tokens + generation.max_new_tokens + slack(strategy)
    prompt = prompt_width(config.data.max_prompt_tokens, slots)
    empty = functools.partial(rows.empty, policy, drafter, generation.rows, slots, generation.history_tokens)
    state = jax.eval_shape(lambda: empty(dtype))
    target, draft = _rows(dataclasses.replace(state, draft=None), mesh), _rows(state.draft, mesh)
    prefix = jax.eval_shape(lambda: [cache.empty(c, PREFILLED, prompt, dtype) for c in (policy, drafter) if c])
    live = "lower generation.rows or generation.max_new_tokens"
    named = [
        ("policy, for generation", _weights(policy, dtype, "generation", mesh), "raise mesh.tensor"),
        ("key-value cache of the policy", target, live),
        ("key-value cache of the drafter", draft, live),
        (
            "a cache leaf of a shrinking batch",
            max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
            live,
        ),
        ("prefilled prompts", _rows(prefix, mesh), "lower data.max_prompt_tokens"),
        ("logits of a round", _round_logits(config, policy, mesh), "lower generation.rows"),
    ]
    return [Part(name, "generation", size, remedy) for name, size, remedy in named]


def _round_logits(config: Any, policy: ModelConfig, mesh) -> int:
    """Float32 logits of every node, their scaled copy and the noise; rejection wants the drafter's laws as well."""
    strategy = tree.parse(config.generation.strategy)
    local = -(-config.generation.rows // (mesh.shape["data"] * mesh.shape["fsdp"]))
    copies = 3 + (config.generation.acceptance == "rejection" and strategy.drafter == "model")
    return copies * 4 * local * tree.bucket(strategy) * policy.vocab_size


def _rows(state: Any, mesh) -> int:
    return meshes.bytes_per_device(state, meshes.row_shardings(state, mesh))


def _gradients(master: int, copy: int) -> list[Part]:
    """The float32 sum, and a micro-batch's beside the weights, both in the compute dtype."""
    cast = copy if copy < master else 0
    return [
        Part("gradients, float32", "training", master, "raise mesh.fsdp"),
        Part("weights and gradients of a micro-batch", "training", cast + copy, "raise mesh.fsdp"),
    ]


def _activations(config, policy: ModelConfig, shape: dict[str, int], itemsize: int) -> list[Part]:
    """Upper estimates of what the backward pass holds; the factors are those of XLA compiling for a TPU."""
    training = config.training
    shards, tensor = shape["data"] * shape["fsdp"], shape["tensor"]
    longest = config.data.max_prompt_tokens + config.generation.max_new_tokens
    slots = -(-longest // training.length_bucket) * training.length_bucket
    tokens = training.microbatch_rows // shards * slots
    layer, head = _layer_values(policy, tensor), policy.width * policy.vocab_size // tensor
    kept = policy.width if training.remat else layer
    chunk = 3 * 4 * CHUNK // shards * policy.vocab_size // tensor  # float32 logits, softmax and gradient
    # A layer's weights, and then the head's, are gathered over fsdp, and so are their gradients.
    gathered = 2 * (_layer_weights(policy) // tensor)
    fewer = "lower training.microbatch_rows"
    return [
        Part("activations kept by layer", "training", policy.num_layers * tokens * kept * itemsize, fewer),
        Part("one layer at work", "training", (3 * tokens * layer + gathered) * itemsize, fewer),
        Part("head and a chunk of logits", "training", 2 * head * itemsize + chunk, "raise mesh.tensor"),
    ]


def _layer_values(c: ModelConfig, tensor: int) -> int:
    """Values of a token in one block: norms and residuals [M], attention [H, D] and [G, D], products [F]."""
    split = (3 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 4 * c.ffn_width
    return 10 * c.width + split // tensor


def _layer_weights(c: ModelConfig) -> int:
    return c.width * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.ffn_width)
