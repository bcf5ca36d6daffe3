"""From what is opened to a run: models loaded, rewards started, settings settled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from rlhf_jax.config import derived
from rlhf_jax.data.batches import PromptStream
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.inference.scoring import ScoringSettings
from rlhf_jax.placement.lanes import lanes_of
from rlhf_jax.rewards.combination import EagerScorer, Scorer, Term, weighted
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.rewards.samples import Rewards
from rlhf_jax.rewards.sharing import shared_out
from rlhf_jax.rewards.sources import source_of
from rlhf_jax.setup import settings
from rlhf_jax.setup.models import frozen_models, load_idle
from rlhf_jax.setup.opened import Opened
from rlhf_jax.state import EvaluationSettings, Run
from rlhf_jax.training.experience import AdvantageConfig, penalise_and_clip
from rlhf_jax.training.settings import TrainingSettings

# Added to the seed by exclusive or: keeps evaluation's noise apart from training's.
EVALUATION_SEED = 1 << 31


def make_run(
    opened: Opened, stack: contextlib.ExitStack, alive: Callable[[], None], remat: bool
) -> Run:
    """Load the models that are not trained, start the rewards, and settle all that stays the same.

    remat: what the run began with. The stack ends the reward's processes; `alive` hears them work.
    """
    config = opened.config
    generation = settings.generation_settings(opened, stack)
    rewards = _rewards(opened, stack, alive)
    frozen = frozen_models(opened)
    evaluation = None
    if opened.held_out is not None:
        # By the reward, and by measures that are never trained on.
        measures: dict[str, Scorer] = {
            "reward": lambda responses: rewards.function(responses, {})[0]
        }
        for name, spec in config.reward.metrics.items():
            scorer = source_of(spec).open(spec, config, alive)
            measures[name] = shared_out(stack.enter_context(scorer))
        asked = config.evaluation
        evaluation = EvaluationSettings(
            prompts=opened.held_out,
            decoding=dataclasses.replace(
                generation.decoding,
                sampling=Sampling(asked.temperature, asked.top_k, asked.top_p),
                seed=config.seed ^ EVALUATION_SEED,
            ),
            samples_per_prompt=asked.samples_per_prompt,
            measures=measures,
        )
    return Run(
        config=config,
        objective=opened.objective,
        prompts=PromptStream(opened.prompts, settings.batches(opened)),
        generation=generation,
        rewards=rewards,
        scoring=ScoringSettings.from_config(config, opened.layouts),
        advantage=AdvantageConfig.from_config(config),
        training=TrainingSettings.from_config(config, opened.layouts, remat),
        learners=settings.learners(opened, remat),
        frozen=frozen,
        lanes=lanes_of(opened.plan),
        next_kl_coefficient=settings.kl_controller(config),
        distillation=settings.distillation(opened, remat),
        evaluation=evaluation,
    )


def _rewards(opened: Opened, stack: contextlib.ExitStack, alive: Callable[[], None]) -> Rewards:
    """Start the terms of the reward: sources such as functions, models on their devices."""
    config = opened.config
    layout = opened.layouts.reward_inference
    reward = config.reward
    names = derived.term_names(config)
    models = {
        name: RewardModel(
            source,
            load_idle(source, layout, config),
            rows=config.training.microbatch_rows,
            length_bucket=config.training.length_bucket,
        )
        for name, source in zip(names[len(reward.functions) :], opened.rewards, strict=True)
    }
    functions = [
        stack.enter_context(source_of(spec).open(spec, config, alive)) for spec in reward.functions
    ]
    by_name = dict(zip(names, functions, strict=False))
    eager = {name: own for name, own in by_name.items() if isinstance(own, EagerScorer)}
    read = [model_scorer(model, layout) for model in models.values()]
    scorers = [*map(shared_out, functions), *read]
    weights = map(float, reward.weights or (1.0,) * len(scorers))
    terms = [Term(*term) for term in zip(names, weights, scorers, strict=True)]
    function = functools.partial(weighted, terms)
    clip = functools.partial(penalise_and_clip, config=AdvantageConfig.from_config(config))
    return Rewards(
        function,
        opened.policy.tokenizer,
        clip,
        models,
        eager,
        failed=reward.failed if reward.on_failure == "value" else None,
        max_failed=reward.max_failed,
    )
