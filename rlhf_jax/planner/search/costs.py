"""Predict the seconds of each call of an iteration, by formula, for absent devices.

FLOPs come from the shapes of models and texts, bytes between devices from `traffic`, rounds of
generation from a roofline; the chip's figures and assumed shares of them give seconds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from rlhf_jax.config import derived
from rlhf_jax.generation.strategy.roofline import RATES, ModelWork, Roofline
from rlhf_jax.memory.sizes import PlannedRun, row_share
from rlhf_jax.mesh import AXES, Layout
from rlhf_jax.models.attention import QUERY_BLOCK, packed_block
from rlhf_jax.models.flops import pair_flops, product_flops
from rlhf_jax.planner.chips import Chip, ring_bandwidth
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.search.collectives import received_bytes
from rlhf_jax.planner.search.traffic import (
    ShardedModel,
    Tokens,
    Traffic,
    forward_traffic,
    gradient_traffic,
)
from rlhf_jax.types import ModelConfig

LATENCY = 5e-6  # seconds of a collective, however small


class CallCost(NamedTuple):
    """Hold the predicted costs of one call of an iteration."""

    name: str
    flops: float  # on all devices together
    received: float  # bytes that a device receives
    seconds: float


class Work(NamedTuple):
    """Hold the work of devices together, in one program or several."""

    flops: float  # on all of them together
    traffic: Traffic  # that each of them receives from the others


class Passes(NamedTuple):
    """Count the micro-batches of a call, which run one after the other, and their tokens."""

    count: int
    samples: int  # of one micro-batch, on all devices
    tokens: int  # of a sample
    predicted: int  # of them, by the head

    def on_device(self, layout: Layout) -> Tokens:
        """Return one device's tokens of a micro-batch."""
        rows = row_share(self.samples, layout)
        return Tokens(rows * self.tokens, rows * self.predicted)


@dataclasses.dataclass(frozen=True)
class PlacedRun:
    """Hold a run and the devices to place it on, whose chip must be known."""

    run: PlannedRun
    hardware: Hardware

    @classmethod
    def on_part(cls, run: PlannedRun, hardware: Hardware) -> PlacedRun:
        """Return a run on as much of some hardware as its layout has devices."""
        return cls(run, hardware.part(run.layout.extent(AXES)))

    @property
    def chip(self) -> Chip:
        """Return the devices' chip."""
        assert self.hardware.chip is not None, "Seconds are predicted of known chips alone."
        return self.hardware.chip

    def computing(self, flops: float, share: float) -> float:
        """Return the seconds of products that all devices share, at a share of their peak."""
        return flops / (self.hardware.count * self.chip.flops * share)

    def bandwidth(self, *axes: str) -> float:
        """Return the bytes per second that a device receives in a collective over mesh axes."""
        inner = {"tensor": (), "fsdp": ("tensor",), "data": ("fsdp", "tensor")}
        group = self.run.layout.extent(axes)
        stride = self.run.layout.extent(inner[axes[-1]])
        count = self.hardware.count
        received = ring_bandwidth(self.chip, count, self.hardware.nodes, group, stride)
        return self.chip.efficiency.links * received

    def seconds(self, work: Work, share: float) -> float:
        """Return the seconds of products and of transfers.

        Transfers of weights and gradients overlap with products; sums of activations overlap with
        nothing.
        """
        weights = work.traffic.width / self.bandwidth("slices", "fsdp")
        gradients = work.traffic.data / self.bandwidth("data")
        sums = work.traffic.tensor / self.bandwidth("tensor")
        return max(self.computing(work.flops, share), weights + gradients) + sums

    def forward(self, model: ModelConfig, passes: Passes) -> Work:
        """Return the work of a model's forward pass over one of the micro-batches."""
        sharded = ShardedModel(model, self.run.layout, self.hardware.platform)
        traffic = forward_traffic(sharded, passes.on_device(self.run.layout))
        block = packed_block(self.run.layout)
        return Work(forward_flops(model, *passes[1:], block=block), traffic)

    def gradient(self, model: ModelConfig, passes: Passes) -> Work:
        """Return the work of a model's gradient of one of the micro-batches."""
        remat = self.run.remat
        sharded = ShardedModel(model, self.run.layout, self.hardware.platform)
        traffic = gradient_traffic(sharded, passes.on_device(self.run.layout), remat=remat)
        block = packed_block(self.run.layout)
        return Work(gradient_flops(model, *passes[1:], remat=remat, block=block), traffic)

    def passes(self, updates: int = 1, *, chosen: bool = False) -> Passes:
        """Count the micro-batches of all samples, split into updates, or of the chosen ones.

        Each has the same number of rows on every device, padded.
        """
        config = self.run.config
        samples = derived.chosen_samples(config) if chosen else derived.samples(config)
        shards = self.run.layout.row_shards
        filled = shards * min(self.run.batch_rows, math.ceil(samples / shards))
        count = updates * math.ceil(samples / updates / filled)
        # A line has room for as many predicted tokens.
        return Passes(count, filled, self.run.text_tokens, self.run.text_tokens)

    def rounds(self) -> tuple[int, int]:
        """Count rounds, and the rows of each on a device, with equal numbers of samples on slices.

        If rows are too few, samples take turns.
        """
        config = self.run.config.generation
        layout = self.run.layout
        of_slice = math.ceil(derived.samples(self.run.config) / layout.slices)
        rows = min(config.max_rows, of_slice)
        turns = math.ceil(of_slice / rows)
        return turns * config.max_new_tokens, math.ceil(rows * layout.slices / layout.row_shards)

    def roofline(self) -> Roofline:
        """Return the roofline of a plain round on a device, with weights split over `tensor`."""
        tensor = self.run.layout.extent("tensor")
        work = ModelWork.of(self.run.models.policy, self.run.layout.dtype.itemsize)
        reads = self.chip.memory_bandwidth * self.chip.efficiency.decoding * tensor
        computes = self.chip.flops * self.chip.efficiency.inference * tensor
        _, _, of_row, of_call = RATES[self.hardware.platform]
        return Roofline.of_rates(work, reads, computes, of_row, of_call)


