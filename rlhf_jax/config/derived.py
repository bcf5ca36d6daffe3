"""State what follows from a config: which models a run has, how they draft, what measures it."""

from __future__ import annotations

import pathlib

from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.speculative.protocol import DRAFTERS, Drafter, drafters_of
from rlhf_jax.generation.speculative.protocol import register as register_drafter
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.strategy import candidates
from rlhf_jax.generation.strategy.candidates import Candidates
from rlhf_jax.model.families import register as register_family
from rlhf_jax.rewards.sources import source_of
from rlhf_jax.runtime.extensions import load_named


def register_own(config: Config) -> None:
    """Register the drafters and families that a config names by FILE.py:NAME; again is no harm."""
    for spec in config.generation.drafters:
        found = load_named(spec, "generation.drafters")
        register_drafter(found() if isinstance(found, type) else found)
    for spec in config.model.families:
        register_family(load_named(spec, "model.families"))


def adaptive(config: Config) -> bool:
    """Tell whether the drafting strategy is chosen round by round."""
    return config.generation.strategy == "adaptive"


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
    return generates(config) and (makes_drafter(config) or drafts_by_model(config))


def makes_drafter(config: Config) -> bool:
    """Tell whether a run is for its student, which then learns from all samples."""
    return "drafter" in algorithm_of(config).losses


def trains_drafter(config: Config) -> bool:
    """Tell whether a run trains a student as its draft model."""
    return has_drafter(config) and config.drafter.layers > 0 and config.drafter.learning_rate > 0


def student_samples(config: Config) -> int:
    """Return how many samples of a step a student learns from: all, or some beside the policy."""
    return samples(config) if makes_drafter(config) else config.drafter.samples


def generates(config: Config) -> bool:
    """Tell whether the policy writes the samples of a step, which are else given."""
    return not algorithm_of(config).given


def rewarded(config: Config) -> bool:
    """Tell whether the samples of a step have rewards."""
    return algorithm_of(config).rewarded and generates(config)


def prompts(config: Config) -> int:
    """Return how many prompts a step has."""
    return config.generation.prompts_per_step if generates(config) else config.data.rows_per_step


def samples(config: Config) -> int:
    """Return how many samples a step has."""
    given = len(algorithm_of(config).given)
    return prompts(config) * (given or config.generation.samples_per_prompt)


def response_tokens(config: Config) -> int:
    """Return the tokens of the longest sample, without its prompt."""
    generated = config.generation.max_new_tokens
    return generated if generates(config) else config.data.max_response_tokens


def text_tokens(config: Config) -> int:
    """Return the tokens of the longest prompt and sample."""
    return config.data.max_prompt_tokens + response_tokens(config)


def microbatch_rows(config: Config) -> int:
    """Return how many of the longest samples a micro-batch has room for, over all devices."""
    tokens = config.training.microbatch_tokens
    return tokens // text_tokens(config) if tokens else config.training.microbatch_rows


def batch_tokens(config: Config, minibatches: int = 1) -> int:
    """Return the tokens of a step's samples, or of a minibatch, at most; each prompt once."""
    rows = samples(config) // minibatches
    # Samples of a prompt may be in any of several minibatches.
    distinct = min(prompts(config), rows)
    return distinct * config.data.max_prompt_tokens + rows * response_tokens(config)


def group_tokens(config: Config) -> int:
    """Return the tokens of all samples of a prompt at most, the prompt once."""
    own = samples(config) // prompts(config)
    return config.data.max_prompt_tokens + own * response_tokens(config)


def scorers(config: Config) -> tuple[str, ...]:
    """Return the roles of the models that score the tokens of samples."""
    return algorithm_of(config).scorers(config)


def trains(config: Config, role: str) -> bool:
    """Tell whether the model of a role learns from the samples of a step."""
    return role in algorithm_of(config).losses


def critics(config: Config) -> tuple[str, ...]:
    """Return the roles whose models have scalar heads: all that train or score but three."""
    roles = dict.fromkeys([*algorithm_of(config).losses, *scorers(config)])
    return tuple(role for role in roles if role not in ("policy", "reference", "drafter"))


def trained_critics(config: Config) -> tuple[str, ...]:
    """Return the roles with scalar heads that learn from the samples of a step."""
    return tuple(role for role in critics(config) if trains(config, role))


def calls(config: Config) -> tuple[str, ...]:
    """Return the calls that an iteration has, by their names in a plan.

    The weights that generation draws from are those of the policy's training, be it trained or not;
    a student is trained in that call, too.
    """
    rewards = rewarded(config) and bool(config.reward.models)
    written = generates(config)
    return (
        *(["generation"] if written else []),
        *(f"{role}_inference" for role in scorers(config)),
        *(["reward_inference"] if rewards else []),
        *dict.fromkeys([*(["policy_training"] if written else []), *learning_calls(config)]),
    )


def learning_calls(config: Config) -> tuple[str, ...]:
    """Return the calls in which a model learns from the samples of a step, in their order."""
    return tuple(f"{role}_training" for role in algorithm_of(config).losses if role != "drafter")


def term_names(config: Config) -> list[str]:
    """Return what metrics call the reward's functions, then its models, in the config's order.

    A function has its own name, what another source scores the name that it gives, a model the
    last part of its path.
    """
    functions = [source_of(spec).term_name(spec) for spec in config.reward.functions]
    return functions + [pathlib.PurePath(path).name for path in config.reward.models]
