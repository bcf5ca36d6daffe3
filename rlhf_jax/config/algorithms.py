"""Define `Algorithm`, and the registry that `config.algorithm.name` is looked up in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlhf_jax.config.schema import Config
from rlhf_jax.runtime.extensions import Registry, load_named
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.types import Memory

# Keys of a config that only advantages read, or a loss with a penalty for KL.
OF_ADVANTAGES = (
    "kl.coefficient",
    "kl.place",
    "kl.estimator",
    "kl.target",
    "reward.whiten",
    "training.drop_overlong",
)


def accept(*_: Any) -> None:
    """Check nothing."""


def unchanged(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return the samples unchanged, without metrics."""
    del config
    return batch, {}


def with_memory(batch: Sequences, memory: Memory, config: Config) -> tuple[Sequences, Memory]:
    """Return the samples and the memory unchanged."""
    del config
    return batch, memory


def rate_by_rewards(weights: int) -> float:
    """Return the default learning rate of AdamW for a policy that learns from rewards.

    It is 1e-6 at 8 billion weights, TRL's and verl's value for any size, and grows for smaller
    models by the power 0.75 up to 1e-4: 2.1e-5 at 135 million, where 1e-6 has almost no effect.
    """
    return float(f"{min(1e-4, 1e-6 * (8e9 / weights) ** 0.75):.1e}")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Describe what a run learns from the samples of a step, and hence all that the run needs."""

    # title for readers, such as "GRPO"
    title: str | Callable[[Config], str]
    # by role, the `training.kinds.Loss` of each trained model: "policy", "drafter" (made from the
    # policy), or a critic; any other role is a model with a scalar head, as `config.critic`
    # describes it
    losses: Mapping[str, Any]
    # the roles whose models score the samples: one column each
    scores: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    # from scored samples on the host and the config to the columns that losses read, and metrics;
    # samples have columns `rewards` and `ended`, and `kl_weight`, the penalty per nat of KL
    prepare: Callable[[Sequences, Config], tuple[Sequences, dict[str, float]]] = unchanged
    # a frozen dataclass of `option` fields: the keys of `config.algorithm` besides its name
    options: type | None = None
    # raises ValueError, in one sentence, for a config that the algorithm cannot use
    check: Callable[[Config], None] = accept
    # the fields of a row of `data.train` that hold its samples: one for a demonstration, chosen and
    # rejected for a pair; none if the policy generates them
    given: tuple[str, ...] = ()
    # the field of a row that labels its one sample as desirable; each row then has a second sample,
    # another row's answer to its prompt, with `preference` 0
    label: str = ""
    # of a row of `data.train`, random numbers and the row's place for messages: the row whose
    # prompt and samples are read. None: the row itself
    rewrite: Callable[[dict[str, Any], np.random.Generator, str], dict[str, Any]] | None = None
    # from samples with columns `rewards` and `ended` to those that are scored and trained on, and
    # metrics; both are on the host
    choose: Callable[[Sequences, Config], tuple[Sequences, dict[str, float]]] = unchanged
    # the most groups of a prompt that `choose` leaves, and the most samples of each, by which
    # memory and time are planned; None: all samples of a prompt are one group
    chosen: Callable[[Config], tuple[int, int]] | None = None
    # from prepared samples, the memory of earlier steps and the config to the samples that are
    # trained on, and the memory for later steps
    recall: Callable[[Sequences, Memory, Config], tuple[Sequences, Memory]] = with_memory
    # the temperature of each sample of a prompt; none where all have generation.temperature
    temperatures: Callable[[Config], tuple[float, ...]] = lambda config: ()
    # whether samples have rewards, whose functions or models a config must then name
    rewarded: bool = True
    # how a minibatch's losses are summed by default: a name of AGGREGATES
    aggregate: Callable[[Config], str] = lambda config: "token_mean"
    # default learning rate by the number of the policy's weights
    learning_rate: Callable[[int], float] = rate_by_rewards

    def title_of(self, config: Config) -> str:
        """Return the title of a run with this config."""
        return self.title if isinstance(self.title, str) else self.title(config)

    def scorers(self, config: Config) -> tuple[str, ...]:
        """Return the roles whose models score the samples of a run with this config."""
        return self.scores if isinstance(self.scores, tuple) else self.scores(config)

    @property
    def given_per_row(self) -> int:
        """Return the number of samples of a row; 0 if the policy generates them."""
        return 2 if self.label else len(self.given)

    @property
    def rates_chats(self) -> bool:
        """Return whether it makes classifiers alone, which are read at the end of a given chat."""
        return bool(self.given) and "policy" not in self.losses

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the keys of `OF_ADVANTAGES` if no loss has advantages or a penalty for KL."""
        reads = {name for loss in self.losses.values() for name in loss.reads}
        return () if reads & {"advantages", "kl_weight"} else OF_ADVANTAGES

    def fields(self) -> tuple[dataclasses.Field, ...]:
        """Return the fields of the options."""
        return dataclasses.fields(self.options) if self.options else ()

    def defaults(self) -> dict[str, Any]:
        """Return the keys of `config.algorithm` besides its name, with their defaults."""
        return {field.name: field.default for field in self.fields()}

    def options_of(self, config: Config) -> Any:
        """Return the options from a config; None for an algorithm without options."""
        if self.options is None:
            return None
        return self.options(**{name: config.algorithm[name] for name in self.defaults()})

    def check_options(self, config: Config) -> None:
        """Raise ValueError, in one sentence, for an invalid option."""
        for field in self.fields():
            field.metadata["check"](config, f"algorithm.{field.name}")


