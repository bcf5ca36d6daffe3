"""Estimate the memory of a run on each device, by part, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from rlhf_jax import mesh as meshes
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting
from rlhf_jax.generation import rows as generation_rows
from rlhf_jax.generation.precompile import VERIFIED
from rlhf_jax.generation.scheduler import PREFILLED, cache_length_for, prompt_width
from rlhf_jax.generation.speculative.round import streams_head
from rlhf_jax.generation.speculative.sampling import BLOCK, Truncation
from rlhf_jax.memory.parts import (
    FEWER_LIVE,
    FEWER_ROWS,
    GIGA,
    LESS_HISTORY,
    SHORTER_PROMPTS,
    SPLIT,
    SPLIT_OR_OFFLOAD,
    SPLIT_TENSORS,
    Part,
    peak,
)
from rlhf_jax.memory.sizes import PlannedRun, row_share
from rlhf_jax.memory.updates import pipelined_parts, student_parts, update_parts
from rlhf_jax.mesh import AXES, FLOAT32, Layout
from rlhf_jax.placement.plan import CallLayouts, Plan
from rlhf_jax.runtime.host_memory import host_memory
from rlhf_jax.types import ModelConfig, ModelConfigs

ROOM = 0.85  # usable share of a device's memory, as the parts are estimates
HOST_SHARE = 0.5  # share of a host's memory for the devices of a CPU


def plan(config: Config, models: ModelConfigs, layouts: CallLayouts, remat: bool) -> list[Part]:
    """Return every part of a run's memory on the devices of these calls.

    layouts: their meshes may be abstract. remat: whether the backward pass recomputes layers.
    Weights, optimizers and caches are exact; the additional memory of programs is estimated. The
    stages follow each other, so the peak is the constant part plus the largest of them (`peak`).
    """
    run = PlannedRun(config, models, next(iter(layouts.values())), remat, layouts)
    # Models are trained one after the other, and the student last: the largest counts.
    updates: list[list[Part]] = [[]]
    learners = [one for one in run.models_of("training") if derived.trains(config, one[0])]
    if any(own.is_pipelined for _, own, _ in learners):
        updates.append(pipelined_parts([(own, model) for _, own, model in learners]))
    else:
        waiting: list[Part] = []  # All models take a step, or none.
        for role, own, model in learners:
            updates.append([*update_parts(own, model), *waiting])
            name = f"the {role}'s gradients, waiting"
            waiting.append(Part(name, "training", own.weights(model, FLOAT32), SPLIT))
    student = run.at("policy_training")
    if student and drafting.trains_drafter(config):
        updates.append(student_parts(student))
    generation = run.at("generation")
    parts = [
        *_always(run),
        *(_generation(generation) if generation else ()),
        *_inference(run),
        *max(updates, key=lambda update: sum(part.bytes for part in update)),
    ]
    return [part for part in parts if part.bytes]


def fullest(
    config: Config, models: ModelConfigs, placed: Plan, layouts: CallLayouts, remat: bool
) -> list[Part]:
    """Return the parts of the devices that hold most, among all in a plan of calls."""
    groups = by_group(config, models, placed, layouts, remat)
    return max((parts for _, parts in groups), key=lambda parts: peak(parts)[1])


def by_group(
    config: Config, models: ModelConfigs, placed: Plan, layouts: CallLayouts, remat: bool
) -> list[tuple[list[str], list[Part]]]:
    """Return each group of calls that share devices, and the parts on one of these."""
    return [
        (calls, plan(config, models, {call: layouts[call] for call in calls}, remat))
        for calls in placed.groups()
    ]


def device_memory(config: Config, device: Any) -> float | None:
    """Return the usable bytes of a device; None if unknown.

    It is the smaller of `mesh.device_memory_gb` and the limit that the device reports.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    known = [size for size in (config.mesh.device_memory_gb * GIGA, limit) if size]
    return min(known, default=None)


def settle_remat(config: Config, without: list[Part], limit: float | None) -> tuple[bool, str]:
    """Return whether the backward pass recomputes layers, and the reason.

    without: the parts without recomputation. limit: the usable bytes of a device, None if unknown.
    """
    setting = config.training.remat
    _, needed = peak(without)
    if setting != "auto":
        again = setting == "on"
        why = "training.remat is set"
    elif limit is None:
        again = True
        why = "the device does not report its memory"
    else:
        again = needed > ROOM * limit
        why = f"to keep them takes {needed / GIGA:.1f} of {limit / GIGA:.1f} GB"
    return again, f"{'computed again' if again else 'kept'} for the backward pass, as {why}"


