"""Estimate what a run will hold on each device, by part, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.objectives import objective_of
from rlhf_jax.config.schema import Config
from rlhf_jax.config.sizes import PlannedRun, row_share
from rlhf_jax.generation import rows as generation_rows
from rlhf_jax.generation.precompile import VERIFIED
from rlhf_jax.generation.scheduler import PREFILLED, cache_slots, prompt_width
from rlhf_jax.generation.speculative.round import streams_head
from rlhf_jax.generation.speculative.sampling import BLOCK, Sampling
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.mesh import AXES, FLOAT32, Layout
from rlhf_jax.runtime.host_memory import host_memory
from rlhf_jax.types import DecodeState, ModelConfig, ModelConfigs

GIGA = 1e9
STAGE_NAMES = ("generation", "inference", "training")
SMALL = 0.01  # parts below this share of the peak are not printed
ROOM = 0.85  # of a device's memory that a plan may fill, as its parts are estimates
HOST_SHARE = 0.5  # of a host's memory that is for the devices of a CPU

# What a user is told to change where a part is too large.
SPLIT = "raise mesh.fsdp or mesh.slices"
SPLIT_TENSORS = "raise mesh.tensor"
FEWER_ROWS = "lower training.microbatch_rows"
FEWER_LIVE = "lower generation.max_rows or generation.max_new_tokens"
SHORTER_PROMPTS = "lower data.max_prompt_tokens"
LESS_HISTORY = "lower generation.history_tokens"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold the bytes of one part on the fullest device."""

    name: str
    stage: str  # one of STAGE_NAMES, or "always": from the first step to the last
    bytes: int
    remedy: str  # what to change where it is too much


def plan(
    config: Config, models: ModelConfigs, layout: Layout, remat: bool | None = None
) -> list[Part]:
    """Return every part of a run that takes memory, for a layout whose mesh may be abstract.

    remat: what was settled; None: off only where the config says so.
    Weights, optimizers and caches are exact; what a program needs beside them is estimated. The
    stages follow each other, so the peak is what is always there plus the largest of them (`peak`).
    """
    critic = models.critic and dataclasses.replace(models.critic, scalar_head=True, tied=False)
    recomputes = config.training.remat != "off" if remat is None else remat
    run = PlannedRun(config, models._replace(critic=critic), layout, recomputes)
    # The policy, the critic and the student are trained one after the other: the largest counts.
    trained = [model for model in (models.policy, critic) if model and run.trains_policy]
    updates = [_update(run, model) for model in trained]
    if critic and len(updates) > 1:  # the policy's waits: both models take a step, or neither
        waiting = run.weights(models.policy, FLOAT32)
        part = Part("the policy's gradients, waiting", "training", waiting, SPLIT)
        updates[-1].append(part)
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


def check(parts: list[Part], limit: float, holder: str = "A device") -> None:
    """Raise ValueError where the peak is above the holder's `limit` bytes, with what to change."""
    stage, needed = peak(parts)
    if needed <= limit:
        return
    held = [part for part in parts if part.stage in ("always", stage)]
    worst = max(held, key=lambda part: part.bytes)
    raise ValueError(
        f"{holder} needs {needed / GIGA:.1f} GB in {stage} and has {limit / GIGA:.1f} GB; the"
        f" largest part is {worst.name} ({worst.bytes / GIGA:.1f} GB): {worst.remedy}."
    )


def device_memory(config: Config, device: Any) -> float | None:
    """Return the bytes that a device may hold, or None where nothing says so.

    It is the less of `mesh.device_memory_gb` and of what the device itself says.
    """
    said = (device.memory_stats() or {}).get("bytes_limit")
    known = [size for size in (config.mesh.device_memory_gb * GIGA, said) if size]
    return min(known, default=None)


