"""The models of a run: loaded where they lie, with optimizers, or as shapes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from rlhf_jax import mesh as meshes
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.values import critic_of
from rlhf_jax.mesh import FLOAT32, Layout
from rlhf_jax.model import transformer
from rlhf_jax.model.decoding import decoding_weights
from rlhf_jax.model.weights.source import Source
from rlhf_jax.placement.idle import put_aside
from rlhf_jax.placement.transfer import transfer
from rlhf_jax.setup.opened import Opened
from rlhf_jax.state import FrozenModels
from rlhf_jax.training.distill import student_of, with_student
from rlhf_jax.training.optimizer import Optimizers, make_optimizer
from rlhf_jax.training.update import init_train_state
from rlhf_jax.types import Model, ModelConfig, TrainState


def load(source: Source, layout: Layout) -> Model:
    """Load weights as the layout splits them, in its dtype, each device reading its own part."""
    shapes = weight_shapes(source.config, layout.dtype)
    return source.load(layout.dtype, meshes.model_shardings(shapes, layout))


def load_idle(source: Source, layout: Layout, config: Config) -> Model:
    """Load a model that only scores, to where it waits until it does."""
    model = load(source, layout)
    return put_aside(model) if config.mesh.idle_on_host else model


def weight_shapes(config: ModelConfig, dtype: DTypeLike) -> Model:
    """Return the shapes and dtypes of a model, layers stacked."""
    return jax.eval_shape(lambda: transformer.init(jax.random.key(0), config, dtype))


def make_optimizers(opened: Opened) -> Optimizers:
    """Make the policy's, and the critic's where there is one.

    A policy that stays as it is has no moments.
    """
    if not opened.objective.trains_policy:
        return Optimizers(policy=optax.identity())
    training = opened.config.training
    critic = opened.config.critic
    of_update = training.epochs * training.minibatches
    make = functools.partial(
        make_optimizer,
        schedule=training.schedule,
        max_grad_norm=training.max_grad_norm,
        weight_decay=training.weight_decay,
    )
    steps = opened.config.steps * of_update
    policy = make(
        training.learning_rate,
        warmup_steps=training.warmup_steps,
        steps=steps - critic.steps_alone * of_update,
    )
    if opened.critic is None:
        return Optimizers(policy)
    own = make(critic.learning_rate, warmup_steps=critic.warmup_steps, steps=steps)
    return Optimizers(policy, own)


def student_optimizer(opened: Opened) -> optax.GradientTransformation | None:
    """Make the student's; None where there is no student, or it stays as it is."""
    rate = opened.config.drafter.learning_rate
    if not (opened.student and rate):
        return None
    return make_optimizer(rate, max_grad_norm=opened.config.training.max_grad_norm)


def initial_state(opened: Opened) -> TrainState:
    """Load the state before the first step."""
    layout = opened.layouts.policy_training
    critic_layout = opened.layouts.critic_training

    def master(source: Source, layout: Layout = layout) -> Model:
        return load(source, dataclasses.replace(layout, dtype=FLOAT32))

    critic = opened.critic and _critic(master(opened.critic, critic_layout))
    optimizers = make_optimizers(opened)
    policy = master(opened.policy)
    state = init_train_state(policy, optimizers, layout, critic, critic_layout)
    if opened.student is None:
        return state
    source = master(opened.drafter) if opened.drafter else state.policy
    layers = opened.student.num_layers
    return with_student(state, source, layers, student_optimizer(opened), layout.unpipelined)


def state_template(opened: Opened) -> TrainState:
    """Return shapes and places of the state, for one that is restored."""
    key = jax.random.key(0)
    student = opened.student

    def make() -> TrainState:
        policy = transformer.init(key, opened.policy.config, jnp.float32)
        critic = opened.critic
        critic = critic and _critic(transformer.init(key, critic.config, jnp.float32))
        state = init_train_state(policy, make_optimizers(opened), critic=critic)
        if student is None:
            return state
        optimizer = student_optimizer(opened)
        return with_student(state, state.policy, student.num_layers, optimizer)

    shapes = jax.eval_shape(make)
    layouts = opened.layouts
    layout = layouts.policy_training
    places = meshes.model_shardings(shapes, layout)
    places = dataclasses.replace(places, step=meshes.for_all_to_read(layout))
    if shapes.drafter is not None:
        of_student = (shapes.drafter, shapes.drafter_optimizer)
        own, moments = meshes.model_shardings(of_student, layout.unpipelined)
        places = dataclasses.replace(places, drafter=own, drafter_optimizer=moments)
    if shapes.critic is not None:
        of_critic = (shapes.critic, shapes.critic_optimizer)
        critic, moments = meshes.model_shardings(of_critic, layouts.critic_training)
        places = dataclasses.replace(places, critic=critic, critic_optimizer=moments)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places
    )


def _critic(model: Model) -> Model:
    """Return a reward model as it is, and of a language model the trunk."""
    return model if model.config.scalar_head else critic_of(model)


def frozen_models(opened: Opened) -> FrozenModels:
    """Load the models that are not trained.

    A student is part of the state; where one is kept current, it is here as it began.
    """
    config = opened.config
    layouts = opened.layouts
    reference = None
    if derived.needs_reference(config):
        reference = load_idle(opened.policy, layouts.reference_inference, config)
    if opened.student is None:
        if opened.drafter is None:
            return FrozenModels(reference)
        drafter = decoding_weights(load(opened.drafter, layouts.generation), layouts.generation)
        return FrozenModels(reference, drafter)

    if opened.objective.distills or not config.drafter.learning_rate:
        return FrozenModels(reference)
    layout = layouts.policy_training.unpipelined
    source = load(opened.drafter or opened.policy, layout)
    student = student_of(source, opened.student.num_layers)
    return FrozenModels(reference, student=transfer(student, layout))
