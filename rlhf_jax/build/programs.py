"""Trace the programs of each call of a plan from shapes, with what formulas say of each.

Devices need not be here: those of a TPU topology are enough. Nothing is compiled or run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Traced

from rlhf_jax import mesh as meshes
from rlhf_jax.build import shapes
from rlhf_jax.config import derived, memory, memory_parts
from rlhf_jax.config.hardware import Hardware
from rlhf_jax.config.memory_parts import Part
from rlhf_jax.config.schema import Config
from rlhf_jax.config.sizes import PlannedRun
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import prior
from rlhf_jax.inference.logprobs import score_packed
from rlhf_jax.inference.values import value_packed
from rlhf_jax.mesh import FLOAT32, Layout
from rlhf_jax.placement.plan import CallLayouts, Plan
from rlhf_jax.placement.recut import received
from rlhf_jax.placement.search.collectives import received_bytes
from rlhf_jax.placement.search.costs import Passes, PlacedRun, forward_flops, gradient_flops
from rlhf_jax.placement.search.traffic import ShardedModel, forward_traffic, gradient_traffic
from rlhf_jax.placement.transfer import trace_layer
from rlhf_jax.rewards.models import read_scores
from rlhf_jax.training.optimizer import Gradient, apply, make_optimizer
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.training.update import accumulate, critic_objective, policy_objective
from rlhf_jax.types import ModelConfig, ModelConfigs, Strategy

# Parts of generation that no round is given.
BESIDE_ROUNDS = ("models that score beside it", "student, for generation", "prefilled prompts")


class Foreseen(NamedTuple):
    """Hold what formulas say of one run of a program."""

    bytes: float  # of a device, arguments included
    flops: float = 0.0  # of matrix products, on all devices together
    received: float = 0.0  # bytes of a device


class CallProgram(NamedTuple):
    """Hold one program of a call."""

    call: str
    name: str
    trace: Callable[[int], Traced]  # of a model of so many layers
    foreseen: Foreseen
    beside: float  # bytes of a device that are there, too, while it runs
    depth: int  # layers of the model
    unrolled: bool = False  # each layer is a part of the program


@dataclasses.dataclass(frozen=True)
class PlacedCalls:
    """Hold the calls of a plan, and the devices that they are placed on."""

    config: Config
    models: ModelConfigs
    plan: Plan
    devices: Sequence[Any]
    hardware: Hardware
    remat: bool

    @functools.cached_property
    def layouts(self) -> CallLayouts:
        """Return the layout of each call."""
        return self.plan.layouts(self.devices)

    def run(self, call: str) -> PlannedRun:
        """Return the run as a call sees it; generation as one slice does."""
        layout: Layout = getattr(self.layouts, call)
        if call == "generation":
            layout = layout.split()[0]
        return PlannedRun(self.config, self.models, layout, self.remat, {call: layout})

    def placed(self, call: str) -> PlacedRun:
        """Return the run of a call, and its part of the hardware."""
        run = self.run(call)
        return PlacedRun(run, self.hardware.part(run.layout.extent(meshes.AXES)))

    def model(self, call: str) -> ModelConfig:
        """Return the model of a call that trains or scores one: policy or critic."""
        if not call.startswith("critic"):
            return self.models.policy
        assert self.models.critic is not None, "A call of the critic's has one."
        return dataclasses.replace(self.models.critic, scalar_head=True, tied=False)

    def parts(self, call: str) -> list[Part]:
        """Return the parts of memory on the fullest of a call's devices."""
        of_call = self.layouts._asdict()
        found = [
            memory.plan(self.config, self.models, {one: of_call[one] for one in calls}, self.remat)
            for calls in self.plan.groups()
            if call in calls
        ]
        return max(found, key=lambda parts: memory_parts.peak(parts)[1])

    def always(self, call: str) -> int:
        """Return the bytes that the fullest of a call's devices holds from step to step."""
        return memory_parts.total(self.parts(call), "always")

    def programs(self) -> Iterator[CallProgram]:
        """Yield the programs of all calls, in the order of a plan."""
        for call in self.plan.placements:
            if call == "generation":
                yield from self.arrivals()
                yield from self.rounds()
            elif call == "reward_inference":
                yield from self.rewards()
            elif call.endswith("_inference"):
                yield self.scores(call)
            else:
                yield from self.updates(call)

    def arrivals(self) -> Iterator[CallProgram]:
        """Yield what brings a layer of the policy to generation."""
        model = self.models.policy
        source = self.run("policy_training")
        target = self.run("generation")
        layout = self.layouts.generation
        layers: Any = shapes.model_shapes(model, source.layout, FLOAT32).layers
        layer = target.gathered(model)
        coming = target.weights(model, role="generation")
        held = source.weights(model, FLOAT32, ends=False)
        for number, program in enumerate(trace_layer(layers, layout, self.devices, layout.dtype)):
            leaves = number == 0
            entries = sum(
                received(recut, math.prod(leg.shape))
                for leg in program.legs
                for recut in leg.recuts
            )
            each = entries * layout.dtype.itemsize / len(program.legs[0].devices)
            always = self.always("policy_training" if leaves else "generation")
            yield CallProgram(
                "generation",
                "a layer comes" if leaves else "a layer is recut",
                lambda _, traced=program.traced: traced,
                Foreseen(leaves * held + 2 * layer, received=each),
                beside=always + coming - leaves * held,
                depth=model.num_layers,
            )

    def rounds(self) -> Iterator[CallProgram]:
        """Yield plain decoding, or the shortest round, and the one that verifies most drafts."""
        run = self.run("generation")
        candidates = derived.strategies(self.config)
        state = run.rows(memory.decode_state(run))
        weights = run.weights(self.models.policy, role="generation")
        parts = self.parts("generation")
        beside = sum(part.bytes for part in parts if part.name in BESIDE_ROUNDS)
        counts = candidates.nodes.tolist()
        for nodes in dict.fromkeys((min(counts), memory.most_nodes(self.config, run.layout))):
            work = memory.round_bytes(run, memory.decode_state(run), nodes)
            flops, sent = self.round_work(nodes)
            yield CallProgram(
                "generation",
                f"round of {nodes} node{'s' * (nodes > 1)}",
                functools.partial(self.trace_round, candidates.strategies[counts.index(nodes)]),
                Foreseen(weights + state + work, flops, sent),
                beside=memory_parts.total(parts, "always") + beside,
                depth=self.models.policy.num_layers,
                unrolled=True,
            )

    def round_work(self, nodes: int) -> tuple[float, float]:
        """Return the FLOPs of a round of all rows, and the bytes that a device receives."""
        run = self.run("generation")
        policy = self.models.policy
        work = prior.work(policy, itemsize=1)
        rows = self.config.generation.max_rows
        context = memory.decode_state(run).tokens.shape[1] + nodes
        flops = rows * nodes * (work.token_flops + work.context_flops * context)
        tensor = run.layout.extent("tensor")
        own = -(-rows // run.layout.row_shards) * nodes
        hidden = own * policy.width * run.layout.dtype.itemsize
        sums = 2 * policy.num_layers + 1
        return flops, sums * received_bytes("all-reduce", hidden, tensor)

    def trace_round(self, strategy: Strategy, depth: int) -> Traced:
        """Trace a round of all rows of a slice, with the policy's first layers."""
        generation = self.config.generation
        model = dataclasses.replace(self.models.policy, num_layers=depth)
        run = self.run("generation")
        layout = run.layout
        shallow = dataclasses.replace(run, models=self.models._replace(policy=model))
        state = shapes.row_shapes(lambda: memory.decode_state(shallow), layout)
        rows = generation.max_rows
        nodes = trees.as_data(strategy, rows)
        count = trees.bucket(strategy)
        drafts = shapes.row_shapes(lambda: jnp.zeros((rows, count - 1), jnp.int32), layout)
        logits = None
        if generation.acceptance == "rejection" and derived.drafts_by_model(self.config):
            each = (rows, count, model.vocab_size)
            logits = shapes.row_shapes(lambda: jnp.zeros(each, jnp.float32), layout)
        return run_round.trace(
            shapes.model_shapes(model, layout),
            state,
            drafts,
            logits,
            shapes.repeated(jax.eval_shape(lambda: nodes), layout),
            sampling=Sampling(generation.temperature, generation.top_k, generation.top_p),
            stop_tokens=(0,),  # how many there are is nothing to its memory
            rule=generation.acceptance,
            verified=strategy.packed,
            layout=layout,
        )

    def scores(self, call: str) -> CallProgram:
        """Return what scores a micro-batch with policy, reference or critic."""
        layout: Layout = getattr(self.layouts, call)
        model = self.model(call)
        passes = self.placed(call).passes()
        batch = shapes.packed_batch(self.config, layout, passes.samples)
        weights = shapes.model_shapes(model, layout)

        def trace(_: int) -> Traced:
            if model.scalar_head:
                return value_packed.trace(weights, batch, layout=layout)
            support = shapes.support_shape(self.config, batch)
            temperature = self.config.generation.temperature
            return score_packed.trace(
                weights, batch, support, temperature=temperature, layout=layout
            )

        return self._scoring(call, "scores", model, trace, passes)

    def rewards(self) -> Iterator[CallProgram]:
        """Yield what scores a micro-batch with each reward model."""
        call = "reward_inference"
        layout = self.layouts.reward_inference
        passes = self.placed(call).passes()
        bucket = self.config.training.length_bucket
        slots = -(-passes.tokens // bucket) * bucket
        for model in dict.fromkeys(self.models.rewards):
            weights = shapes.model_shapes(model, layout)
            tokens, last = shapes.row_shapes(
                lambda: (
                    jnp.zeros((passes.samples, slots), jnp.int32),
                    jnp.zeros(passes.samples, jnp.int32),
                ),
                layout,
            )

            def trace(_: int, weights=weights, tokens=tokens, last=last) -> Traced:
                return read_scores.trace(weights, tokens, last, layout)

            padded = passes._replace(tokens=slots, predicted=1)
            yield self._scoring(call, "rewards", model, trace, padded)

    def _scoring(
        self,
        call: str,
        name: str,
        model: ModelConfig,
        trace: Callable[[int], Traced],
        passes: Passes,
    ) -> CallProgram:
        """Return a program that scores a micro-batch, with what formulas say of it."""
        run = self.run(call)
        layout = run.layout
        held = run.weights(model)
        work = memory.scoring_bytes(run, model, run.batch_rows)
        sharded = ShardedModel(model, layout, self.hardware.platform)
        foreseen = Foreseen(
            held + work,
            forward_flops(model, *passes[1:]),
            forward_traffic(sharded, passes.on_device(layout)).total,
        )
        parts = self.parts(call)
        copies = sum(part.bytes for part in parts if part.name == "models that score")
        beside = memory_parts.total(parts, "always") + copies - held
        return CallProgram(call, name, trace, foreseen, beside, model.num_layers)

    def updates(self, call: str) -> Iterator[CallProgram]:
        """Yield the gradient of a micro-batch and the optimizer's step, of policy or critic."""
        run = self.run(call)
        model = self.model(call)
        training = self.config.training
        passes = self.placed(call).passes(training.minibatches)
        held = run.weights(model, FLOAT32)
        work = sum(part.bytes for part in memory.update_parts(run, model))
        sharded = ShardedModel(model, run.layout, self.hardware.platform)
        traffic = gradient_traffic(sharded, passes.on_device(run.layout), remat=self.remat)
        flops = gradient_flops(model, *passes[1:], remat=self.remat)
        always = self.always(call)
        others = self._waiting(call)
        yield CallProgram(
            call,
            "gradient",
            lambda _: self.trace_gradient(call, passes.samples),
            Foreseen(held + work, flops, traffic.total),
            beside=always - held + others * call.startswith("critic"),
            depth=model.num_layers,
        )
        yield CallProgram(
            call,
            "optimizer's step",
            lambda _: self.trace_step(call),
            # weights, two moments and a gradient; copies of those that are padded
            Foreseen((6 if run.pads(model) else 4) * held),
            beside=always - 3 * held + others,
            depth=model.num_layers,
        )

    def _waiting(self, call: str) -> int:
        """Return the bytes of the other model's gradient, where it lies on a call's devices."""
        other = "policy_training" if call.startswith("critic") else "critic_training"
        own = self.plan.placements[call]
        placed = self.plan.placements.get(other)
        if placed is None or not set(placed.devices) & set(own.devices):
            return 0
        return self.run(other).weights(self.model(other), FLOAT32)

    def trace_gradient(self, call: str, rows: int) -> Traced:
        """Trace the gradient of a later micro-batch: the sum so far is there."""
        settings = TrainingSettings.from_config(self.config, self.layouts, self.remat)
        objective = policy_objective
        if call.startswith("critic"):
            settings = settings.of_critic
            objective = critic_objective
        layout = settings.layout
        weights = shapes.model_shapes(self.model(call), layout, FLOAT32)
        batch = shapes.micro_batch_shapes(self.config, layout, rows)
        how = dict(objective=objective, settings=settings)
        first = jax.eval_shape(functools.partial(accumulate, None, **how), weights, batch)
        total = Gradient(weights, shapes.repeated(first.metrics, layout))
        return accumulate.trace(total, weights, batch, **how)

    def trace_step(self, call: str) -> Traced:
        """Trace the optimizer's step."""
        layout: Layout = getattr(self.layouts, call)
        training = self.config.training
        optimizer = make_optimizer(
            training.learning_rate,
            max_grad_norm=training.max_grad_norm,
            weight_decay=training.weight_decay,
        )
        weights = shapes.model_shapes(self.model(call), layout, FLOAT32)
        moments = jax.eval_shape(optimizer.init, weights)
        moments = shapes.placed(moments, meshes.model_shardings(moments, layout))
        finite = shapes.repeated(jax.ShapeDtypeStruct((), jnp.bool_), layout)
        gradient = Gradient(weights, {})
        return apply.trace(weights, moments, gradient, finite, optimizer=optimizer)
