"""Describe the programs of generation, with the predictions of formulas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes import BLOCK
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import drafting
from rlhf_jax.generation import rows as generation_rows
from rlhf_jax.generation.scheduler import PREFILLED, prompt_width, shared
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters.model import CATCH_UP_TOKENS, MODEL
from rlhf_jax.generation.speculative.protocol import DRAFTERS, DraftContext
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import Truncation
from rlhf_jax.generation.strategy.roofline import ModelWork
from rlhf_jax.memory import estimate
from rlhf_jax.memory.sizes import PlannedRun, row_share
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.placement.transfer import layer_programs
from rlhf_jax.planner import shapes
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls, Predicted
from rlhf_jax.planner.search.collectives import received_bytes
from rlhf_jax.planner.search.costs import forward_flops
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.types import ModelConfig, Strategy

# Layers for which a program is compiled. The working memory changes from the first to the second,
# as a layer's weights arrive while the previous one is at work, and hardly from then on.
COMPILED_LAYERS = (2, 3)
# A TPU's prefill uses 16 MB more in the third layer of 8B than in the second, 2.6 MB more in the
# fourth, and 1.2 MB in the fifth.
PREFILL_LAYERS = (3, 4)
# Resident parts of generation that are not inputs of a round.
RESIDENT_IN_ROUNDS = ("models that score meanwhile", "student, for generation", "prefilled prompts")
# The same for prefill, for the catch-up of a draft cache, and for drafts.
CACHES = ("key-value cache of the policy", "key-value cache of the drafter", "earlier responses")
RESIDENT_IN_PREFILL = (RESIDENT_IN_ROUNDS[0], *CACHES)
RESIDENT_IN_CATCH_UP = (RESIDENT_IN_ROUNDS[0], RESIDENT_IN_ROUNDS[2], "policy, for generation")
BESIDE_DRAFTS = (*RESIDENT_IN_CATCH_UP, CACHES[0], CACHES[2])


def arrivals(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield the programs that move a layer of the policy to generation."""
    model = calls.models.policy
    source = calls.run("policy_training").layout
    layout = calls.layouts["generation"]
    layers: Any = shapes.model_shapes(model, source, FLOAT32).layers
    coming = calls.run("generation").weights(model, role="generation")
    apart = source.devices.flat[0] not in set(layout.devices.flat)
    itemsize = layout.dtype.itemsize
    for program in layer_programs(layers, layout, calls.devices):
        leaves = program.index is not None
        always = calls.always("policy_training" if leaves else "generation")
        yield CallProgram(
            "generation",
            "a layer comes" if leaves else "a layer is recut",
            lambda execute, _, program=program: program.run(execute),
            Predicted(program.device_bytes(itemsize), received=program.received_bytes(itemsize)),
            resident=always + coming * (not (leaves and apart)) - leaves * program.arguments,
            depth=model.num_layers,
        )


def prefill(calls: PlacedCalls) -> CallProgram:
    """Return the program that prefills the most prompts of one call."""
    run = calls.run("generation")
    layout = run.layout
    models = [model for model in calls.models[:2] if model]
    rows = shared(PREFILLED, layout)
    own = rows // layout.row_shards
    width = prompt_width(
        calls.config.data.max_prompt_tokens, estimate.decode_state(run).tokens.shape[1]
    )
    prompts = run.rows(estimate.empty_rows(run, rows, width, 0, 0))
    work = max(run.forward(model, own, width) for model in models)
    held = unread = 0
    sent = 0.0
    for model in models:
        # the head is not used, and of the last layer only keys and values
        whole = run.weights(model, role="generation")
        last = 2 * model.width * run.tensor_share(model.num_kv_heads) * model.head_dim
        read = headless(run, model) - run.gathered(model) + last * layout.dtype.itemsize
        held += read
        unread += whole - read
        sent += (2 * model.num_layers - 1) * summed_bytes(run, model, own * width)
    return CallProgram(
        "generation",
        "prefill",
        functools.partial(run_prefill, calls, rows, width),
        Predicted(
            held + prompts + work,
            sum(forward_flops(model, rows, width, predicted=0) for model in models),
            sent,
        ),
        resident=calls.always("generation", RESIDENT_IN_PREFILL, but="drafter") + unread,
        depth=calls.models.policy.num_layers,
        compiled_layers=PREFILL_LAYERS,
    )