def settle_remat(
    config: Config, models: ModelConfigs, layout: Layout, limit: float | None
) -> tuple[bool, str]:
    """Return whether the backward pass computes layers again, and the reason.

    limit: the bytes that a device may hold, None where nobody knows.
    """
    asked = config.training.remat
    if asked != "auto":
        return asked == "on", "asked for"
    if limit is None:
        return True, "the device does not say how much memory it has"
    _, needed = peak(plan(config, models, layout, remat=False))
    figures = f"{needed / GIGA:.1f} of {limit / GIGA:.1f} GB would be needed without"
    return needed > ROOM * limit, figures


def memory_for_remat(config: Config, device: Any) -> float | None:
    """Return the bytes that a device may hold; those of a CPU are a share of its host's memory."""
    known = device_memory(config, device)
    if known is not None or device.platform != "cpu":
        return known
    return HOST_SHARE * host_memory() / jax.device_count()


def table(parts: list[Part]) -> list[str]:
    """Return the estimate as lines of text.

    They are the parts that matter, each stage with what is always there, and the peak.
    """
    stage, needed = peak(parts)
    unit, letter = (GIGA, "G") if needed >= GIGA else (1e6, "M")

    def line(size: int, stage: str, name: str) -> str:
        return f"{size / unit:8.2f} {letter}B  {stage:10}  {name}"

    shown = [part for part in parts if part.bytes >= SMALL * needed]
    lines = [line(part.bytes, part.stage, part.name) for part in shown]
    sums = [line(total(parts, name), name, "in all") for name in STAGE_NAMES]
    return [*lines, *sums, line(needed, "peak", f"in {stage}")]


def _always(run: PlannedRun) -> list[Part]:
    """List what lives from the first step to the last."""
    config = run.config
    models = run.models
    policy = run.weights(models.policy, FLOAT32)
    critic = run.weights(models.critic, FLOAT32)
    moments = 2 * policy if run.trains_policy else 0
    reference = run.weights(models.policy) if derived.needs_reference(config) else 0
    rewards = sum(map(run.weights, models.rewards))

    # A student learns, beside itself as it began where the policy learns too; another draft model
    # stays as it is.
    drafter = 0 if config.drafter.layers else run.weights(models.drafter, role="generation")
    student = 0
    if config.drafter.layers:
        learns = derived.trains_drafter(config)
        student = (3 if learns else 1) * run.weights(models.drafter, FLOAT32, ends=False)
        if learns and run.trains_policy:
            student += run.weights(models.drafter, ends=False)
    return [
        Part("policy, float32", "always", policy, SPLIT),
        Part("policy's optimizer, two moments", "always", moments, SPLIT),
        Part("critic, float32", "always", critic, SPLIT),
        Part("critic's optimizer, two moments", "always", 2 * critic, SPLIT),
        Part("reference", "always", reference, SPLIT),
        Part("reward models", "always", rewards, SPLIT),
        Part("drafter", "always", drafter, SPLIT_TENSORS),
        Part("student and its optimizer", "always", student, SPLIT),
    ]


