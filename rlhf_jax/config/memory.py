"""What a run will hold on each device, by part and before anything is loaded: shapes and arithmetic
only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config, ModelConfigs
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.precompile import VERIFIED
from rlhf_jax.generation.scheduler import PREFILLED, cache_slots, prompt_width
from rlhf_jax.generation.speculative.round import streams_head
from rlhf_jax.generation.speculative.sampling import BLOCK, Sampling
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.model import cache, transformer
from rlhf_jax.types import DecodeState, Model, ModelConfig

GIGA = 1e9
STAGES = ("generation", "inference", "training")
SMALL = 0.01  # of the peak: parts below it are not printed

# What makes a part smaller.
SPLIT = "raise mesh.fsdp or mesh.slices"
FEWER_ROWS = "lower training.microbatch_rows"
FEWER_LIVE = "lower generation.max_rows or generation.max_new_tokens"


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes on the fullest device, in one of the STAGES or throughout ("always")."""

    name: str
    stage: str
    bytes: int
    remedy: str  # what to change where it is too much


def plan(
    config: Config,
    models: ModelConfigs,
    shape: dict[str, int],
    dtype: Any,
    kernels: Kernels = REFERENCE,
) -> list[Part]:
    """Every part of a run that matters, for mesh sizes `shape` and the compute dtype.

    Weights, optimizers and caches are exact; what a program needs beside them is estimated. The
    stages follow each other, so the peak is what is always there plus the largest of them (`peak`).
    """
    mesh = meshes.abstract_mesh(shape)
    critic = models.critic and dataclasses.replace(models.critic, scalar_head=True, tied=False)
    models = models._replace(critic=critic)
    halves = [
        _training(config, model, mesh, dtype)
        for model in (models.policy, critic)
        if model and _earns(config)
    ]
    halves += [_distillation(config, models, mesh, dtype)] if derived.trains_drafter(config) else []
    parts = [
        *_always(config, models, mesh, dtype),
        *_generation(config, models, mesh, dtype, kernels),
        *(_inference(config, models, mesh, dtype) if _earns(config) else ()),
        *max(halves, key=lambda half: sum(part.bytes for part in half)),  # one after the other
    ]
    return [part for part in parts if part.bytes]


def total(parts: list[Part], stage: str) -> int:
    """Bytes that a device holds in a stage, what is always there included."""
    return sum(part.bytes for part in parts if part.stage in ("always", stage))


def peak(parts: list[Part]) -> tuple[str, int]:
    """The stage that needs most, and the bytes a device holds in it."""
    stage = max(STAGES, key=functools.partial(total, parts))
    return stage, total(parts, stage)


def check(parts: list[Part], limit: float) -> None:
    """Raise ValueError, in one sentence with what to change, where the peak is above `limit`
    bytes.
    """
    stage, needed = peak(parts)
    if needed <= limit:
        return
    worst = max(
        (part for part in parts if part.stage in ("always", stage)), key=lambda part: part.bytes
    )
    raise ValueError(
        f"A device needs {needed / GIGA:.1f} GB in {stage} and has {limit / GIGA:.1f} GB; the"
        " largest part"
        f" is {worst.name} ({worst.bytes / GIGA:.1f} GB): {worst.remedy}."
    )


def device_memory(config: Config, device: Any) -> float | None:
    """Bytes a device may hold: `mesh.device_memory_gb` or what the device says, if less; None if
    neither is known.
    """
    said = (device.memory_stats() or {}).get("bytes_limit")
    known = [size for size in (config.mesh.device_memory_gb * GIGA, said) if size]
    return min(known, default=None)


def table(parts: list[Part]) -> list[str]:
    """The plan as lines of text: the parts that matter, each stage with what is always there, the
    peak last.
    """
    stage, needed = peak(parts)
    lines = [
        _line(part.bytes, part.stage, part.name) for part in parts if part.bytes >= SMALL * needed
    ]
    sums = [_line(total(parts, name), name, "in all") for name in STAGES]
    return [*lines, *sums, _line(needed, "peak", f"in {stage}")]


def _line(size: int, stage: str, name: str) -> str:
    return f"{size / GIGA:8.2f} GB  {stage:10}  {name}"