def memory_for_remat(config: Config, device: Any) -> float | None:
    """Return the usable bytes of a device; for a CPU a share of its host's memory."""
    known = device_memory(config, device)
    if known is not None or device.platform != "cpu":
        return known
    return HOST_SHARE * host_memory() / jax.device_count()


def _always(run: PlannedRun) -> list[Part]:
    """List the parts that exist from the first step to the last."""
    config = run.config
    models = run.models
    parts = []
    for role, own, model in run.models_of("training"):
        held = own.weights(model, FLOAT32)
        parts.append(Part(f"{role}, float32", "always", held, SPLIT))
        moments = 2 * held if derived.trains(config, role) else 0
        parts.append(Part(f"{role}'s optimizer, two moments", "always", moments, SPLIT))
    trained = derived.calls(config)
    frozen: dict[str, int] = {}
    for role, own, model in run.models_of("inference"):
        if f"{role}_training" not in trained:
            name = "reward models" if role == "reward" else role
            frozen[name] = frozen.get(name, 0) + own.weights(model)

    # A student learns, and its initial weights are kept if the policy learns too; another draft
    # model is frozen.
    drafter = student = 0
    at = run.at("policy_training" if config.drafter.layers else "generation")
    if at and not config.drafter.layers:
        drafter = at.weights(models.drafter, role="generation")
    elif at:
        learns = drafting.trains_drafter(config)
        whole = {"role": "training", "ends": False}  # next to pipelines, too
        student = (3 if learns else 1) * at.weights(models.drafter, FLOAT32, **whole)
        if learns and not derived.makes_drafter(config):
            student += at.weights(models.drafter, **whole)
    scorers = "inference" if config.mesh.idle_on_host else "always"
    return [
        *parts,
        *(Part(name, scorers, size, SPLIT_OR_OFFLOAD) for name, size in frozen.items()),
        Part("drafter", "always", drafter, SPLIT_TENSORS),
        Part("student and its optimizer", "always", student, SPLIT),
    ]


def _generation(run: PlannedRun) -> list[Part]:
    """List the parts of a slice in generation.

    These are the policy's copy, running samples, waiting prompts, and working memory.
    """
    config = run.config
    models = run.models
    shape = {axis: run.layout.extent(axis) for axis in AXES} | {"slices": 1}
    one_slice = meshes.abstract_mesh(shape, run.layout.platform)
    slices = run.layout.slices
    run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, mesh=one_slice))
    weights = functools.partial(run.weights, role="generation")
    state = decode_state(run)
    student = weights(models.drafter, ends=False) if config.drafter.layers else 0
    scorers = 0
    if config.generation.fuse_inference:
        calls = [call for call in derived.calls(config) if call != "policy_inference"]
        scorers = sum(weights(model) for model in models.scorers(calls))

    width = prompt_width(config.data.max_prompt_tokens, state.tokens.shape[1])
    prompts = empty_rows(run, PREFILLED, width, 0, 0)
    policy_rows = run.rows(dataclasses.replace(state, draft=None, history=None))
    without = "set generation.fuse_inference to False"
    work = _generation_work(run, state, width, slices)
    # Weights arrive before rows begin: a layer in transfer uses the room that these take later.
    later = policy_rows + run.rows((state.draft, state.history, prompts)) + work.bytes
    layer = max(0, run.gathered(models.policy) - later)
    return [
        Part("one layer in transfer", "generation", layer, SPLIT_TENSORS),
        Part("policy, for generation", "generation", weights(models.policy), SPLIT_TENSORS),
        Part("models that score meanwhile", "generation", scorers, without),
        Part("student, for generation", "generation", student, SPLIT_TENSORS),
        Part("key-value cache of the policy", "generation", policy_rows, FEWER_LIVE),
        Part("key-value cache of the drafter", "generation", run.rows(state.draft), FEWER_LIVE),
        Part("earlier responses", "generation", run.rows(state.history), LESS_HISTORY),
        Part("prefilled prompts", "generation", run.rows(prompts), SHORTER_PROMPTS),
        work,
    ]


def decode_state(run: PlannedRun) -> DecodeState:
    """Return the shapes of a slice's decoding state, with all its rows."""
    generation = run.config.generation
    strategies = drafting.strategies(run.config).strategies
    earlier = run.text_tokens if drafting.replays(run.config) else 0
    cache_length = cache_length_for(run.text_tokens, strategies, run.layout)
    return empty_rows(run, generation.max_rows, cache_length, generation.history_tokens, earlier)


def empty_rows(run: PlannedRun, *size: int) -> DecodeState:
    """Return the shapes of rows; size: rows, and lengths of cache, history and earlier text."""
    empty = functools.partial(generation_rows.empty, *run.models[:2])
    return jax.eval_shape(
        lambda: empty(*size, Layout(dtype=run.layout.dtype, cache=run.layout.cache))
    )


