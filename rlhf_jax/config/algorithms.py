"""What a run may learn: an algorithm is data, found in a table by `config.algorithm.name`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_jax.config.schema import Config
from rlhf_jax.runtime.extensions import Registry, load_named
from rlhf_jax.sequences.batch import Sequences


def accept(*_: Any) -> None:
    """Check nothing."""


def unchanged(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the samples as they are, and measure nothing."""
    del config
    return batch, {}


def rate_by_rewards(weights: int) -> float:
    """Return the learning rate of AdamW for a policy of so many weights that learns from rewards.

    It is 1e-6 at 8 billion, as TRL and verl have it at any size, and larger for smaller models, by
    the power 0.75 up to 1e-4: at 135 million, where 1e-6 teaches next to nothing, 2.1e-5.
    """
    return float(f"{min(1e-4, 1e-6 * (8e9 / weights) ** 0.75):.1e}")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Describe what a run learns from the samples of a step; what it needs is read off this."""

    # for people to read, as "GRPO"
    title: str | Callable[[Config], str]
    # by role, the `training.kinds.Loss` of what is trained: "policy", the "drafter" that is made of
    # the policy, or a critic's: any other role has a model with a scalar head, as `config.critic`
    # describes it
    losses: Mapping[str, Any]
    # the roles whose models score the samples: a column each
    scores: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    # of scored samples on the host and the config: the columns that losses read, and metrics. The
    # samples have columns `rewards` and `ended`, and `kl_weight`, the price of a nat of KL.
    prepare: Callable[[Sequences, Config], tuple[Sequences, dict[str, float]]] = unchanged
    # a frozen dataclass of `option` fields: the keys of `config.algorithm` beside its name
    options: type | None = None
    # raises ValueError, in one sentence, for a config that the algorithm cannot use
    check: Callable[[Config], None] = accept
    # the fields of a row of `data.train` that hold its samples: one of a demonstration, of a pair
    # the chosen and the rejected one; none where the policy writes them
    given: tuple[str, ...] = ()
    # the field of a row that says whether its one sample is desirable. Each row then has a second
    # sample, another row's answer to its prompt, of `preference` 0.
    label: str = ""
    # whether samples have rewards, whose functions or models a config must then name
    rewarded: bool = True
    # how a minibatch's losses are summed where the config leaves it open: a name of AGGREGATES
    aggregate: Callable[[Config], str] = lambda config: "token_mean"
    # of a policy of so many weights, where the config leaves it open
    learning_rate: Callable[[int], float] = rate_by_rewards

    def title_of(self, config: Config) -> str:
        """Return the title of a run with this config."""
        return self.title if isinstance(self.title, str) else self.title(config)

    def scorers(self, config: Config) -> tuple[str, ...]:
        """Return the roles whose models score the samples of a run with this config."""
        return self.scores if isinstance(self.scores, tuple) else self.scores(config)

    @property
    def given_per_row(self) -> int:
        """Count the samples of a row; 0 where the policy writes them."""
        return 2 if self.label else len(self.given)

    def fields(self) -> tuple[dataclasses.Field, ...]:
        """Return the fields of the options."""
        return dataclasses.fields(self.options) if self.options else ()

    def defaults(self) -> dict[str, Any]:
        """Return the keys of `config.algorithm` beside its name, with their defaults."""
        return {field.name: field.default for field in self.fields()}

    def options_of(self, config: Config) -> Any:
        """Return the options that a config asks for; None of an algorithm without options."""
        if self.options is None:
            return None
        return self.options(**{name: config.algorithm[name] for name in self.defaults()})

    def check_options(self, config: Config) -> None:
        """Raise ValueError, in one sentence, for an option that cannot be."""
        for field in self.fields():
            field.metadata["check"](config, f"algorithm.{field.name}")


def option(default: Any, meaning: str, check: Callable[[Config, str], None] = accept) -> Any:
    """Return the field of an algorithm's options that becomes a key `algorithm.NAME` of a config.

    meaning: what the value is, with its unit. check: of a config and the dotted key, raises
    ValueError in one sentence; those of `config.checks` do.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "check": check})


def _no_algorithm(found: object) -> str:
    """Say why an object of a file is none."""
    return "" if isinstance(found, Algorithm) else "is no rlhf_jax.Algorithm"


# By name: an algorithm, or where it is, so that only what runs is imported.
ALGORITHMS: Registry[Algorithm | str] = Registry(
    "algorithm.name",
    _no_algorithm,
    {
        "grpo": "rlhf_jax.algorithms.grpo:GRPO",
        "ppo": "rlhf_jax.algorithms.ppo:PPO",
        "sft": "rlhf_jax.algorithms.sft:SFT",
        "reward_model": "rlhf_jax.algorithms.reward_model:REWARD_MODEL",
        "dpo": "rlhf_jax.algorithms.dpo:DPO",
        "kto": "rlhf_jax.algorithms.kto:KTO",
        "distill": "rlhf_jax.algorithms.distill:DISTILL",
    },
)


def register(name: str, algorithm: Algorithm) -> None:
    """Let `config.algorithm.name` name an algorithm."""
    ALGORITHMS[name] = algorithm


def named(name: str) -> Algorithm:
    """Return the algorithm of a name, or of FILE.py:NAME; ValueError where there is none."""
    ALGORITHMS.require(name)
    entry = ALGORITHMS[name]
    return load_named(entry, "algorithm.name") if isinstance(entry, str) else entry


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm that a config names; ValueError where there is none."""
    return named(config.algorithm.name)
