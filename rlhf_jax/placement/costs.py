"""Predict the seconds of each call of an iteration, by formula, for devices that need not be here.

FLOPs come from the shapes of models and texts, bytes that devices send each other from `traffic`,
rounds of generation from a roofline; the chip's figures and assumed shares of them make seconds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from rlhf_jax.config import derived
from rlhf_jax.config.hardware import Hardware
from rlhf_jax.config.sizes import PlannedRun, row_share
from rlhf_jax.generation.strategy import prior
from rlhf_jax.generation.strategy.roofline import RATES, ModelWork, Roofline
from rlhf_jax.mesh import Layout
from rlhf_jax.model.attention import QUERY_BLOCK
from rlhf_jax.placement.chips import ASSUMED, Chip, ring_bandwidth
from rlhf_jax.placement.collectives import received_bytes
from rlhf_jax.placement.traffic import Tokens, Traffic, forward_traffic, gradient_traffic
from rlhf_jax.types import ModelConfig

LATENCY = 5e-6  # seconds of a collective, however little it sends


class CallCost(NamedTuple):
    """Hold what one call of an iteration is predicted to take."""

    name: str
    flops: float  # on all devices together
    received: float  # bytes that a device receives
    seconds: float


class Passes(NamedTuple):
    """Count the micro-batches that a call runs one after the other, and the tokens of each."""

    count: int
    samples: int  # of one micro-batch, on all devices
    tokens: int  # of a sample
    predicted: int  # of them, by the head


def predict_calls(
    run: PlannedRun, hardware: Hardware, tokens_per_round: float = 1.0
) -> list[CallCost]:
    """Predict each call of an iteration in which all prompts and responses have full length.

    No prompt is taken to be shared by its samples. tokens_per_round: that a row gains in a round
    of generation, 1 without drafts. The hardware's chip must be known.
    """
    config = run.config
    models = run.models
    calls = [_generation(run, hardware, tokens_per_round)]
    scored = {f"reward {number}": model for number, model in enumerate(models.rewards, 1)}
    if run.trains_policy and derived.needs_old_logprobs(config):
        scored["policy's log-probs"] = models.policy
    if derived.needs_reference(config):
        scored["reference"] = models.policy
    if models.critic:
        scored["critic's values"] = _critic(models.critic)
    calls += [_inference(run, hardware, name, model) for name, model in scored.items()]
    if run.trains_policy:
        calls.append(_training(run, hardware, "policy's update", models.policy))
    if models.critic:
        calls.append(_training(run, hardware, "critic's update", _critic(models.critic)))
    return calls


def forward_flops(model: ModelConfig, samples: int, tokens: int, predicted: int) -> float:
    """Return the FLOPs of a forward pass over samples of so many tokens each."""
    of_layers, of_head = _products(model)
    products = tokens * of_layers + predicted * of_head
    return samples * (products + _attention(model, tokens))


def gradient_flops(
    model: ModelConfig, samples: int, tokens: int, predicted: int, *, remat: bool
) -> float:
    """Return the FLOPs of a forward and backward pass over samples of so many tokens each.

    The head is computed again, and attention; with `remat` layers but for their last product, and
    attention once more.
    """
    of_layers, of_head = _products(model)
    down = 2 * model.num_layers * model.width * model.ffn_width
    products = tokens * (3 * of_layers + remat * (of_layers - down)) + 4 * predicted * of_head
    return samples * (products + (4 + remat) * _attention(model, tokens))


def _critic(model: ModelConfig) -> ModelConfig:
    """Return the shape of a critic, which has a policy's trunk or is a reward model."""
    return dataclasses.replace(model, scalar_head=True, tied=False)


def _products(model: ModelConfig) -> tuple[float, float]:
    """Return the FLOPs of a token's products with the layers, and with the head."""
    of_vocabulary = 2 * model.width * model.vocab_size
    of_layers = prior.work(model, itemsize=1).token_flops - of_vocabulary
    return of_layers, 2 * model.width if model.scalar_head else of_vocabulary


