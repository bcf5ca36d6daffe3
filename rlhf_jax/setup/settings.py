"""Settings of each stage, from what is opened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from rlhf_jax.algorithms.policy_gradient import CRITIC_LOSS, POLICY_LOSS
from rlhf_jax.config import derived
from rlhf_jax.config.identity import plan_name
from rlhf_jax.config.objectives import objective_of
from rlhf_jax.config.schema import Config
from rlhf_jax.data.batches import Batches
from rlhf_jax.generation.ahead import restore_samples
from rlhf_jax.generation.history import History
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.generation.strategy import prior
from rlhf_jax.generation.strategy.roofline import RATES
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.losses import kl
from rlhf_jax.mesh import AXES
from rlhf_jax.placement.plan import CallLayouts
from rlhf_jax.reallocation import planner
from rlhf_jax.runtime import distributed
from rlhf_jax.setup.models import make_optimizers
from rlhf_jax.setup.opened import Opened
from rlhf_jax.state import HostState, SpeculationState
from rlhf_jax.training.distill import DISTILLATION, Distillation
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.settings import TrainingSettings

# Tokens that are remembered of each held-out prompt: its last samples are the next one's drafts.
ALL_TOKENS = 1 << 40


def batches(opened: Opened) -> Batches:
    """Make the order of the prompts."""
    config = opened.config
    return Batches(len(opened.prompts), config.generation.prompts_per_step, config.seed)


def generation_settings(opened: Opened, stack: contextlib.ExitStack) -> GenerationSettings:
    """Settle how a run generates; what compiles in the background is ended by the stack.

    What is compiled at which time depends on the clock, as does a plan of several processes: a run
    that is to repeat itself does without them.
    """
    config = opened.config
    generation = config.generation
    layout = opened.layouts.generation
    compiler = None
    if derived.adaptive(config) and not config.deterministic:
        compiler = BackgroundCompiler()
        stack.callback(compiler.close)
    scoring_seconds = 0.0
    if generation.fuse_inference:
        # The time in which a slice scores a token under all models.
        referred = [opened.policy.config] if derived.needs_reference(config) else []
        critic = [opened.models.critic] if opened.models.critic else []
        scored = [opened.policy.config] if derived.needs_old_logprobs(config) else []
        models = [*scored, *referred, *critic, *opened.models.rewards]
        flops = sum(prior.work(model, layout.dtype.itemsize).token_flops for model in models)
        devices = layout.extent(AXES) / layout.slices
        scoring_seconds = flops / (RATES[layout.platform][1] * devices)
    by_clock = config.deterministic and distributed.started()
    planned = generation.reallocate and layout.slices > 1 and not by_clock
    return GenerationSettings(
        decoding=_decoding(opened),
        layout=layout,
        prompts_per_step=generation.prompts_per_step,
        samples_per_prompt=generation.samples_per_prompt,
        max_new_tokens=generation.max_new_tokens,
        resample=generation.resample,
        repeated_noise=generation.repeated_noise,
        compiler=compiler,
        plan_reallocation=planner.plan_reallocation if planned else None,
        in_turn=config.deterministic,
        scoring_seconds=scoring_seconds,
    )


def _decoding(opened: Opened) -> GenerationConfig:
    """Settle what one call of `generate` does."""
    strategies = derived.strategies(opened.config).strategies
    policy = opened.policy
    return GenerationConfig.from_config(
        opened.config, strategies, policy.stop_tokens, policy.tokenizer.decode_whole
    )


def learners(opened: Opened, remat: bool) -> dict[str, Learner]:
    """Settle what is trained on the samples of a step, and how, by role."""
    optimizers = make_optimizers(opened)
    settings = TrainingSettings.from_config(opened.config, opened.layouts, remat)
    found = {}
    if optimizer := optimizers["policy"]:
        waits = opened.config.critic.steps_alone
        found["policy"] = Learner("policy", POLICY_LOSS, optimizer, settings, waits)
    if optimizer := optimizers.get("critic"):
        found["critic"] = Learner("critic", CRITIC_LOSS, optimizer, settings.of_critic)
    return found


def distillation(opened: Opened, remat: bool) -> Distillation | None:
    """Settle how a student learns; None where none does."""
    optimizer = make_optimizers(opened).get("drafter")
    if optimizer is None:
        return None
    settings = student_settings(opened.config, opened.layouts, remat)
    learner = Learner("drafter", DISTILLATION, optimizer, settings)
    return Distillation(learner, derived.student_samples(opened.config))


def student_settings(config: Config, layouts: CallLayouts, remat: bool) -> TrainingSettings:
    """Settle with what settings a student learns.

    One made for later learns as often as training says; one that is kept current beside the policy
    learns once.
    """
    settings = TrainingSettings.from_config(config, layouts, remat)
    settings = dataclasses.replace(settings, layout=settings.layout.unpipelined)
    if objective_of(config).distills:
        return settings
    rows = min(derived.student_samples(config), settings.microbatch_rows)
    return dataclasses.replace(settings, epochs=1, minibatches=1, microbatch_rows=rows)


def kl_controller(config: Config) -> Callable[[float, float, int], float]:
    """Steer the KL coefficient to the target, where there is one."""
    if not config.kl.target:
        return lambda coefficient, divergence, samples: coefficient
    return lambda coefficient, divergence, samples: kl.adapt_kl(
        coefficient, divergence, config.kl.target, samples, config.kl.horizon
    )


def initial_host_state(opened: Opened) -> HostState:
    """Return what the host remembers before the first step.

    Of earlier responses it keeps what look-ups read, or what samples that repeat noise replay.
    """
    config = opened.config
    generation = config.generation
    replayed = generation.repeated_noise * (generation.max_new_tokens + 1)
    evaluated = ALL_TOKENS if derived.replays(config) else 0
    devices = opened.layouts.policy_training.devices
    where = f"{devices.shape} of {devices.flat[0].device_kind}"
    return HostState(
        step=0,
        position=batches(opened).state(),
        training=SpeculationState(
            History(max(generation.history_tokens, replayed)), _selector(opened)
        ),
        evaluation=SpeculationState(History(evaluated), _selector(opened)),
        kl_start=config.kl.coefficient,
        kl_coefficient=config.kl.coefficient,
        remat=opened.remat,
        remat_devices=where if config.training.remat == "auto" else "",
        plan=plan_name(config),
    )


def restored_host_state(opened: Opened, step: int, document: dict[str, Any]) -> HostState:
    """Return what the host remembered after so many steps, when `document` was made.

    Samples that were drawn ahead are left out where the config has changed, and wants none or
    another number.
    """
    config = opened.config
    host = initial_host_state(opened).restored(step, document)
    kept = document.get("ahead")
    generation = config.generation
    asked = (generation.prompts_per_step, generation.samples_per_prompt)
    if not (kept and config.training.lag):
        return host
    prompts = len(kept["rows"])
    if (prompts, len(kept["ids"]) // prompts) != asked:
        return host
    ahead = restore_samples(kept, opened.prompts, generation.max_new_tokens)
    return dataclasses.replace(host, ahead=ahead)


def _selector(opened: Opened) -> Selector | None:
    """Make what chooses strategies, where that is left open."""
    config = opened.config
    if not derived.adaptive(config):
        return None
    decoding = _decoding(opened)
    costs = prior.costs(
        opened.models,
        opened.layouts.generation.platform,
        opened.layouts.generation.dtype.itemsize,
        {},
        decoding.max_rows,
        decoding.max_length,
    )
    return Selector(derived.strategies(config), costs, frozen_costs=config.deterministic)