def _generation(run: PlannedRun) -> list[Part]:
    """List what a slice holds in generation.

    It holds the policy's copy, running samples, waiting prompts, and what is at work.
    """
    config = run.config
    models = run.models
    one_slice = meshes.abstract_mesh(
        {axis: run.layout.extent(axis) for axis in AXES} | {"slices": 1}
    )
    run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, mesh=one_slice))
    weights = functools.partial(run.weights, role="generation")
    student = weights(models.drafter, ends=False) if config.drafter.layers else 0
    scorers = 0
    if config.generation.fuse_inference:
        reference = (models.policy,) if config.kl.coefficient else ()
        scorers = sum(map(weights, (*reference, models.critic, *models.rewards)))

    slots = cache_slots(run.text_tokens, derived.strategies(config).strategies, run.layout)
    earlier = run.text_tokens if derived.replays(config) else 0
    width = prompt_width(config.data.max_prompt_tokens, slots)
    empty = functools.partial(generation_rows.empty, models.policy, models.drafter)
    size = (config.generation.max_rows, slots, config.generation.history_tokens, earlier)
    anywhere = Layout(dtype=run.layout.dtype)
    state = jax.eval_shape(lambda: empty(*size, anywhere))
    prompts = jax.eval_shape(lambda: empty(PREFILLED, width, 0, 0, anywhere))
    policy_rows = run.rows(dataclasses.replace(state, draft=None, history=None))
    without = "set generation.fuse_inference to False"
    return [
        Part("policy, for generation", "generation", weights(models.policy), SPLIT_TENSORS),
        Part("models that score beside it", "generation", scorers, without),
        Part("student, for generation", "generation", student, SPLIT_TENSORS),
        Part("key-value cache of the policy", "generation", policy_rows, FEWER_LIVE),
        Part("key-value cache of the drafter", "generation", run.rows(state.draft), FEWER_LIVE),
        Part("earlier responses", "generation", run.rows(state.history), LESS_HISTORY),
        Part("prefilled prompts", "generation", run.rows(prompts), SHORTER_PROMPTS),
        _generation_work(run, state, width),
    ]


