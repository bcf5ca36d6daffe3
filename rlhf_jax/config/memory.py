"""Estimate what a run will hold on each device, by part, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.objectives import objective_of
from rlhf_jax.config.schema import Config
from rlhf_jax.config.sizes import PlannedRun, layer_values, row_bytes, row_share, tensor_share
from rlhf_jax.generation import rows as generation_rows
from rlhf_jax.generation.precompile import VERIFIED
from rlhf_jax.generation.scheduler import PREFILLED, cache_slots, prompt_width
from rlhf_jax.generation.speculative.round import streams_head
from rlhf_jax.generation.speculative.sampling import BLOCK, Sampling
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.mesh import Layout
from rlhf_jax.model import cache
from rlhf_jax.types import DecodeState, ModelConfig, ModelConfigs

GIGA = 1e9
STAGE_NAMES = ("generation", "inference", "training")
SMALL = 0.01  # parts below this share of the peak are not printed

# What a user is told to change where a part is too large.
SPLIT = "raise mesh.fsdp or mesh.slices"
SPLIT_TENSORS = "raise mesh.tensor"
FEWER_ROWS = "lower training.microbatch_rows"
FEWER_LIVE = "lower generation.max_rows or generation.max_new_tokens"
SHORTER_PROMPTS = "lower data.max_prompt_tokens"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold the bytes of one part on the fullest device."""

    name: str
    stage: str  # one of STAGE_NAMES, or "always": from the first step to the last
    bytes: int
    remedy: str  # what to change where it is too much


def plan(
    config: Config,
    models: ModelConfigs,
    shape: dict[str, int],
    dtype: DTypeLike,
    kernels: Kernels = REFERENCE,
) -> list[Part]:
    """Return every part of a run that takes memory, for mesh sizes `shape` and the compute dtype.

    Weights, optimizers and caches are exact; what a program needs beside them is estimated. The
    stages follow each other, so the peak is what is always there plus the largest of them (`peak`).
    """
    critic = models.critic and dataclasses.replace(models.critic, scalar_head=True, tied=False)
    run = PlannedRun(
        config=config,
        models=models._replace(critic=critic),
        mesh=meshes.abstract_mesh(shape),
        dtype=dtype,
        kernels=kernels,
    )
    # The policy, the critic and the student are trained one after the other: the largest counts.
    trained = [model for model in (models.policy, critic) if model and run.trains_policy]
    updates = [_update(run, model) for model in trained]
    if derived.trains_drafter(config):
        updates.append(_distillation(run))
    parts = [
        *_always(run),
        *_generation(run),
        *(_inference(run) if run.trains_policy else ()),
        *max(updates, key=lambda update: sum(part.bytes for part in update)),
    ]
    return [part for part in parts if part.bytes]


def total(parts: list[Part], stage: str) -> int:
    """Return the bytes that a device holds in a stage, what is always there included."""
    return sum(part.bytes for part in parts if part.stage in ("always", stage))


def peak(parts: list[Part]) -> tuple[str, int]:
    """Return the stage that needs most, and the bytes that a device holds in it."""
    stage = max(STAGE_NAMES, key=functools.partial(total, parts))
    return stage, total(parts, stage)


def check(parts: list[Part], limit: float) -> None:
    """Raise ValueError where the peak is above `limit` bytes, with what to change."""
    stage, needed = peak(parts)
    if needed <= limit:
        return
    held = [part for part in parts if part.stage in ("always", stage)]
    worst = max(held, key=lambda part: part.bytes)
    raise ValueError(
        f"A device needs {needed / GIGA:.1f} GB in {stage} and has {limit / GIGA:.1f} GB; the"
        f" largest part is {worst.name} ({worst.bytes / GIGA:.1f} GB): {worst.remedy}."
    )


def device_memory(config: Config, device: Any) -> float | None:
    """Return the bytes that a device may hold, or None where nothing says so.

    It is the less of `mesh.device_memory_gb` and of what the device itself says.
    """
    said = (device.memory_stats() or {}).get("bytes_limit")
    known = [size for size in (config.mesh.device_memory_gb * GIGA, said) if size]
    return min(known, default=None)


