"""From a run specification to a run: load models, start rewards, build settings and host state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.identity import plan_name
from rlhf_jax.config.schema import Config
from rlhf_jax.data.batches import Batches, PromptStream
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation import drafting
from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.capability import DynamicSampling
from rlhf_jax.generation.history import History
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.reallocation import planner
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.stage import GenerationSettings
from rlhf_jax.generation.strategy import cost
from rlhf_jax.generation.strategy.roofline import RATES, ModelWork
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.losses.kl import adapt_kl
from rlhf_jax.mesh import AXES, Layout
from rlhf_jax.placement.plan import training_layout
from rlhf_jax.rewards.combination import EagerScorer, Scorer, Term, weighted
from rlhf_jax.rewards.learned import LearnedReward
from rlhf_jax.rewards.models import PreferenceModel, RewardModel, model_scorer, preference_scorer
from rlhf_jax.rewards.samples import Rewards, penalise_and_clip, shared_out
from rlhf_jax.rewards.sources import source_of, term_names
from rlhf_jax.run import EvaluationSettings, Run
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.compilation import Programs
from rlhf_jax.setup.models import frozen_models, learning_rates, load_idle, make_optimizers
from rlhf_jax.setup.run_spec import RunSpec
from rlhf_jax.sources.ahead import RolloutsAhead
from rlhf_jax.sources.drawn import SampleSource
from rlhf_jax.sources.given import GivenSamples, sequences_of
from rlhf_jax.sources.rollouts import Rollouts
from rlhf_jax.state import GenerationState, HostState, SpeculationState, remembered
from rlhf_jax.training.distill import DISTILLATION, Distillation
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Model

# Combined with the seed by exclusive or: keeps evaluation's noise apart from training's.
EVALUATION_SEED = 1 << 31
# Tokens kept of each held-out prompt: its last samples are the drafts of the next ones.
ALL_TOKENS = 1 << 40


def make_run(
    spec: RunSpec,
    stack: contextlib.ExitStack,
    alive: Callable[[], None],
    programs: Programs,
    remat: bool,
) -> Run:
    """Load the frozen models, start the rewards, and build all constants of the run.

    programs: for background compilation. remat: as the run began with. The stack ends the reward's
    processes; `alive` is called as they work.
    """
    config = spec.config
    frozen = frozen_models(spec)
    lanes = spec.plan.lanes()
    scoring = ScoringSettings.from_config(config, spec.layouts)
    stream = PromptStream(spec.prompts, _batches(spec))
    generation = None
    evaluation = None
    held_out = None
    source: SampleSource
    if spec.given:
        length = derived.text_tokens(config)
        source = GivenSamples(stream, spec.given, length, spec.policy.tokenizer)
        if spec.held_out is not None:
            every = np.arange(len(spec.held_out))
            held_out = sequences_of(spec.held_out, spec.held_out_given, every, length)
    else:
        generation = _generation_settings(spec, programs)
        rewards = _rewards(spec, stack, alive)
        reward_lanes = lanes.of_call.get("reward_inference", ())
        kind = Rollouts
        if config.training.lag:
            kind = functools.partial(RolloutsAhead, steps=config.steps)
        source = kind(stream, generation, rewards, scoring, frozen, reward_lanes)
        if spec.held_out is not None:
            decoding = generation.decoding
            evaluation = _evaluation(spec, spec.held_out, decoding, rewards, stack, alive)
    return Run(
        config=config,
        source=source,
        generation=generation,
        scoring=scoring,
        learners=_learners(spec, remat),
        frozen=frozen,
        lanes=lanes,
        next_kl_coefficient=functools.partial(
            adapt_kl, target=config.kl.target, horizon=config.kl.horizon
        ),
        distillation=_distillation(spec, remat, frozen.get("student")),
        evaluation=evaluation,
        held_out=held_out,
    )


def _evaluation(
    spec: RunSpec,
    held_out: Prompts,
    decoding: GenerationConfig,
    rewards: Rewards,
    stack: contextlib.ExitStack,
    alive: Callable[[], None],
) -> EvaluationSettings:
    """Start the measures of held-out texts: the reward, and metrics that are never trained on."""
    config = spec.config
    measures: dict[str, Scorer] = {}
    for name, metric in config.reward.metrics.items():
        scorer = source_of(metric).open(metric, config, alive)
        measures[name] = shared_out(stack.enter_context(scorer))
    settings = config.evaluation
    return EvaluationSettings(
        prompts=held_out,
        tokenizer=spec.policy.tokenizer,
        decoding=dataclasses.replace(
            decoding,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
            seed=config.seed ^ EVALUATION_SEED,
        ),
        samples_per_prompt=settings.samples_per_prompt,
        rewards=rewards,
        measures=measures,
    )


def _rewards(spec: RunSpec, stack: contextlib.ExitStack, alive: Callable[[], None]) -> Rewards:
    """Start the terms of the reward: sources such as functions, models on their devices."""
    config = spec.config
    layout = spec.layouts.get("reward_inference", spec.layouts["policy_training"])
    reward = config.reward
    names = term_names(config)
    rows = derived.microbatch_rows(config)
    bucket = config.training.length_bucket
    loaded = [(source, load_idle(source, layout, config)) for source in spec.rewards]
    count = len(reward.models)
    readers = [RewardModel(source, model, rows, bucket) for source, model in loaded[:count]]
    judges = [PreferenceModel(source, model, rows, bucket) for source, model in loaded[count:]]
    models = dict(zip(names[len(reward.functions) :], readers, strict=False))
    functions = [
        stack.enter_context(source_of(function).open(function, config, alive))
        for function in reward.functions
    ]
    by_name = dict(zip(names, functions, strict=False))
    eager = {name: own for name, own in by_name.items() if isinstance(own, EagerScorer)}
    read = [model_scorer(model, layout) for model in readers]
    compared = [preference_scorer(model, layout) for model in judges]
    scorers = [*map(shared_out, functions), *read, *compared]
    weights = map(float, reward.weights or (1.0,) * len(scorers))
    terms = [*itertools.starmap(Term, zip(names, weights, scorers, strict=True))]
    function = functools.partial(weighted, terms) if terms else None
    learned = None
    if reward.labels:
        ((name, model),) = models.items()
        labels = stack.enter_context(source_of(reward.labels).open(reward.labels, config, alive))
        learned = LearnedReward(
            name, model, shared_out(labels), reward.label_choice, config.seed, layout
        )
    clip = functools.partial(penalise_and_clip, missing_end=reward.missing_end, clip=reward.clip)
    return Rewards(
        function,
        spec.policy.tokenizer,
        clip,
        models,
        learned,
        eager,
        failed=reward.failed if reward.on_failure == "value" else None,
        max_failed=reward.max_failed,
    )


def _batches(spec: RunSpec) -> Batches:
    """Make the order of the prompts."""
    config = spec.config
    count = len(spec.prompts)
    sizes = spec.sizes if config.data.shares else (count,)
    shares = config.data.shares or (1.0,)
    return Batches(count, derived.prompts(config), config.seed, sizes, tuple(map(float, shares)))


def _generation_settings(spec: RunSpec, programs: Programs) -> GenerationSettings:
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
            if not derived.compares_pairs(call, model)  # which waits for all responses
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
        dynamic=DynamicSampling.from_config(config),
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


def _learners(spec: RunSpec, remat: bool) -> dict[str, Learner]:
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


def _distillation(spec: RunSpec, remat: bool, frozen: Model | None) -> Distillation | None:
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


def initial_host_state(spec: RunSpec) -> HostState:
    """Return the host state before the first step."""
    config = spec.config
    devices = training_layout(spec.layouts).devices
    where = f"{devices.shape} of {devices.flat[0].device_kind}"
    return HostState(
        step=0,
        position=_batches(spec).start,
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