def _generation_work(run: PlannedRun, state: DecodeState, width: int) -> Part:
    """Return the largest of what programs of generation need, one after the other."""
    training = run.config.training
    models = run.models
    prefill = run.forward(models.policy, row_share(PREFILLED, run.layout), width)
    # On a mesh, every device gathers it whole.
    leaf = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    works = [
        Part("a round at work", "generation", _round(run, state), "lower generation.max_rows"),
        Part("a prefill at work", "generation", prefill, SHORTER_PROMPTS),
        Part("a cache leaf of a shrinking batch", "generation", leaf, FEWER_LIVE),
    ]
    if run.config.generation.fuse_inference:
        # A slice scores its part of a micro-batch.
        whole = max(1, training.microbatch_rows // run.config.mesh.slices)
        rows = row_share(whole, run.layout)
        scorers = filter(None, (models.policy, models.critic, *models.rewards))
        scored = max(_scoring(run, model, rows) for model in scorers)
        works.append(Part("a micro-batch that is scored", "generation", scored, FEWER_ROWS))
    return max(works, key=lambda work: work.bytes)


def _round(run: PlannedRun, state: DecodeState) -> int:
    """Return the bytes of a round: the window of all layers, and scores or logits, in float32.

    Scores are there twice. So are the logits, and once more where rejection draws, or where they
    must be padded to whole blocks; or never.
    """
    policy = run.models.policy
    generation = run.config.generation
    candidates = derived.strategies(run.config)
    rows = row_share(generation.max_rows, run.layout)
    nodes = most_nodes(run.config, run.layout)
    grid = rows * int(candidates.calls.grid[candidates.nodes <= nodes].max())
    itemsize = run.layout.dtype.itemsize

    kv_heads = run.tensor_share(policy.num_kv_heads)
    window = 2 * policy.num_layers * grid * kv_heads * policy.head_dim * itemsize
    scores = 4 * grid * run.tensor_share(policy.num_heads) * state.cache[0][0].shape[-1]
    sampling = Sampling(top_k=generation.top_k)
    streamed = streams_head(run.layout, sampling, generation.acceptance)
    logits = 0 if streamed else 4 * rows * nodes * run.outputs(policy)
    copies = 2 + (policy.vocab_size % BLOCK != 0)
    copies += generation.acceptance == "rejection" and derived.drafts_by_model(run.config)
    return window + max(2 * scores, copies * logits)


def most_nodes(config: Config, layout: Layout) -> int:
    """Return the nodes of a row that a round of all rows verifies at most.

    With fewer rows and caches it may be more.
    """
    candidates = derived.strategies(config)
    nodes = candidates.nodes
    rows = row_share(config.generation.max_rows, layout)
    fits = nodes * rows <= VERIFIED
    # The shortest strategy is always there.
    fewest = nodes == nodes.min()
    return int(nodes[fits | fewest].max())


def _scoring(run: PlannedRun, model: ModelConfig, rows: int) -> int:
    """Return what scoring the longest texts needs: in a layer, or at the logits.

    A reward model's are padded to whole buckets.
    """
    bucket = run.config.training.length_bucket if model in run.models.rewards else 1
    tokens = -(-run.text_tokens // bucket) * bucket
    return max(run.forward(model, rows, tokens), run.logits(model))


def _inference(run: PlannedRun) -> list[Part]:
    """List the copies of the models that score, and what one micro-batch needs.

    Reward models score beside generation's weights.
    """
    models = run.models
    scorers = [model for model in (models.policy, models.critic) if model]
    copies = sum(map(run.cast_weights, scorers))
    if models.rewards:
        copies = max(copies, run.weights(models.policy, role="generation"))
    work = max(
        run.gathered(model) + _scoring(run, model, run.batch_rows)
        for model in (*scorers, *models.rewards)
    )
    return [
        Part("models that score", "inference", copies, SPLIT),
        Part("one layer at work, or logits", "inference", work, FEWER_ROWS),
    ]


def _update(run: PlannedRun, model: ModelConfig) -> list[Part]:
    """List what one model's update needs beside its weights and optimizer.

    The gradient is summed in float32; a micro-batch's stands beside the weights, both in the
    compute dtype. The backward pass passes the head first and the layers then: the larger counts.
    """
    itemsize = run.layout.dtype.itemsize
    tokens = run.batch_rows * run.text_tokens
    activations = model.num_layers * tokens * run.kept_values(model)
    layer = run.backward(model, run.batch_rows, run.text_tokens) + run.gathered(model)
    micro_batch = run.cast_weights(model) + run.weights(model)
    # In float32 a chunk's gradient of the head and its logits; where there are several chunks, and
    # but on a CPU, the head and its gradient so far.
    several = run.batch_rows * run.config.generation.max_new_tokens > CHUNK
    real = isinstance(run.layout.mesh, Mesh)
    on_cpu = real and run.layout.devices.flat[0].platform == "cpu"
    copies = 4 * (3 if several and not on_cpu else 1) + (itemsize if itemsize < 4 else 0)
    head = copies * model.width * run.outputs(model) + run.logits(model)
    works = [
        Part("one layer at work", "training", layer, FEWER_ROWS),
        Part("head and a chunk of logits", "training", head, SPLIT_TENSORS),
    ]
    return [
        Part("gradients, float32", "training", run.weights(model, FLOAT32), SPLIT),
        Part("weights and gradients of a micro-batch", "training", micro_batch, SPLIT),
        Part("activations kept by layer", "training", activations, FEWER_ROWS),
        max(works, key=lambda work: work.bytes),
    ]


def _distillation(run: PlannedRun) -> list[Part]:
    """List what a student's update needs beside its weights and optimizer.

    It needs gradients as in `_update`, the policy's hidden states of all its rows, and the policy
    at work or the student, or their logits and gradients.
    """
    config = run.config
    policy = run.models.policy
    own = run.weights(run.models.drafter, ends=False)
    gradients = run.weights(run.models.drafter, FLOAT32, ends=False) + own

    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    rows = samples if objective_of(config).distills else config.drafter.samples
    slots = row_share(rows, run.layout) * run.text_tokens
    hidden = slots * policy.width * run.layout.dtype.itemsize

    shape = (policy, run.batch_rows, run.text_tokens)
    gathered = run.gathered(policy)
    work = max(
        run.cast_weights(policy) + gathered + run.forward(*shape),
        own + gathered + run.backward(*shape),
        7 * run.logits(policy),
    )
    return [
        Part("student's gradients", "training", gradients, SPLIT),
        Part("the policy's hidden states", "training", hidden, "lower drafter.samples"),
        Part("a layer at work, or logits of both", "training", work, FEWER_ROWS),
    ]