def _generation_work(run: PlannedRun, state: DecodeState, width: int, slices: int) -> Part:
    """Return the largest working memory of generation's programs, which run one after the other."""
    models = run.models
    prefill = run.forward(models.policy, row_share(PREFILLED, run.layout), width)
    # On a mesh, every device gathers it whole.
    leaf = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    rounds = round_bytes(run, state, most_nodes(run.config, run.layout))
    works = [
        Part("a round at work", "generation", rounds, "lower generation.max_rows"),
        Part("a prefill at work", "generation", prefill, SHORTER_PROMPTS),
        Part("a cache leaf of a shrinking batch", "generation", leaf, FEWER_LIVE),
    ]
    if run.config.generation.fuse_inference:
        # A slice scores its part of a micro-batch.
        whole = max(1, derived.microbatch_rows(run.config) // slices)
        rows = meshes.rows_of_shard(whole, run.layout.row_shards)
        scored = max(
            scoring_bytes(run, role, model, rows, gathers=False)
            for role, _, model in run.models_of("inference")
        )
        works.append(Part("a micro-batch that is scored", "generation", scored, FEWER_ROWS))
    return max(works, key=lambda work: work.bytes)


def round_bytes(run: PlannedRun, state: DecodeState, nodes: int) -> int:
    """Return the bytes of a round: the window of all layers, and scores or logits, in float32.

    Scores exist twice. So do logits except on GPUs, and once more if rejection draws, or if they
    must be padded to whole blocks; or not at all.
    """
    policy = run.models.policy
    generation = run.config.generation
    candidates = drafting.strategies(run.config)
    rows = row_share(generation.max_rows, run.layout)
    grid = rows * int(candidates.calls.grid[candidates.nodes <= nodes].max())
    itemsize = run.layout.dtype.itemsize

    kv_heads = run.tensor_share(policy.num_kv_heads)
    window = 2 * policy.num_layers * grid * kv_heads * policy.head_dim * itemsize
    scores = 4 * grid * run.tensor_share(policy.num_heads) * state.tokens.shape[1]
    streamed = streams_head(run.layout, Truncation(generation.top_k), generation.acceptance)
    logits = 0 if streamed else 4 * rows * nodes * run.outputs(policy)
    copies = run.temporaries.logits
    copies += run.temporaries.padded_logits * (policy.vocab_size % BLOCK != 0)
    copies += drafting.keeps_draft_logits(run.config)
    return window + max(2 * scores, copies * logits)


def most_nodes(config: Config, layout: Layout) -> int:
    """Return the most nodes per row that a round of all rows verifies.

    With fewer rows and caches it may be more.
    """
    candidates = drafting.strategies(config)
    nodes = candidates.nodes
    rows = row_share(config.generation.max_rows, layout)
    fits = nodes * rows <= VERIFIED
    # The shortest strategy is always available.
    fewest = nodes == nodes.min()
    return int(nodes[fits | fewest].max())


def scoring_bytes(
    run: PlannedRun, role: str, model: ModelConfig, rows: int, *, gathers: bool = True
) -> int:
    """Return the working memory to score the longest texts: in a layer, or at the logits.

    A reward model's texts are padded to whole buckets. Without `gathers` weights are whole.
    """
    if role == "reward":
        layer = run.forward(model, rows, derived.reward_tokens(run.config, model))
    else:
        layer = run.forward_packed(model, rows * run.text_tokens)
    layer += gathers * (run.gathered_block(model) + run.turned(model))
    return max(layer, run.logits(model) + gathers * run.gathered_head(model))


def _inference(run: PlannedRun) -> list[Part]:
    """List the copies of the scoring models, and the working memory of one micro-batch.

    Reward models score all samples, while generation's weights are present; other models score
    those that the algorithm has chosen.
    """
    trained = derived.calls(run.config)
    copies = work = kept = 0
    for role, own, model in run.models_of("inference"):
        rows = own.batch_rows if role == "reward" else own.scored_rows
        work = max(work, scoring_bytes(own, role, model, rows))
        if f"{role}_training" in trained:
            shared = own.layout == run.layouts.get(f"{role}_training")
            copies += own.cast_weights(model) if shared else own.weights(model)
        generation = run.at("generation")
        if role == "reward" and generation:
            kept = generation.weights(run.models.policy, role="generation")
    return [
        Part("models that score", "inference", max(copies, kept), SPLIT),
        Part("one layer at work, or logits", "inference", work, FEWER_ROWS),
    ]
