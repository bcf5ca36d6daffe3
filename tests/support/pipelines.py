"""Policy and critic as pipelines, micro-batches to learn from, and a schedule of before."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiences import CONFIG, KL_WEIGHT, random_critic, random_experience
from learning import Optimizers, learners_of, new_models

from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.pipeline.problem import FORWARD, Pipe, PipelineProblem
from rlhf_jax.pipeline.queues import Queue
from rlhf_jax.pipeline.schedule import Schedule, one_after_the_other
from rlhf_jax.placement.plan import CallLayouts, Placement, Plan
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import pack
from rlhf_jax.training.gradients import Learner
from rlhf_jax.types import Model, Models

ROWS = dataclasses.replace(CONFIG, microbatch_rows=2)
SMALL_STEPS = Optimizers(optax.sgd(0.05), optax.sgd(0.05))


class Case(NamedTuple):
    """Policy and critic as pipelines, and the micro-batches that they learn from."""

    learners: list[Learner]
    models: list[Model]
    batches: list[list[PackedSequences]]


def layouts_of(
    stages: int, fsdp: int = 1, tensor: int = 1, copies: int = 1, critic_copies: int = 1
) -> CallLayouts:
    """The layouts of a run whose training is pipelined.

    critic_copies: of the critic's pipeline for each of the policy's, each of fewer stages.
    """
    count = stages * copies * fsdp * tensor
    placed = Placement(0, count, slices=stages, data=copies, fsdp=fsdp, tensor=tensor)
    trained = dataclasses.replace(placed, pipelined=True)
    shallower = {"slices": stages // critic_copies, "data": copies * critic_copies}
    critic = dataclasses.replace(trained, **shallower)
    calls = {"generation": placed, "policy_training": trained, "critic_training": critic}
    return Plan(count, calls).layouts(jax.devices()[:count])


def models_of(config) -> tuple[Model, Model, Sequences]:
    """A policy, a critic, and what they learn from."""
    policy = init(jax.random.key(0), config)
    critic = random_critic(config)
    return policy, critic, random_experience(policy, critic).on_host()


def new_state(policy: Model, critic: Model, layouts: CallLayouts | None) -> Models:
    """A state of copies, which lies as the layouts say."""
    policy, critic = jax.tree.map(jnp.copy, (policy, critic))
    where = (layouts["policy_training"], layouts["critic_training"]) if layouts else ()
    if not where:
        return new_models(policy, SMALL_STEPS, critic=critic)
    layout, of_critic = where
    policy = jax.device_put(policy, model_shardings(policy, layout))
    critic = jax.device_put(critic, model_shardings(critic, of_critic))
    return new_models(policy, SMALL_STEPS, layout, critic, of_critic)


def case_of(policy: Model, critic: Model, experience: Sequences, layouts: CallLayouts) -> Case:
    layout, of_critic = layouts["policy_training"], layouts["critic_training"]
    settings = dataclasses.replace(ROWS, layout=layout)
    learners = list(learners_of(SMALL_STEPS, settings, of_critic).values())
    models = [one.weights for one in new_state(policy, critic, layouts).values()]
    weights = settings.aggregate(np.asarray(experience.mask), settings.max_new_tokens)
    known = with_shares(experience.with_columns(kl_weight=np.array(KL_WEIGHT, np.float32)), weights)
    batches = []
    for own in (layout, of_critic):
        rows = (settings.extent, 16, own.row_shards)
        batches.append([part.batch for part in pack(known, *rows)])
        assert len(batches[-1]) > 1
    return Case(learners, models, batches)


def gpipe(problem: PipelineProblem) -> Schedule:
    """The pipes one after the other, each with all its forwards first (GPipe, 2019)."""

    def slot(pipe: Pipe, queue: Queue, index: int) -> int:
        if queue.kind == FORWARD:
            return queue.stage + index
        return 2 * (pipe.stages - 1) + pipe.micro_batches - queue.stage + index

    return one_after_the_other(problem, slot)
