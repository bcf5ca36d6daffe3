"""Programs of a config's calls, compiled for the devices of a target."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting, rows, scheduler
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED
from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.memory import estimate
from rlhf_jax.mesh import Layout
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.planner.shapes import model_shapes, packed_zeros, placed, row_shapes
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.setup.models import critic_of
from rlhf_jax.training.gradients import Gradient, accumulate
from rlhf_jax.training.kinds import Loss
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model, ModelConfig, ModelConfigs


class Target(NamedTuple):
    """A config, and what it is compiled for."""

    config: Config
    models: ModelConfigs
    layout: Layout

    @property
    def generation(self) -> Layout:
        """The same devices in the other role."""
        return dataclasses.replace(self.layout, role="generation")


def master(layout: Layout) -> Layout:
    """The layout of the weights that are trained."""
    return dataclasses.replace(layout, dtype=jnp.dtype(jnp.float32))


def replicated(layout: Layout) -> NamedSharding:
    """Whole on every device."""
    assert layout.mesh is not None
    return NamedSharding(layout.mesh, PartitionSpec())


def critic_weights(model: ModelConfig, layout: Layout) -> Model:
    """Shapes of the critic, which is a reward model or has a policy's trunk."""
    made = model_shapes(model, master(layout))
    shapes = made if model.scalar_head else jax.eval_shape(critic_of, made)
    return placed(shapes, model_shardings(shapes, layout))


def packed_of(at: Target) -> PackedSequences:
    """A packed batch of as many tokens as a micro-batch may have."""
    return packed_zeros(at.config, at.layout, at.config.training.microbatch_rows, ())


def micro_batch(at: Target) -> PackedSequences:
    """One micro-batch of zeros."""
    packed = packed_of(at)
    of_token = ["weights", "advantages", "sampled_logprobs", "logprobs", "reference_logprobs"]
    of_token += ["values", "returns"] if at.models.critics else []
    of_batch = ("total_tokens", "total_sequences", "total_groups", "kl_weight")
    columns = dict.fromkeys(of_token, jnp.zeros(packed.mask.shape))
    return packed.with_columns(**columns, **dict.fromkeys(of_batch, jnp.zeros(())))


def gradient_program(at: Target, model: Model, loss: Loss):
    """A later micro-batch of a minibatch: the sum so far is there."""
    training = at.config.training
    batch = row_shapes(lambda: micro_batch(at), at.layout)
    settings = TrainingSettings(
        microbatch_rows=training.microbatch_rows, layout=at.layout, remat=training.remat != "off"
    )
    options = dict(loss=loss, settings=settings)
    metrics = jax.eval_shape(functools.partial(accumulate, None, **options), model, batch).metrics
    metrics = placed(metrics, jax.tree.map(lambda _: replicated(at.layout), metrics))
    return accumulate.lower(Gradient(model, metrics), model, batch, **options).compile()


def round_program(at: Target):
    """A round of generation with all rows and caches."""
    config = at.config
    generation = at.config.generation
    longest = config.data.max_prompt_tokens + generation.max_new_tokens
    choices = drafting.strategies(config)
    strategy = choices.strategies[
        choices.nodes.tolist().index(estimate.most_nodes(config, at.layout))
    ]
    cache_length = scheduler.cache_length_for(longest, choices.strategies, at.generation)
    earlier = longest if "replay" in choices.drafters else 0
    empty = functools.partial(
        rows.empty, at.models.policy, at.models.drafter, generation.max_rows, cache_length
    )
    state = row_shapes(
        lambda: empty(generation.history_tokens, earlier, at.generation), at.generation
    )
    nodes = tree.as_data(strategy, generation.max_rows)
    nodes = placed(nodes, jax.tree.map(lambda _: replicated(at.layout), nodes))
    drafts = row_shapes(
        lambda: jnp.zeros((generation.max_rows, tree.bucket(strategy) - 1), jnp.int32),
        at.generation,
    )
    policy = model_shapes(at.models.policy, at.generation)
    options = dict(truncation=UNTRUNCATED, stop_tokens=(0,), layout=at.generation)
    return run_round.lower(policy, state, drafts, None, nodes, **options).compile()


def score_program(at: Target, model: Model):
    """Log-probs of a packed batch under the policy."""
    half = placed(model_shapes(at.models.policy, at.layout), model_shardings(model, at.layout))
    batch = row_shapes(lambda: packed_of(at), at.layout)
    return score_packed.lower(half, batch, temperature=1.0, layout=at.layout).compile()
