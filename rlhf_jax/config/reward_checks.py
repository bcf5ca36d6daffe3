"""Check what a config says of rewards: their terms, advantages, and the price of KL."""

from __future__ import annotations

import math

from rlhf_jax.config import derived
from rlhf_jax.config.checks import require, require_not_negative, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.losses import kl
from rlhf_jax.losses.advantages import ESTIMATORS
from rlhf_jax.losses.aggregate import AGGREGATES
from rlhf_jax.training.settings import aggregate_name

KL_PLACES = ("loss", "reward")
# What every evaluation writes as eval/NAME.
OWN_MEASURES = ("reward", "finished", "distinct_pairs", "generation/tokens_per_round")


def check_rewards(config: Config) -> None:
    """Check that rewards can be computed, weighed and told apart."""
    reward = config.reward
    terms = len(reward.functions) + len(reward.models)
    require(
        terms > 0,
        "reward.functions and reward.models are empty; give FILE.py:function or a folder.",
    )
    require(
        len(reward.weights) in (0, terms),
        f"reward.weights has {len(reward.weights)} entries for {terms} functions and models; give"
        " one for each.",
    )
    names = derived.term_names(config)
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
    for name in reward.metrics:
        require(
            bool(name) and name not in OWN_MEASURES and not name.endswith("/failed"),
            f"reward.metrics names a measure {name!r}, which is empty or the run's own; rename it.",
        )


def check_advantage(config: Config) -> None:
    """Check that the advantage estimator has the samples, and the critic, that it needs."""
    ESTIMATORS.require(config.advantage.estimator)
    name = config.advantage.estimator
    group = config.generation.samples_per_prompt
    require(
        group > 1 or not ESTIMATORS[name].compares_group,
        f"generation.samples_per_prompt is {group}; {name} compares two or more of a prompt.",
    )
    require(
        group > 1 or not config.generation.resample,
        f"generation.resample is {config.generation.resample}, but one sample of a prompt never"
        " differs from the others; raise generation.samples_per_prompt, or set 0.",
    )
    require_one_of(config, "advantage.deviation", ("sample", "population"))
    aggregate = aggregate_name(config)
    require(
        aggregate in AGGREGATES,
        f"training.loss {config.training.loss!r} or advantage.estimator {name!r} brings the"
        f" aggregate {aggregate!r}, and there are {', '.join(AGGREGATES)}; mend it, or set"
        " training.aggregate.",
    )
    for key in ("discount", "gae_lambda"):
        value = config.advantage[key]
        require(0 <= value <= 1, f"advantage.{key} is {value}; it must lie in 0 .. 1.")
    require(
        ESTIMATORS[name].needs_critic or not config.critic.path,
        f"critic.path is {config.critic.path!r}, but advantage.estimator {name!r} has no critic;"
        " choose 'gae', or ''.",
    )
    require_positive(config, "critic.learning_rate", "critic.clip")
    require_not_negative(config, "critic.warmup_steps", "critic.steps_alone")
    require(
        ESTIMATORS[name].needs_critic or not config.critic.steps_alone,
        f"critic.steps_alone is {config.critic.steps_alone}, but advantage.estimator {name!r} has"
        " no critic; choose 'gae', or 0.",
    )


def check_kl(config: Config) -> None:
    """Check how KL is estimated and paid for, and that its coefficient adapts slowly enough."""
    require_one_of(config, "kl.place", KL_PLACES)
    require_one_of(config, "kl.estimator", tuple(kl.KL))
    require_not_negative(config, "kl.coefficient", "kl.target")
    require_positive(config, "kl.horizon")
    require(
        config.kl.estimator != "k1" or config.kl.place == "reward",
        "kl.estimator is 'k1' and kl.place 'loss', where its gradient has mean zero; use k2 or"
        " k3, or place 'reward'.",
    )
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    require(
        config.kl.horizon >= samples,
        f"kl.horizon is {config.kl.horizon}, less than the {samples} samples of a step: the"
        " coefficient could jump or turn negative; raise it.",
    )
    require(
        config.kl.coefficient > 0 or not config.kl.target,
        f"kl.target is {config.kl.target}, but kl.coefficient is 0 and would stay there; give a"
        " start above 0.",
    )
