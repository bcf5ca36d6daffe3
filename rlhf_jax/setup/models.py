"""Load the models of a run to their devices, with optimizers, or make their shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.mesh import FLOAT32, Layout
from rlhf_jax.models.files.source import Source
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.placement.transfer import offload, transfer
from rlhf_jax.setup.run_spec import RunSpec
from rlhf_jax.training.distill import student_of
from rlhf_jax.training.learn import trained
from rlhf_jax.training.optimizer import make_optimizer, scheduled
from rlhf_jax.types import Model, Trained


def load(source: Source, layout: Layout) -> Model:
    """Load weights sharded as in the layout, in its dtype; each device reads its own part."""
    shapes = abstract_weights(source.config, layout.dtype)
    return source.load(layout.dtype, model_shardings(shapes, layout))


def load_idle(source: Source, layout: Layout, config: Config) -> Model:
    """Load a model that only scores, to the memory where it waits between uses."""
    model = load(source, layout)
    return offload(model) if config.mesh.idle_on_host else model


def learning_rates(config: Config) -> dict[str, optax.ScalarOrSchedule]:
    """Return the learning rates, by role, of the models trained on the samples of a step.

    Critics have their own rate if a policy learns, and otherwise the one of training.
    """
    training = config.training
    critic = config.critic
    of_update = training.epochs * training.minibatches
    steps = config.steps * of_update
    rates: dict[str, optax.ScalarOrSchedule] = {}
    of_policy = scheduled(
        training.learning_rate,
        training.warmup_steps,
        training.schedule,
        steps - critic.steps_alone * of_update,
    )
    of_critics = scheduled(critic.learning_rate, critic.warmup_steps, training.schedule, steps)
    if derived.trains(config, "policy"):
        rates["policy"] = of_policy
    else:
        of_critics = of_policy
    return rates | dict.fromkeys(derived.trained_critics(config), of_critics)


def make_optimizers(spec: RunSpec) -> dict[str, optax.GradientTransformation | None]:
    """Make the optimizers by role; None for a frozen model."""
    config = spec.config
    training = config.training
    make = functools.partial(
        make_optimizer, max_grad_norm=training.max_grad_norm, weight_decay=training.weight_decay
    )
    optimizers: dict[str, optax.GradientTransformation | None] = {"policy": None}
    optimizers |= {role: make(rate) for role, rate in learning_rates(config).items()}
    if spec.student is not None:
        rate = config.drafter.learning_rate
        optimizers["drafter"] = (
            make_optimizer(rate, max_grad_norm=training.max_grad_norm) if rate else None
        )
    return optimizers


def initial_models(
    spec: RunSpec, read: Callable[[Source, Layout], Model] = load
) -> dict[str, Trained]:
    """Return the trained models by role, before the first step.

    read: loads weights or makes their shapes; with shapes the models are shapes with shardings.
    """
    layouts = spec.layouts
    optimizers = make_optimizers(spec)

    def master(source: Source, layout: Layout) -> Model:
        return read(source, dataclasses.replace(layout, dtype=FLOAT32))

    models = {}
    if layout := layouts.get("policy_training"):
        models["policy"] = trained(master(spec.policy, layout), optimizers["policy"], layout)
    for role in derived.trained_critics(spec.config):
        training_layout = layouts[f"{role}_training"]
        models[role] = trained(
            master(spec.critic, training_layout), optimizers[role], training_layout, part=critic_of
        )
    if spec.student is not None:
        layout = layouts["policy_training"]
        source = master(spec.drafter, layout) if spec.drafter else models["policy"].weights
        part = functools.partial(student_of, layers=spec.student.num_layers)
        models["drafter"] = trained(source, optimizers["drafter"], layout.unpipelined, part)
    return models


def source_shapes(source: Source, layout: Layout) -> Model:
    """Return the shapes of a source's weights in a layout."""
    return abstract_weights(source.config, layout.dtype)


def critic_of(model: Model) -> Model:
    """Return a reward model unchanged, and a critic on a copy of a language model's layers.

    The zero head of the latter gives every value 0.
    """
    if model.config.scalar_head:
        return model
    config = dataclasses.replace(model.config, scalar_head=True, tied=False)
    head = jnp.zeros((config.width, 1), model.norm.dtype)
    trunk = jax.tree.map(jnp.copy, dataclasses.replace(model, head=None))
    return dataclasses.replace(trunk, head=head, config=config)


def frozen_models(spec: RunSpec) -> dict[str, Model]:
    """Load the frozen models, by role.

    A student is part of the state; if it learns during the run, its initial weights are here.
    """
    config = spec.config
    layouts = spec.layouts
    frozen = {}
    for role in derived.scorers(config):
        if role != "policy" and not derived.trains(config, role):
            source = spec.reference if role == "reference" else spec.critic
            frozen[role] = load_idle(source, layouts[f"{role}_inference"], config)
    if spec.student is None and spec.drafter is not None:
        drafter = load(spec.drafter, layouts["generation"])
        frozen["drafter"] = decoding_weights(drafter, layouts["generation"])
    compares = config.drafter.learning_rate and not derived.makes_drafter(config)
    if compares and spec.student is not None:
        layout = layouts["policy_training"].unpipelined
        source = load(spec.drafter or spec.policy, layout)
        frozen["student"] = transfer(student_of(source, spec.student.num_layers), layout)
    return frozen