def _always(config: Config, models: ModelConfigs, mesh: AbstractMesh, dtype: Any) -> list[Part]:
    """What lives from the first step to the last."""
    policy, critic = (
        _weights(model, jnp.float32, "training", mesh) for model in (models.policy, models.critic)
    )
    reference = (
        _weights(models.policy, dtype, "training", mesh)
        if config.kl.coefficient and _earns(config)
        else 0
    )
    student = _student(models, jnp.float32, "training", mesh) if config.drafter.layers else 0
    drafter = 0 if config.drafter.layers else _weights(models.drafter, dtype, "generation", mesh)
    begun = (
        _student(models, dtype, "training", mesh)
        if derived.trains_drafter(config) and _earns(config)
        else 0
    )
    rewards = sum(_weights(model, dtype, "training", mesh) for model in models.rewards)
    return [
        Part("policy, float32", "always", policy, SPLIT),
        Part(
            "policy's optimizer, two moments", "always", 2 * policy if _earns(config) else 0, SPLIT
        ),
        Part("critic, float32", "always", critic, SPLIT),
        Part("critic's optimizer, two moments", "always", 2 * critic, SPLIT),
        Part("reference", "always", reference, SPLIT),
        Part("reward models", "always", rewards, SPLIT),
        Part("drafter", "always", drafter, "raise mesh.tensor"),
        Part("student, float32", "always", student, SPLIT),
        Part("student as it began", "always", begun, SPLIT),
        Part(
            "student's optimizer, two moments",
            "always",
            2 * student if derived.trains_drafter(config) else 0,
            SPLIT,
        ),
    ]


def _earns(config: Config) -> bool:
    """Whether the policy learns; else it only teaches a student."""
    return config.objective == "reward"


def _student(models: ModelConfigs, dtype: Any, role: str, mesh: AbstractMesh) -> int:
    """A student's own weights: embedding and head are the policy's."""
    config = models.drafter
    if config is None:
        return 0
    whole: Model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config, dtype))
    own = dataclasses.replace(whole, embed=None, head=None)
    return meshes.bytes_per_device(own, meshes.model_shardings(own, mesh, role))


def _weights(model: ModelConfig | None, dtype: Any, role: str, mesh: AbstractMesh) -> int:
    if model is None:
        return 0
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model, dtype))
    return meshes.bytes_per_device(shapes, meshes.model_shardings(shapes, mesh, role))


def _generation(
    config: Config, models: ModelConfigs, mesh: AbstractMesh, dtype: Any, kernels: Kernels
) -> list[Part]:
    """On a slice: the policy's copy, running samples, waiting prompts, and the largest of what
    follows each other.
    """
    mesh = meshes.abstract_mesh(dict(mesh.shape) | {"slices": 1})
    generation = config.generation
    strategies = derived.strategies(config).strategies
    longest = config.data.max_prompt_tokens + generation.max_new_tokens
    slots = cache_slots(longest, strategies, kernels)
    earlier = longest if derived.uses_drafter(config, "replay") else 0
    width = prompt_width(config.data.max_prompt_tokens, slots)
    empty = functools.partial(
        row_verbs.empty, models.policy, models.drafter, generation.max_rows, slots
    )
    state = jax.eval_shape(lambda: empty(generation.history_tokens, earlier, dtype))
    student = _student(models, dtype, "generation", mesh) if config.drafter.layers else 0
    caches = [model for model in (models.policy, models.drafter) if model]
    prefix = jax.eval_shape(
        lambda: [cache.empty(model, PREFILLED, width, dtype) for model in caches]
    )
    prompts = _share(PREFILLED, mesh) * width
    leaf = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    works = [
        (
            "a round: logits and attention",
            _round(config, models.policy, state, mesh, kernels),
            "lower generation.max_rows",
        ),
        (
            "a prefill at work",
            _layer(models.policy, prompts, mesh, dtype),
            "lower data.max_prompt_tokens",
        ),
        ("a cache leaf of a shrinking batch", leaf, FEWER_LIVE),
    ]
    if config.generation.fuse_inference:
        scorers = filter(None, (models.policy, models.critic, *models.rewards))
        scored = max(_scored(config, model, mesh, dtype) for model in scorers)
        works += [("a micro-batch that is scored", scored, FEWER_ROWS)]
    judges = [models.policy] * bool(config.kl.coefficient) + [models.critic, *models.rewards]
    fused = (
        sum(_weights(model, dtype, "generation", mesh) for model in judges)
        * config.generation.fuse_inference
    )
    named = [
        (
            "policy, for generation",
            _weights(models.policy, dtype, "generation", mesh),
            "raise mesh.tensor",
        ),
        ("models that score beside it", fused, "set generation.fuse_inference to False"),
        ("student, for generation", student, "raise mesh.tensor"),
        (
            "key-value cache of the policy",
            _rows(dataclasses.replace(state, draft=None), mesh),
            FEWER_LIVE,
        ),
        ("key-value cache of the drafter", _rows(state.draft, mesh), FEWER_LIVE),
        ("prefilled prompts", _rows(prefix, mesh), "lower data.max_prompt_tokens"),
        max(works, key=lambda work: work[1]),
    ]
    return [Part(name, "generation", size, remedy) for name, size, remedy in named]