def table(parts: list[Part]) -> list[str]:
    """Return the estimate as lines of text.

    They are the parts that matter, each stage with what is always there, and the peak.
    """

    def line(size: int, stage: str, name: str) -> str:
        return f"{size / GIGA:8.2f} GB  {stage:10}  {name}"

    stage, needed = peak(parts)
    shown = [part for part in parts if part.bytes >= SMALL * needed]
    lines = [line(part.bytes, part.stage, part.name) for part in shown]
    sums = [line(total(parts, name), name, "in all") for name in STAGE_NAMES]
    return [*lines, *sums, line(needed, "peak", f"in {stage}")]


def _always(run: PlannedRun) -> list[Part]:
    """List what lives from the first step to the last."""
    config = run.config
    models = run.models
    policy = run.weights(models.policy, jnp.float32)
    critic = run.weights(models.critic, jnp.float32)
    reference = 0
    if config.kl.coefficient and run.trains_policy:
        reference = run.weights(models.policy, run.dtype)
    rewards = sum(run.weights(model, run.dtype) for model in models.rewards)

    # A student learns beside the policy; a draft model that is no student stays as it is.
    drafter = 0
    student = 0
    if config.drafter.layers:
        student = run.student_weights(jnp.float32)
    else:
        drafter = run.weights(models.drafter, run.dtype, "generation")
    learns = derived.trains_drafter(config)
    begun = 0
    if learns and run.trains_policy:
        begun = run.student_weights(run.dtype)

    moments = 2 * policy if run.trains_policy else 0
    student_moments = 2 * student if learns else 0
    return [
        Part("policy, float32", "always", policy, SPLIT),
        Part("policy's optimizer, two moments", "always", moments, SPLIT),
        Part("critic, float32", "always", critic, SPLIT),
        Part("critic's optimizer, two moments", "always", 2 * critic, SPLIT),
        Part("reference", "always", reference, SPLIT),
        Part("reward models", "always", rewards, SPLIT),
        Part("drafter", "always", drafter, SPLIT_TENSORS),
        Part("student, float32", "always", student, SPLIT),
        Part("student as it began", "always", begun, SPLIT),
        Part("student's optimizer, two moments", "always", student_moments, SPLIT),
    ]


def _generation(run: PlannedRun) -> list[Part]:
    """List what a slice holds in generation.

    It holds the policy's copy, running samples, waiting prompts, and what is at work.
    """
    one_slice = meshes.abstract_mesh(dict(run.mesh.shape) | {"slices": 1})
    run = dataclasses.replace(run, mesh=one_slice)
    models = run.models
    state, prompts = _decode_state(run)
    student = 0
    if run.config.drafter.layers:
        student = run.student_weights(run.dtype, "generation")
    scorers = 0
    if run.config.generation.fuse_inference:
        reference = [models.policy] if run.config.kl.coefficient else []
        beside = (*reference, models.critic, *models.rewards)
        scorers = sum(run.weights(model, run.dtype, "generation") for model in beside)
    policy = run.weights(models.policy, run.dtype, "generation")
    rows = row_bytes(dataclasses.replace(state, draft=None), run.mesh)
    draft_rows = row_bytes(state.draft, run.mesh)
    waiting = row_bytes(prompts, run.mesh)
    without = "set generation.fuse_inference to False"
    return [
        Part("policy, for generation", "generation", policy, SPLIT_TENSORS),
        Part("models that score beside it", "generation", scorers, without),
        Part("student, for generation", "generation", student, SPLIT_TENSORS),
        Part("key-value cache of the policy", "generation", rows, FEWER_LIVE),
        Part("key-value cache of the drafter", "generation", draft_rows, FEWER_LIVE),
        Part("prefilled prompts", "generation", waiting, SHORTER_PROMPTS),
        _generation_work(run, state, prompts),
    ]


