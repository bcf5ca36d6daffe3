"""From a run specification to a run: load models, start rewards, build settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.data.batches import PromptStream
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.rewards.combination import EagerScorer, Scorer, Term, weighted
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.rewards.preferences import PreferenceModel, preference_scorer
from rlhf_jax.rewards.samples import Rewards, penalise_and_clip
from rlhf_jax.rewards.sharing import shared_out
from rlhf_jax.rewards.sources import source_of, term_names
from rlhf_jax.run import EvaluationSettings, Run
from rlhf_jax.runtime.compilation import Programs
from rlhf_jax.setup import settings
from rlhf_jax.setup.models import frozen_models, load_idle
from rlhf_jax.setup.run_spec import RunSpec
from rlhf_jax.sources.ahead import RolloutsAhead
from rlhf_jax.sources.drawn import SampleSource
from rlhf_jax.sources.given import GivenSamples, sequences_of
from rlhf_jax.sources.rollouts import Rollouts

# Combined with the seed by exclusive or: keeps evaluation's noise apart from training's.
EVALUATION_SEED = 1 << 31


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
    stream = PromptStream(spec.prompts, settings.batches(spec))
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
        generation = settings.generation_settings(spec, programs)
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
        learners=settings.learners(spec, remat),
        frozen=frozen,
        lanes=lanes,
        next_kl_coefficient=settings.kl_controller(config),
        distillation=settings.distillation(spec, remat, frozen.get("student")),
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
    if function := rewards.function:
        measures["reward"] = lambda responses: function(responses, {})[0]
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
    readers = [
        RewardModel(*model, rows=rows, length_bucket=bucket)
        for model in loaded[: len(reward.models)]
    ]
    judges = [
        PreferenceModel(*model, rows=rows, length_bucket=bucket)
        for model in loaded[len(reward.models) :]
    ]
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
    terms = [Term(*term) for term in zip(names, weights, scorers, strict=True)]
    function = functools.partial(weighted, terms) if terms else None
    clip = functools.partial(penalise_and_clip, missing_end=reward.missing_end, clip=reward.clip)
    return Rewards(
        function,
        spec.policy.tokenizer,
        clip,
        models,
        eager,
        failed=reward.failed if reward.on_failure == "value" else None,
        max_failed=reward.max_failed,
    )