def _scored(config: Config, model: ModelConfig, mesh: AbstractMesh, dtype: Any) -> int:
    """On a slice: a layer at work on its part of a micro-batch, or the logits of a chunk, twice, in
    float32.
    """
    rows = max(1, config.training.microbatch_rows // config.mesh.slices)
    tokens = _share(rows, mesh) * (config.data.max_prompt_tokens + config.generation.max_new_tokens)
    logits = 0 if model.scalar_head else 2 * 4 * CHUNK * _split(model.vocab_size, mesh)
    return max(_layer(model, tokens, mesh, dtype), logits)


def _round(
    config: Config, policy: ModelConfig, state: DecodeState, mesh: AbstractMesh, kernels: Kernels
) -> int:
    """The window of all layers, and the larger of a layer's attention and the logits, which follow
    each other.

    Attention holds its cache in another layout and its scores twice, in float32; the logits are
    there twice, or once beside a tied head as [M, V], and once more where they must be padded to
    whole blocks; or never.
    """
    menu = derived.strategies(config)
    itemsize = state.cache[0][0].dtype.itemsize
    rows = _share(config.generation.max_rows, mesh)
    most = most_nodes(config, mesh)
    nodes = rows * most
    grid = rows * int(menu.calls.grid[menu.nodes <= most].max())
    scores = 4 * grid * _split(policy.num_heads, mesh) * state.cache[0][0].shape[-1]
    laws = config.generation.acceptance == "rejection" and "model" in menu.drafters
    streamed = streams_head(
        kernels, Sampling(top_k=config.generation.top_k), config.generation.acceptance
    )
    logits = 0 if streamed else 4 * nodes * policy.vocab_size
    padded = policy.vocab_size % BLOCK != 0
    head = _split(policy.vocab_size, mesh) * policy.width * itemsize if policy.tied else 0
    window = (
        2
        * policy.num_layers
        * grid
        * _split(policy.num_kv_heads, mesh)
        * policy.head_dim
        * itemsize
    )
    return window + max(
        _rows(state.cache[0], mesh) + 2 * scores, (1 + laws + padded) * logits + max(logits, head)
    )


def most_nodes(config: Config, mesh: meshes.AnyMesh) -> int:
    """Nodes of a row that a round of all rows verifies at most; with fewer rows and caches it may
    be more.
    """
    nodes = derived.strategies(config).nodes
    rows = _share(config.generation.max_rows, mesh)
    return int(nodes[(nodes * rows <= VERIFIED) | (nodes == nodes.min())].max())


def _inference(config: Config, models: ModelConfigs, mesh: AbstractMesh, dtype: Any) -> list[Part]:
    """Copies in the compute dtype of the models that score, and one micro-batch; reward models
    score beside generation's weights.
    """
    copies = sum(_cast(model, mesh, dtype) for model in (models.policy, models.critic) if model)
    if models.rewards:
        copies = max(copies, _weights(models.policy, dtype, "generation", mesh))
    work = max(
        _layer(m, _tokens(config, mesh), mesh, dtype)
        for m in (models.policy, models.critic, *models.rewards)
        if m
    )
    chunk = 2 * 4 * _chunk(config, mesh) * _split(models.policy.vocab_size, mesh)
    return [
        Part("models that score", "inference", copies, SPLIT),
        Part("one layer at work, or logits", "inference", max(work, chunk), FEWER_ROWS),
    ]


def _training(config: Config, model: ModelConfig, mesh: AbstractMesh, dtype: Any) -> list[Part]:
    """One model's gradient: the float32 sum, and a micro-batch's beside the weights, both in the
    compute dtype.

    The backward pass passes the head first and the layers then: the larger of the two counts.
    """
    tokens = _tokens(config, mesh)
    itemsize = jnp.dtype(dtype).itemsize
    kept = model.width if config.training.remat else _layer_values(model, mesh)
    weights_and_gradients = _cast(model, mesh, dtype) + _weights(model, dtype, "training", mesh)
    works = [
        ("one layer at work", 3 * _layer(model, tokens, mesh, dtype), FEWER_ROWS),
        ("head and a chunk of logits", _head(config, model, mesh, dtype), "raise mesh.tensor"),
    ]
    named = [
        ("gradients, float32", _weights(model, jnp.float32, "training", mesh), SPLIT),
        ("weights and gradients of a micro-batch", weights_and_gradients, SPLIT),
        ("activations kept by layer", model.num_layers * tokens * kept * itemsize, FEWER_ROWS),
        max(works, key=lambda work: work[1]),
    ]
    return [Part(name, "training", size, remedy) for name, size, remedy in named]


def _distillation(
    config: Config, models: ModelConfigs, mesh: AbstractMesh, dtype: Any
) -> list[Part]:
    """The student's gradient as in `_training`, what the policy made of all its rows, and the
    policy at work.
    """
    tokens = _tokens(config, mesh)
    itemsize = jnp.dtype(dtype).itemsize
    own = [_student(models, kind, "training", mesh) for kind in (jnp.float32, dtype)]
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    rows = samples if config.objective == "distill" else config.drafter.samples
    heard = (
        tokens
        * _share(rows, mesh)
        // _share(config.training.microbatch_rows, mesh)
        * models.policy.width
    )
    work = max(
        _cast(models.policy, mesh, dtype) + _layer(models.policy, tokens, mesh, dtype),
        own[1] + 3 * _layer(models.policy, tokens, mesh, dtype),
        4 * 4 * _chunk(config, mesh) * _split(models.policy.vocab_size, mesh),
    )
    return [
        Part("student's gradients", "training", own[0] + own[1], SPLIT),
        Part("the policy's hidden states", "training", heard * itemsize, "lower drafter.samples"),
        Part("a layer at work, or logits of both", "training", work, FEWER_ROWS),
    ]


def _head(config: Config, model: ModelConfig, mesh: AbstractMesh, dtype: Any) -> int:
    """The head gathered or transposed, its gradient so far and a chunk's in float32, the chunk's
    logits and theirs.
    """
    outputs = 1 if model.scalar_head else _split(model.vocab_size, mesh)
    return (
        model.width * outputs * (jnp.dtype(dtype).itemsize + 2 * 4)
        + 2 * 4 * _chunk(config, mesh) * outputs
    )


def _cast(model: ModelConfig, mesh: AbstractMesh, dtype: Any) -> int:
    """A copy of float32 weights in the compute dtype; none where that is float32."""
    return 0 if jnp.dtype(dtype) == jnp.float32 else _weights(model, dtype, "training", mesh)


def _layer(model: ModelConfig, tokens: int, mesh: AbstractMesh, dtype: Any) -> int:
    """One block over a device's tokens, forward, and its weights gathered over fsdp."""
    gathered = _layer_weights(model) // mesh.shape["tensor"]
    return (tokens * _layer_values(model, mesh) + gathered) * jnp.dtype(dtype).itemsize


def _layer_values(c: ModelConfig, mesh: AbstractMesh) -> int:
    """Values of a token in one block: norms and residuals [M], attention [H, D] and [G, D],
    products [F].
    """
    split = (3 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 4 * c.ffn_width
    return 10 * c.width + split // mesh.shape["tensor"]


def _layer_weights(c: ModelConfig) -> int:
    return c.width * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.ffn_width)


def _tokens(config: Config, mesh: AbstractMesh) -> int:
    """Token slots of a device's part of the longest micro-batch."""
    longest = config.data.max_prompt_tokens + config.generation.max_new_tokens
    return _share(config.training.microbatch_rows, mesh) * longest


def _chunk(config: Config, mesh: AbstractMesh) -> int:
    """Tokens of a device whose logits exist at one time in inference and training."""
    rows = config.training.microbatch_rows
    return _share(rows, mesh) * max(1, CHUNK // rows)


def _share(rows: int, mesh: meshes.AnyMesh) -> int:
    """Rows on one device."""
    return -(-rows // meshes.row_shards(mesh))


def _split(size: int, mesh: AbstractMesh) -> int:
    """What a device holds of a dimension that lies over tensor: all of it where that does not
    divide.
    """
    tensor = mesh.shape["tensor"]
    return size if size % tensor else size // tensor


def _rows(state: Any, mesh: AbstractMesh) -> int:
    return meshes.bytes_per_device(state, meshes.row_shardings(state, mesh))