def _decode_state(run: PlannedRun) -> tuple[DecodeState, list[cache.Cache]]:
    """Return the shapes of a slice's running samples, and of the caches of prefilled prompts."""
    config = run.config
    models = run.models
    strategies = derived.strategies(config).strategies
    slots = cache_slots(run.text_tokens, strategies, run.layout)
    earlier = run.text_tokens if derived.uses_drafter(config, "replay") else 0
    sizes = (config.generation.max_rows, slots, config.generation.history_tokens, earlier)
    empty = functools.partial(generation_rows.empty, models.policy, models.drafter, *sizes)
    state = jax.eval_shape(lambda: empty(Layout(dtype=jnp.dtype(run.dtype))))

    width = prompt_width(config.data.max_prompt_tokens, slots)
    caches = [model for model in (models.policy, models.drafter) if model]
    prompts = jax.eval_shape(
        lambda: [cache.empty(model, PREFILLED, width, run.dtype) for model in caches]
    )
    return state, prompts


def _generation_work(run: PlannedRun, state: DecodeState, prompts: list[cache.Cache]) -> Part:
    """Return the largest of what programs of generation need, one after the other."""
    config = run.config
    models = run.models
    width = prompts[0][0][0].shape[-1]
    prefill = run.layer(models.policy, row_share(PREFILLED, run.mesh) * width)
    leaf = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    round_name = "a round: logits and attention"
    works = [
        Part(round_name, "generation", _round(run, state), "lower generation.max_rows"),
        Part("a prefill at work", "generation", prefill, SHORTER_PROMPTS),
        Part("a cache leaf of a shrinking batch", "generation", leaf, FEWER_LIVE),
    ]
    if config.generation.fuse_inference:
        # A slice scores its part of a micro-batch: a layer at work, or the logits of a chunk, which
        # are there twice, in float32.
        rows = max(1, config.training.microbatch_rows // config.mesh.slices)
        tokens = row_share(rows, run.mesh) * run.text_tokens
        scored = 0
        for model in filter(None, (models.policy, models.critic, *models.rewards)):
            vocabulary = 0 if model.scalar_head else tensor_share(model.vocab_size, run.mesh)
            scored = max(scored, run.layer(model, tokens), 2 * 4 * CHUNK * vocabulary)
        works.append(Part("a micro-batch that is scored", "generation", scored, FEWER_ROWS))
    return max(works, key=lambda work: work.bytes)


def _round(run: PlannedRun, state: DecodeState) -> int:
    """Return the bytes of a round: the window of all layers, and what is largest beside it.

    A layer's attention and the logits follow each other. Attention holds its cache in another
    layout and its scores twice, in float32. The logits are there twice, or once beside a tied head
    as [M, V], and once more where they must be padded to whole blocks; or never.
    """
    policy = run.models.policy
    generation = run.config.generation
    candidates = derived.strategies(run.config)
    rows = row_share(generation.max_rows, run.mesh)
    nodes = most_nodes(run.config, run.mesh)
    grid = rows * int(candidates.calls.grid[candidates.nodes <= nodes].max())

    heads = tensor_share(policy.num_heads, run.mesh)
    kv_heads = tensor_share(policy.num_kv_heads, run.mesh)
    window = 2 * policy.num_layers * grid * kv_heads * policy.head_dim * run.itemsize
    scores = 4 * grid * heads * state.cache[0][0].shape[-1]
    attention = row_bytes(state.cache[0], run.mesh) + 2 * scores

    sampling = Sampling(top_k=generation.top_k)
    streamed = streams_head(run.layout, sampling, generation.acceptance)
    logits = 0 if streamed else 4 * rows * nodes * policy.vocab_size
    head = 0
    if policy.tied:
        head = tensor_share(policy.vocab_size, run.mesh) * policy.width * run.itemsize
    copies = 1
    copies += generation.acceptance == "rejection" and "model" in candidates.drafters
    copies += policy.vocab_size % BLOCK != 0
    return window + max(attention, copies * logits + max(logits, head))


def most_nodes(config: Config, mesh: meshes.AnyMesh) -> int:
    """Return the nodes of a row that a round of all rows verifies at most.

    With fewer rows and caches it may be more.
    """
    candidates = derived.strategies(config)
    nodes = candidates.nodes
    rows = row_share(config.generation.max_rows, mesh)
    fits = nodes * rows <= VERIFIED
    # The shortest strategy is always there.
    fewest = nodes == nodes.min()
    return int(nodes[fits | fewest].max())


def _inference(run: PlannedRun) -> list[Part]:
    """List the copies of the models that score, and what one micro-batch needs.

    Reward models score beside generation's weights.
    """
    models = run.models
    scorers = [model for model in (models.policy, models.critic) if model]
    copies = sum(map(run.cast_weights, scorers))
    if models.rewards:
        copies = max(copies, run.weights(models.policy, run.dtype, "generation"))
    layers = [run.layer(model, run.batch_tokens) for model in (*scorers, *models.rewards)]
    logits = 2 * 4 * run.chunk_tokens * tensor_share(models.policy.vocab_size, run.mesh)
    return [
        Part("models that score", "inference", copies, SPLIT),
        Part("one layer at work, or logits", "inference", max(*layers, logits), FEWER_ROWS),
    ]


def _update(run: PlannedRun, model: ModelConfig) -> list[Part]:
    """List what one model's update needs beside its weights and optimizer.

    The gradient is summed in float32; a micro-batch's stands beside the weights, both in the
    compute dtype. The backward pass passes the head first and the layers then: the larger counts.
    """
    tokens = run.batch_tokens
    kept = model.width if run.config.training.remat else layer_values(model, run.mesh)
    activations = model.num_layers * tokens * kept * run.itemsize
    gradients = run.weights(model, jnp.float32)
    micro_batch = run.cast_weights(model) + run.weights(model, run.dtype)

    # The head gathered or transposed, and in float32 its gradient so far and a chunk's; then the
    # chunk's logits and their gradient.
    outputs = 1 if model.scalar_head else tensor_share(model.vocab_size, run.mesh)
    head = model.width * outputs * (run.itemsize + 2 * 4) + 2 * 4 * run.chunk_tokens * outputs
    layer = 3 * run.layer(model, tokens)
    works = [
        Part("one layer at work", "training", layer, FEWER_ROWS),
        Part("head and a chunk of logits", "training", head, SPLIT_TENSORS),
    ]
    return [
        Part("gradients, float32", "training", gradients, SPLIT),
        Part("weights and gradients of a micro-batch", "training", micro_batch, SPLIT),
        Part("activations kept by layer", "training", activations, FEWER_ROWS),
        max(works, key=lambda work: work.bytes),
    ]


def _distillation(run: PlannedRun) -> list[Part]:
    """List what a student's update needs beside its weights and optimizer.

    It needs gradients as in `_update`, the policy's hidden states of all its rows, and the policy
    at work.
    """
    config = run.config
    policy = run.models.policy
    own = run.student_weights(run.dtype)
    gradients = run.student_weights(jnp.float32) + own

    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    rows = samples if objective_of(config).distills else config.drafter.samples
    batch_rows = row_share(config.training.microbatch_rows, run.mesh)
    slots = run.batch_tokens * row_share(rows, run.mesh) // batch_rows
    hidden = slots * policy.width * run.itemsize

    layer = run.layer(policy, run.batch_tokens)
    logits = 4 * 4 * run.chunk_tokens * tensor_share(policy.vocab_size, run.mesh)
    work = max(run.cast_weights(policy) + layer, own + 3 * layer, logits)
    return [
        Part("student's gradients", "training", gradients, SPLIT),
        Part("the policy's hidden states", "training", hidden, "lower drafter.samples"),
        Part("a layer at work, or logits of both", "training", work, FEWER_ROWS),
    ]