def headless(run: PlannedRun, model: ModelConfig) -> int:
    """Return the bytes of a model's decoding weights without a head of its own."""
    return run.weights(dataclasses.replace(model, tied=True), role="generation")


def summed_bytes(run: PlannedRun, model: ModelConfig, tokens: int) -> float:
    """Return the bytes that a device receives to sum hidden states of its tokens over `tensor`."""
    hidden = tokens * model.width * run.layout.dtype.itemsize
    return received_bytes("all-reduce", hidden, run.layout.extent("tensor"))


def run_prefill(calls: PlacedCalls, rows: int, width: int, execute: Execute, depth: int) -> object:
    """Run the prefill of prompts [rows, width], with the policy's first layers."""
    layout = calls.run("generation").layout
    policy = calls.shallower("policy", depth).models.policy
    drafter = calls.models.drafter
    tokens, length = shapes.prompt_shapes(rows, width, layout)
    return execute(
        generation_rows.prefill,
        shapes.model_shapes(policy, layout),
        drafter and shapes.model_shapes(drafter, layout),
        tokens,
        length,
        layout=layout,
    )


def _decoded(calls: PlacedCalls) -> DecodeState:
    """Return the shapes of a slice's decoding state."""
    run = calls.run("generation")
    return shapes.row_shapes(lambda: estimate.decode_state(run), run.layout)