def _attention(model: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of causal attention in a sample, block by block of queries."""
    seen = (tokens + min(tokens, QUERY_BLOCK)) / 2
    return prior.work(model, itemsize=1).context_flops * tokens * seen


def _passes(run: PlannedRun, updates: int = 1) -> Passes:
    """Count the micro-batches of all samples, cut into so many updates."""
    generation = run.config.generation
    samples = generation.prompts_per_step * generation.samples_per_prompt
    rows = min(run.config.training.microbatch_rows, samples)
    count = updates * math.ceil(samples / updates / rows)
    return Passes(count, rows, run.text_tokens, generation.max_new_tokens)


def _own_tokens(passes: Passes, layout: Layout) -> Tokens:
    """Return one device's tokens of a micro-batch."""
    rows = row_share(passes.samples, layout)
    return Tokens(rows * passes.tokens, rows * passes.predicted)


def _inference(run: PlannedRun, hardware: Hardware, name: str, model: ModelConfig) -> CallCost:
    """Predict a model's forward passes over all samples."""
    passes = _passes(run)
    flops = passes.count * forward_flops(model, *passes[1:])
    tokens = _own_tokens(passes, run.layout)
    traffic = forward_traffic(model, run.layout, tokens, hardware.platform).times(passes.count)
    seconds = _seconds(flops, traffic, run.layout, hardware, share=ASSUMED.inference)
    return CallCost(name, flops, traffic.total, seconds)


def _training(run: PlannedRun, hardware: Hardware, name: str, model: ModelConfig) -> CallCost:
    """Predict a model's gradients of all minibatches and epochs."""
    training = run.config.training
    passes = _passes(run, training.minibatches)
    count = training.epochs * passes.count
    flops = count * gradient_flops(model, *passes[1:], remat=run.remat)
    tokens = _own_tokens(passes, run.layout)
    traffic = gradient_traffic(model, run.layout, tokens, hardware.platform, remat=run.remat)
    traffic = traffic.times(count)
    seconds = _seconds(flops, traffic, run.layout, hardware, share=ASSUMED.training)
    return CallCost(name, flops, traffic.total, seconds)


def _seconds(
    flops: float, traffic: Traffic, layout: Layout, hardware: Hardware, share: float
) -> float:
    """Return the seconds of products and of what is sent.

    Weights and gradients are sent beside products; nothing goes on while activations are summed.
    """
    computing = flops / (hardware.count * _chip(hardware).flops * share)
    weights = traffic.width / _bandwidth(layout, hardware, "slices", "fsdp")
    gradients = traffic.data / _bandwidth(layout, hardware, "data")
    sums = traffic.tensor / _bandwidth(layout, hardware, "tensor")
    return max(computing, weights + gradients) + sums


def _chip(hardware: Hardware) -> Chip:
    """Return the chip of devices, whose figures must be known."""
    assert hardware.chip is not None, "Seconds are predicted of known chips alone."
    return hardware.chip


def _bandwidth(layout: Layout, hardware: Hardware, *axes: str) -> float:
    """Return the bytes a second that a device receives in a collective over mesh axes."""
    inner = {"tensor": (), "fsdp": ("tensor",), "data": ("fsdp", "tensor")}
    group = layout.extent(axes)
    stride = layout.extent(inner[axes[-1]])
    nodes = (hardware.count, hardware.nodes)
    return ASSUMED.links * ring_bandwidth(_chip(hardware), *nodes, group=group, stride=stride)


def _generation(run: PlannedRun, hardware: Hardware, tokens_per_round: float) -> CallCost:
    """Predict the rounds of all samples and the prefill of their prompts."""
    config = run.config.generation
    policy = run.models.policy
    prompt = run.config.data.max_prompt_tokens
    prefill = forward_flops(policy, config.prompts_per_step, prompt, predicted=1)
    prefilling = prefill / (hardware.count * _chip(hardware).flops * ASSUMED.inference)

    work = prior.work(policy, itemsize=1)
    tokens = config.prompts_per_step * config.samples_per_prompt * config.max_new_tokens
    decoded = tokens * (work.token_flops + work.context_flops * _mean_context(run))
    rounds = _rounds(run, tokens_per_round)
    received = _sums(run) * _received_by_a_sum(run, rounds.rows)
    seconds = rounds.count * _round_seconds(run, hardware, rounds.rows) + prefilling
    return CallCost("generation", prefill + decoded, rounds.count * received, seconds)


class Rounds(NamedTuple):
    """Count the rounds of generation, and the rows of each on one device."""

    count: int
    rows: int


def _rounds(run: PlannedRun, tokens_per_round: float) -> Rounds:
    """Count rounds where slices have the same samples each, in turns where rows are too few."""
    config = run.config.generation
    samples = config.prompts_per_step * config.samples_per_prompt
    of_slice = math.ceil(samples / run.layout.slices)
    rows = min(config.max_rows, of_slice)
    turns = math.ceil(of_slice / rows)
    count = turns * math.ceil(config.max_new_tokens / tokens_per_round)
    return Rounds(count, math.ceil(rows * run.layout.slices / run.layout.row_shards))


def _mean_context(run: PlannedRun) -> float:
    """Return the tokens before the middle of a response."""
    return run.config.data.max_prompt_tokens + run.config.generation.max_new_tokens / 2


def _sums(run: PlannedRun) -> int:
    """Return the all-reduces of a round: two a layer and that of the embedding."""
    return (2 * run.models.policy.num_layers + 1) * (run.layout.extent("tensor") > 1)


def _received_by_a_sum(run: PlannedRun, rows: int) -> float:
    """Return the bytes that a device receives as rows' hidden states are summed over `tensor`."""
    hidden = rows * run.models.policy.width * run.layout.dtype.itemsize
    return received_bytes("all-reduce", hidden, run.layout.extent("tensor"))


def _round_seconds(run: PlannedRun, hardware: Hardware, rows: int) -> float:
    """Return the seconds of a plain round of a device's rows, in the middle of their responses."""
    context = rows * _mean_context(run)
    working = float(_roofline(run, hardware).seconds(nodes=1, grid=1, rows=rows, context=context))
    bandwidth = _bandwidth(run.layout, hardware, "tensor")
    return working + _sums(run) * (LATENCY + _received_by_a_sum(run, rows) / bandwidth)


def _roofline(run: PlannedRun, hardware: Hardware) -> Roofline:
    """Return the roofline of a plain round on one device, whose weights are split over `tensor`."""
    chip = _chip(hardware)
    tensor = run.layout.extent("tensor")
    work: ModelWork = prior.work(run.models.policy, run.layout.dtype.itemsize)
    reads = chip.memory_bandwidth * ASSUMED.decoding * tensor
    computes = chip.flops * ASSUMED.inference * tensor
    _, _, of_row, of_call = RATES[hardware.platform]
    return Roofline(
        read=work.weight_bytes / reads,
        read_context=work.context_bytes / reads,
        compute=work.token_flops / computes,
        compute_context=work.context_flops / computes,
        row=of_row,
        call=of_call,
    )