def option(default: Any, meaning: str, check: Callable[[Config, str], None] = accept) -> Any:
    """Return a dataclass field that becomes the key `algorithm.NAME` of a config.

    meaning: the description of the value, with its unit. check: takes a config and the dotted key
    and raises ValueError in one sentence, as those of `config.checks` do.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "check": check})


def _no_algorithm(candidate: object) -> str:
    """Return why an object is not an algorithm, or ''."""
    return "" if isinstance(candidate, Algorithm) else "is no rlhf_jax.Algorithm"


# By name: an algorithm, or where it is defined, so that only those in use are imported.
ALGORITHMS: Registry[Algorithm | str] = Registry(
    "algorithm.name",
    _no_algorithm,
    {
        "grpo": "rlhf_jax.algorithms.grpo:GRPO",
        "ppo": "rlhf_jax.algorithms.ppo:PPO",
        "sft": "rlhf_jax.algorithms.sft:SFT",
        "reward_model": "rlhf_jax.algorithms.reward_model:REWARD_MODEL",
        "preference_model": "rlhf_jax.algorithms.preference_model:PREFERENCE_MODEL",
        "dpo": "rlhf_jax.algorithms.dpo:DPO",
        "online_dpo": "rlhf_jax.algorithms.online_dpo:ONLINE_DPO",
        "raft": "rlhf_jax.algorithms.raft:RAFT",
        "on_policy_distill": "rlhf_jax.algorithms.on_policy_distill:ON_POLICY_DISTILL",
        "kto": "rlhf_jax.algorithms.kto:KTO",
        "distill": "rlhf_jax.algorithms.distill:DISTILL",
    },
)


def register(name: str, algorithm: Algorithm) -> None:
    """Register an algorithm for `config.algorithm.name`."""
    ALGORITHMS[name] = algorithm


def named(name: str) -> Algorithm:
    """Return the algorithm of a name or of FILE.py:NAME; ValueError if there is none."""
    ALGORITHMS.require(name)
    entry = ALGORITHMS[name]
    return load_named(entry, "algorithm.name") if isinstance(entry, str) else entry


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm that a config names; ValueError if there is none."""
    return named(config.algorithm.name)
