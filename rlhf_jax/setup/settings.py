"""Build the settings of each stage from a run specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.identity import plan_name
from rlhf_jax.config.schema import Config
from rlhf_jax.data.batches import Batches
from rlhf_jax.generation import drafting
from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.history import History
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.reallocation import planner
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.generation.strategy import cost
from rlhf_jax.generation.strategy.roofline import RATES, ModelWork
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.losses import kl
from rlhf_jax.mesh import AXES, Layout
from rlhf_jax.placement.plan import training_layout
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.compilation import Programs
from rlhf_jax.setup.models import learning_rates, make_optimizers
from rlhf_jax.setup.run_spec import RunSpec
from rlhf_jax.state import GenerationState, HostState, SpeculationState, remembered
from rlhf_jax.training.distill import DISTILLATION, Distillation
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model

# Tokens kept of each held-out prompt: its last samples are the drafts of the next ones.
ALL_TOKENS = 1 << 40


def batches(spec: RunSpec) -> Batches:
    """Make the order of the prompts."""
    config = spec.config
    count = len(spec.prompts)
    sizes = spec.sizes if config.data.shares else (count,)
    shares = config.data.shares or (1.0,)
    return Batches(count, derived.prompts(config), config.seed, sizes, tuple(map(float, shares)))


def generation_settings(spec: RunSpec, programs: Programs) -> GenerationSettings:
    """Build the settings of generation; rounds are compiled among the run's programs.

    Background compilation depends on the clock, as does an assignment by several processes: a
    deterministic run does without them.
    """
    config = spec.config
    generation = config.generation
    layout = spec.layouts["generation"]
    compiler = None
    if derived.adaptive(config) and not config.deterministic:
        compiler = BackgroundCompiler(programs)
    scoring_seconds = 0.0
    if generation.fuse_inference:
        # The seconds that a slice takes to score a token under all models.
        models = [
            model
            for call in derived.calls(config)
            for model in spec.models.scorers([call])
            if call != "reward_inference" or model.scalar_head  # others compare, all at once
        ]
        flops = sum(ModelWork.of(model, layout.dtype.itemsize).token_flops for model in models)
        devices = layout.extent(AXES) / layout.slices
        scoring_seconds = flops / (RATES[layout.platform][1] * devices)
    by_clock = config.deterministic and distributed.started()
    planned = generation.reallocate and layout.slices > 1 and not by_clock
    return GenerationSettings(
        decoding=_decoding(spec),
        layout=layout,
        prompts_per_step=generation.prompts_per_step,
        samples_per_prompt=generation.samples_per_prompt,
        max_new_tokens=generation.max_new_tokens,
        temperatures=algorithm_of(config).temperatures(config),
        resample=generation.resample,
        repeated_noise=generation.repeated_noise,
        compiler=compiler,
        plan_reallocation=planner.plan_reallocation if planned else None,
        in_turn=config.deterministic,
        scoring_seconds=scoring_seconds,
    )


def _decoding(spec: RunSpec) -> GenerationConfig:
    """Build the options of one call of `generate`."""
    strategies = drafting.strategies(spec.config).strategies
    policy = spec.policy
    return GenerationConfig.from_config(
        spec.config, strategies, policy.stop_tokens, policy.tokenizer.decode_whole
    )


def learners(spec: RunSpec, remat: bool) -> dict[str, Learner]:
    """Build the learners of a step by role."""
    optimizers = make_optimizers(spec)
    rates = learning_rates(spec.config)
    by_role = {}
    for role, loss in algorithm_of(spec.config).losses.items():
        optimizer = optimizers[role]
        if role == "drafter" or optimizer is None:  # `distillation` has a student's
            continue
        layout = spec.layouts[f"{role}_training"]
        settings = TrainingSettings.from_config(spec.config, layout, remat)
        waits = spec.config.critic.steps_alone if role == "policy" else 0
        by_role[role] = Learner(role, loss, optimizer, settings, waits, rates[role])
    return by_role


def distillation(spec: RunSpec, remat: bool, frozen: Model | None) -> Distillation | None:
    """Build the distillation of a student that began as `frozen`; None if there is none."""
    optimizer = make_optimizers(spec).get("drafter")
    if optimizer is None:
        return None
    settings = student_settings(spec.config, spec.layouts["policy_training"], remat)
    learner = Learner("drafter", DISTILLATION, optimizer, settings)
    samples = derived.student_samples(spec.config)
    return Distillation(learner, samples, frozen, alone=derived.makes_drafter(spec.config))


def student_settings(config: Config, layout: Layout, remat: bool) -> TrainingSettings:
    """Build the settings of a student's training next to the policy's.

    A student that is the run's result learns as often as training sets; one that drafts for the
    policy learns once.
    """
    settings = TrainingSettings.from_config(config, layout.unpipelined, remat)
    if derived.makes_drafter(config):
        return settings
    rows = min(derived.student_samples(config), settings.microbatch_rows)
    return dataclasses.replace(settings, epochs=1, minibatches=1, microbatch_rows=rows)


def kl_controller(config: Config) -> Callable[[float, float, int], float]:
    """Return the controller that steers the KL coefficient to the target, if there is one."""
    if not config.kl.target:
        return lambda coefficient, divergence, samples: coefficient
    return lambda coefficient, divergence, samples: kl.adapt_kl(
        coefficient, divergence, config.kl.target, samples, config.kl.horizon
    )


def initial_host_state(spec: RunSpec) -> HostState:
    """Return the host state before the first step."""
    config = spec.config
    devices = training_layout(spec.layouts).devices
    where = f"{devices.shape} of {devices.flat[0].device_kind}"
    return HostState(
        step=0,
        position=batches(spec).start,
        generation=_generation_state(spec) if derived.generates(config) else None,
        kl_start=config.kl.coefficient,
        kl_coefficient=config.kl.coefficient,
        remat=spec.remat,
        remat_devices=where if config.training.remat == "auto" else "",
        plan=plan_name(config),
    )


def _generation_state(spec: RunSpec) -> GenerationState:
    """Return the initial state of generation.

    It keeps earlier responses for look-up, or for replay of samples that repeat noise.
    """
    generation = spec.config.generation
    replayed = generation.repeated_noise * (generation.max_new_tokens + 1)
    kept = History(max(generation.history_tokens, replayed))
    evaluated = History(ALL_TOKENS if drafting.replays(spec.config) else 0)
    return GenerationState(
        SpeculationState(kept, _selector(spec)), SpeculationState(evaluated, _selector(spec))
    )


def restored_host_state(spec: RunSpec, step: int, document: dict[str, Any]) -> HostState:
    """Return the host state after a step, restored from its `document`.

    Prefetched samples are dropped if the config has changed and wants none or another number.
    """
    config = spec.config
    host = initial_host_state(spec).restored(step, document)
    kept = document.get("ahead")
    generation = config.generation
    sizes = (generation.prompts_per_step, generation.samples_per_prompt)
    if not (kept and config.training.lag):
        return host
    prompts = len(kept["rows"])
    if (prompts, len(kept["ids"]) // prompts) != sizes:
        return host
    ahead = SamplesAhead.restore(kept, spec.prompts, generation.max_new_tokens)
    return dataclasses.replace(host, generation=dataclasses.replace(remembered(host), ahead=ahead))


def _selector(spec: RunSpec) -> Selector | None:
    """Make the selector of strategies, if the strategy is adaptive."""
    config = spec.config
    if not derived.adaptive(config):
        return None
    decoding = _decoding(spec)
    costs = cost.prior_of_models(
        spec.models,
        spec.layouts["generation"].platform,
        spec.layouts["generation"].dtype.itemsize,
        {},
        decoding.max_rows,
        decoding.max_length,
    )
    return Selector(drafting.strategies(config), costs, frozen_costs=config.deterministic)
