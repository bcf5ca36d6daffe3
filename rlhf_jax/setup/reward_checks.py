"""Check the keys of rewards: their terms, and the handling of failures."""

from __future__ import annotations

import math

from rlhf_jax.config import derived
from rlhf_jax.config.checks import require, require_not_negative, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.rewards.sources import term_names

# Names that every evaluation writes as eval/NAME.
OWN_MEASURES = ("reward", "finished", "distinct_pairs", "generation/tokens_per_round")


def check_rewards(config: Config) -> None:
    """Check that rewards can be computed, weighed and distinguished."""
    reward = config.reward
    terms = len(reward.functions) + len(derived.reward_models(config))
    require(
        terms > 0,
        "reward.functions and reward.models are empty; give --reward FILE.py:function, or the"
        " folder of a reward model in reward.models or reward.preference_models.",
    )
    require(
        len(reward.weights) in (0, terms),
        f"reward.weights has {len(reward.weights)} entries for {terms} functions and models; give"
        " one for each.",
    )
    names = term_names(config)
    require(
        len(set(names)) == terms,
        f"The reward's functions and models are called {', '.join(names)} in the metrics; rename"
        " one of the same name.",
    )
    numbers = all(
        isinstance(weight, int | float) and math.isfinite(weight) for weight in reward.weights
    )
    require(numbers, f"reward.weights is {reward.weights}; it must hold finite numbers.")
    require_positive(config, "reward.workers", "reward.concurrency", "reward.seconds")
    require_not_negative(config, "reward.missing_end", "reward.clip")
    require_one_of(config, "reward.on_failure", ("drop", "value"))
    require(
        reward.on_failure == "value" or not reward.failed,
        f"reward.failed is {reward.failed}, but samples without a reward are dropped: set"
        " reward.on_failure to 'value', or reward.failed to 0.",
    )
    require(
        0 <= reward.max_failed < 1,
        f"reward.max_failed is {reward.max_failed}; it must be at least 0 and below 1.",
    )
    _check_groups(config)
    for name in reward.metrics:
        require(
            bool(name) and name not in OWN_MEASURES and not name.endswith("/failed"),
            f"reward.metrics names a measure {name!r}, which is empty or the run's own; rename it.",
        )


def _check_groups(config: Config) -> None:
    """Check that a prompt has several samples where these are compared."""
    group = config.generation.samples_per_prompt
    measured = config.evaluation.samples_per_prompt if config.evaluation.every else 2
    for key, samples in (("generation", group), ("evaluation", measured)):
        require(
            samples > 1 or not config.reward.preference_models,
            f"reward.preference_models compare responses to one prompt; raise {key}"
            ".samples_per_prompt to at least 2.",
        )
    require(
        group > 1 or not config.generation.resample,
        f"generation.resample is {config.generation.resample}, but one sample of a prompt never"
        " differs from the others; raise generation.samples_per_prompt, or set 0.",
    )