def drafts(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield a draft model's programs: the most nodes of a draft, and a step of catch-up."""
    run = calls.run("generation")
    drafter = calls.models.drafter
    strategies = [
        one
        for one in drafting.strategies(calls.config).strategies
        if one.parents and DRAFTERS[one.drafter].needs_model
    ]
    if drafter is None or not strategies:
        return
    strategy = max(strategies, key=lambda one: len(one.parents))
    fed = len(set(strategy.parents))  # nodes with children
    rows = calls.config.generation.max_rows
    state = estimate.decode_state(run)
    # Without an attention kernel, a TPU's products need keys and values in another order.
    plain = run.layout.kernels.tree_attention == "reference" and run.layout.platform == "tpu"
    held = run.weights(drafter, role="generation") + (1 + plain) * run.rows(state.draft)
    own = row_share(rows, run.layout)
    logits = 4 * own * fed * run.outputs(drafter)
    sent = (2 * drafter.num_layers + 1) * summed_bytes(run, drafter, own)
    work = ModelWork.of(drafter, itemsize=1)
    head = 2 * drafter.width * drafter.vocab_size
    of_token = work.token_flops + work.context_flops * state.tokens.shape[1]
    program = functools.partial(
        CallProgram, "generation", depth=drafter.num_layers, compiled_layers=COMPILED_LAYERS
    )
    yield program(
        "catching up",
        functools.partial(run_drafter, calls, strategy, MODEL.catch_up),
        predicted=Predicted(
            headless(run, drafter) + run.rows(state),
            rows * CATCH_UP_TOKENS * (of_token - head),
            CATCH_UP_TOKENS * sent,
        ),
        resident=calls.always("generation", RESIDENT_IN_CATCH_UP, but="drafter"),
    )
    # a token before the root is fed, too
    yield program(
        f"drafts of {len(strategy.parents) + 1} nodes",
        functools.partial(run_drafter, calls, strategy, MODEL.propose),
        predicted=Predicted(
            held + 2 * logits,
            rows * ((fed + 1) * of_token - head),
            (fed + 1) * sent + fed * drawing_bytes(run, rows),
        ),
        resident=calls.always("generation", BESIDE_DRAFTS, but="drafter"),
    )


def run_drafter(
    calls: PlacedCalls,
    strategy: Strategy,
    verb: Callable[..., object],
    execute: Execute,
    depth: int,
) -> object:
    """Run a draft model's first layers for all rows of a slice, by the drafter's method."""
    own = calls.shallower("drafter", depth)
    layout = calls.run("generation").layout
    context = DraftContext(
        strategy,
        np.zeros((calls.config.generation.max_rows, 0), np.int32),
        own.models.drafter and shapes.model_shapes(own.models.drafter, layout),
        truncation(calls),
        with_logits=drafting.keeps_draft_logits(calls.config),
        layout=layout,
    )
    return verb(execute, _decoded(own), context)


def truncation(calls: PlacedCalls) -> Truncation:
    """Return the truncation of the sampled distribution."""
    generation = calls.config.generation
    return Truncation(generation.top_k, generation.top_p)


def rounds(calls: PlacedCalls) -> Iterator[CallProgram]:
    """Yield plain decoding, or the shortest round, and the round that verifies most drafts."""
    run = calls.run("generation")
    candidates = drafting.strategies(calls.config)
    state = run.rows(estimate.decode_state(run))
    weights = run.weights(calls.models.policy, role="generation")
    resident = calls.always("generation", RESIDENT_IN_ROUNDS)
    counts = candidates.nodes.tolist()
    for nodes in dict.fromkeys((min(counts), estimate.most_nodes(calls.config, run.layout))):
        work = estimate.round_bytes(run, estimate.decode_state(run), nodes)
        flops, sent = round_work(calls, nodes)
        yield CallProgram(
            "generation",
            f"round of {nodes} node{'s' * (nodes > 1)}",
            functools.partial(run_nodes, calls, candidates.strategies[counts.index(nodes)]),
            Predicted(weights + state + work, flops, sent),
            resident=resident,
            depth=calls.models.policy.num_layers,
            compiled_layers=COMPILED_LAYERS,
        )


def round_work(calls: PlacedCalls, nodes: int) -> tuple[float, float]:
    """Return the FLOPs of a round of all rows, and the bytes that a device receives."""
    run = calls.run("generation")
    policy = calls.models.policy
    work = ModelWork.of(policy, itemsize=1)
    rows = calls.config.generation.max_rows
    context = estimate.decode_state(run).tokens.shape[1] + nodes
    flops = rows * nodes * (work.token_flops + work.context_flops * context)
    own = row_share(rows, run.layout) * nodes
    sent = (2 * policy.num_layers + 1) * summed_bytes(run, policy, own)
    return flops, sent + drawing_bytes(run, rows * nodes)


def drawing_bytes(run: PlannedRun, nodes: int) -> float:
    """Return the bytes that a device receives to draw a token at each node of a slice.

    Logits of the drawn block, in float32, are on one part of the vocabulary, and go to all.
    """
    blocks = 4 * BLOCK * row_share(nodes, run.layout)
    return received_bytes("all-reduce", blocks, run.layout.extent("tensor"))


def run_nodes(calls: PlacedCalls, strategy: Strategy, execute: Execute, depth: int) -> object:
    """Run a round of all rows of a slice, with the policy's first layers."""
    generation = calls.config.generation
    own = calls.shallower("policy", depth)
    layout = calls.run("generation").layout
    rows = generation.max_rows
    nodes = trees.as_data(strategy, rows)
    count = trees.bucket(strategy)
    drafts = shapes.row_shapes(lambda: jnp.zeros((rows, count - 1), jnp.int32), layout)
    logits = None
    if drafting.keeps_draft_logits(calls.config):
        each = (rows, count, calls.models.policy.vocab_size)
        logits = shapes.row_shapes(lambda: jnp.zeros(each, jnp.float32), layout)
    return execute(
        run_round,
        shapes.model_shapes(own.models.policy, layout),
        _decoded(own),
        drafts,
        logits,
        shapes.repeated(jax.eval_shape(lambda: nodes), layout),
        truncation=truncation(calls),
        stop_tokens=(0,),  # their number does not matter for memory
        rule=generation.acceptance,
        verified=strategy.packed,
        layout=layout,
    )