def predict_call(placed: PlacedRun, call: str) -> CallCost:
    """Predict one call of an iteration, by its name in a plan, on its devices."""
    if call == "generation":
        return generation_cost(placed)
    trains = call.endswith("_training")
    config = placed.run.config
    training = config.training
    chosen = call != "reward_inference"
    passes = placed.passes(training.minibatches if trains else 1, chosen=chosen)
    count = passes.count * (training.epochs if trains else 1)
    efficiency = placed.chip.efficiency
    share = efficiency.training if trains else efficiency.inference
    flops = received = seconds = 0.0
    idle = trains and call not in derived.learning_calls(config)
    for model in () if idle else placed.run.models.of(call):
        read = passes
        turns = count
        if derived.compares_pairs(call, model):
            read = passes._replace(tokens=derived.reward_tokens(config, model))
            turns = count * (config.generation.samples_per_prompt - 1)
        one = placed.gradient(model, read) if trains else placed.forward(model, read)
        work = Work(turns * one.flops, one.traffic.times(turns))
        flops += work.flops
        received += work.traffic.total
        seconds += placed.seconds(work, share)
    return CallCost(call, flops, received, seconds)


def generation_cost(placed: PlacedRun) -> CallCost:
    """Predict the rounds of all samples and the prefill of their prompts.

    Weights are whole on each device except over `tensor`, over which a round sums activations.
    """
    config = placed.run.config
    policy = placed.run.models.policy
    prompts = config.generation.prompts_per_step
    middle = config.data.max_prompt_tokens + config.generation.max_new_tokens / 2
    prefill = forward_flops(policy, prompts, config.data.max_prompt_tokens, predicted=1)
    work = ModelWork.of(policy, itemsize=1)
    decoded = derived.samples(config) * config.generation.max_new_tokens
    decoding = decoded * (work.token_flops + work.context_flops * middle)

    rounds, rows = placed.rounds()
    tensor = placed.run.layout.extent("tensor")
    sums = (2 * policy.num_layers + 1) * (tensor > 1)
    hidden = rows * policy.width * placed.run.layout.dtype.itemsize
    received = received_bytes("all-reduce", hidden, tensor)
    sending = sums * (LATENCY + received / placed.bandwidth("tensor"))
    working = placed.roofline().seconds(nodes=1, grid=1, rows=rows, context=rows * middle)
    prefilling = placed.computing(prefill, placed.chip.efficiency.inference)
    seconds = rounds * (float(working) + sending) + prefilling
    return CallCost("generation", prefill + decoding, rounds * sums * received, seconds)


def forward_flops(
    model: ModelConfig, samples: int, tokens: int, predicted: int, *, block: int = QUERY_BLOCK
) -> float:
    """Return the FLOPs of a forward pass over samples of equal length."""
    of_layers, of_head = product_flops(model)
    products = tokens * of_layers + predicted * of_head
    return samples * (products + attention_flops(model, tokens, block))


def gradient_flops(
    model: ModelConfig,
    samples: int,
    tokens: int,
    predicted: int,
    *,
    remat: bool,
    block: int = QUERY_BLOCK,
) -> float:
    """Return the FLOPs of a forward and backward pass over samples of equal length.

    The head is recomputed, and so are the scores of attention, whose backward pass has five
    products for the two of the forward pass; with `remat` layers are recomputed except their last
    product, and attention once more.
    """
    of_layers, of_head = product_flops(model)
    down = 2 * model.num_layers * model.width * model.ffn_width
    layers = tokens * (3 * of_layers + remat * (of_layers - down))
    head = 4 * predicted * of_head
    attention = (1 + remat + 5 / 2) * attention_flops(model, tokens, block)
    return samples * (layers + head + attention)


def attention_flops(model: ModelConfig, tokens: int, block: int) -> float:
    """Return the FLOPs of causal attention in a sample, block by block of queries."""
    seen = (tokens + min(tokens, block)) / 2
    return pair_flops(model) * tokens * seen
