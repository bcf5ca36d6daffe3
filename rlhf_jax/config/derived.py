"""State what follows from a config: which models a run has, how they draft, what measures it."""

from __future__ import annotations

import pathlib

from rlhf_jax.config.objectives import objective_of
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.speculative.protocol import DRAFTERS, Drafter, drafters_of
from rlhf_jax.generation.speculative.protocol import register as register_drafter
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.strategy import candidates
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.losses.advantages import ESTIMATORS
from rlhf_jax.model.families import register as register_family
from rlhf_jax.rewards.sources import source_of
from rlhf_jax.runtime.extensions import load_named

ADAPTIVE = "adaptive"


def register_own(config: Config) -> None:
    """Register the drafters and families that a config names by FILE.py:NAME; again is no harm."""
    for spec in config.generation.drafters:
        found = load_named(spec, "generation.drafters")
        register_drafter(found() if isinstance(found, type) else found)
    for spec in config.model.families:
        register_family(load_named(spec, "model.families"))


def adaptive(config: Config) -> bool:
    """Tell whether the drafting strategy is chosen round by round."""
    return config.generation.strategy == ADAPTIVE


def strategies(config: Config) -> Candidates:
    """Return the strategies that may be chosen: the one that is named, or all that are possible.

    Those of 'adaptive' draft by every drafter that is registered and for which the run has what it
    needs. Drafts are replayed only by evaluation and under repeated noise, and not where texts
    depend on the drafts.
    """
    generation = config.generation
    repeats = bool(config.evaluation.every or generation.repeated_noise)
    replayed = repeats and not RULES[generation.acceptance].depends_on_drafts
    usable = [
        one.name
        for one in DRAFTERS.values()
        if (replayed or not one.needs_earlier) and (names_model(config) or not one.needs_model)
    ]
    longest = max(1, min(candidates.LONGEST_CHAIN, generation.max_new_tokens // 2))
    return candidates.parse(generation.strategy, usable, longest)


def names_model(config: Config) -> bool:
    """Tell whether a config names a draft model, or layers to make one of."""
    return bool(config.drafter.path or config.drafter.layers)


def drafters(config: Config) -> tuple[Drafter, ...]:
    """Return the drafters of the strategies that may be chosen."""
    return drafters_of(strategies(config).strategies)


def replays(config: Config) -> bool:
    """Tell whether a drafter reads the text that the same noise gave before."""
    return any(one.needs_earlier for one in drafters(config))


def drafts_by_model(config: Config) -> bool:
    """Tell whether a drafter needs a draft model."""
    return any(one.needs_model for one in drafters(config))


def keeps_draft_logits(config: Config) -> bool:
    """Tell whether acceptance reads what a draft model's tokens were drawn from."""
    return RULES[config.generation.acceptance].reads_logits and drafts_by_model(config)


def has_drafter(config: Config) -> bool:
    """Tell whether a run has a draft model, to draft with or to train."""
    return objective_of(config).distills or drafts_by_model(config)


def trains_drafter(config: Config) -> bool:
    """Tell whether a run trains a student as its draft model."""
    return has_drafter(config) and config.drafter.layers > 0 and config.drafter.learning_rate > 0


def student_samples(config: Config) -> int:
    """Return how many samples of a step a student learns from: all, or some beside the policy."""
    generation = config.generation
    if objective_of(config).distills:
        return generation.prompts_per_step * generation.samples_per_prompt
    return config.drafter.samples


def needs_reference(config: Config) -> bool:
    """Tell whether a run has a reference model, from which KL is measured."""
    return objective_of(config).uses_rewards and config.kl.coefficient > 0


def needs_old_logprobs(config: Config) -> bool:
    """Tell whether inference scores the policy, or an update's own forward pass is enough.

    It is, where the update takes one step on samples of the policy as it is, and no advantage reads
    the KL to the reference.
    """
    training = config.training
    one_step = training.epochs * training.minibatches == 1 and not training.lag
    return not one_step or (config.kl.place == "reward" and config.kl.coefficient > 0)


def needs_critic(config: Config) -> bool:
    """Tell whether a run trains a critic, whose values its advantages read."""
    uses_rewards = objective_of(config).uses_rewards
    return uses_rewards and ESTIMATORS[config.advantage.estimator].needs_critic


def scorers(config: Config) -> tuple[str, ...]:
    """Return the roles of the models that score the tokens of samples."""
    uses_rewards = objective_of(config).uses_rewards
    there = {
        "policy": uses_rewards and needs_old_logprobs(config),
        "reference": needs_reference(config),
        "critic": needs_critic(config),
    }
    return tuple(role for role, has in there.items() if has)


def calls(config: Config) -> tuple[str, ...]:
    """Return the calls that an iteration has, by their names in a plan.

    Where no objective uses rewards, the policy's training is its student's.
    """
    rewards = objective_of(config).uses_rewards and bool(config.reward.models)
    return (
        "generation",
        *(f"{role}_inference" for role in scorers(config)),
        *(["reward_inference"] if rewards else []),
        "policy_training",
        *(["critic_training"] if needs_critic(config) else []),
    )


def term_names(config: Config) -> list[str]:
    """Return what metrics call the reward's functions, then its models, in the config's order.

    A function has its own name, what another source scores the name that it gives, a model the
    last part of its path.
    """
    functions = [source_of(spec).term_name(spec) for spec in config.reward.functions]
    return functions + [pathlib.PurePath(path).name for path in config.reward.models]
