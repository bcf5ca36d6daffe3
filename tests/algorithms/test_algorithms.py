"""Algorithms as data: options that are keys; configs and checkpoints of earlier versions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.command.config import keys
from rlhf_jax.config import algorithms, default, derived, earlier
from rlhf_jax.config.checks import require_positive
from rlhf_jax.config.command_line import read
from rlhf_jax.config.derived import aggregate_name
from rlhf_jax.config.schema import EARLIER, flat
from rlhf_jax.sequences.minibatches import minibatches


@dataclasses.dataclass(frozen=True)
class Options:
    beta: float = rlhf_jax.option(0.1, "how much a nat weighs", require_positive)
    deviation: str = rlhf_jax.option("none", "grpo has a key of this name, too")


@pytest.fixture
def toy(monkeypatch):
    """An algorithm with two options of its own."""
    made = rlhf_jax.Algorithm("a toy", {"policy": rlhf_jax.POLICY_LOSS}, options=Options)
    monkeypatch.setitem(algorithms.ALGORITHMS, "toy", made)
    return made


def of_command(*words):
    return read(["train", "--model", "m", *(f"--config.{word}" for word in words)])


def test_options_are_keys_with_types_checks_and_meanings(toy):
    config = of_command("algorithm.name=toy", "algorithm.beta=0.5")
    assert config.algorithm.to_dict() == {"name": "toy", "beta": 0.5, "deviation": "none"}
    assert toy.options_of(config) == Options(beta=0.5)
    with pytest.raises(ValueError, match=r"'algorithm\.beta' is of type float; 'x' is not"):
        of_command("algorithm.name=toy", "algorithm.beta=x")
    with pytest.raises(ValueError, match=r"no config key .algorithm\.bet.; did you mean"):
        of_command("algorithm.name=toy", "algorithm.bet=1")
    config.algorithm.beta = -1.0
    with pytest.raises(ValueError, match=r"algorithm\.beta is -1\.0; it must be above 0"):
        toy.check_options(config)
    told = {key.name: key for key in keys("toy")}
    assert told["algorithm.beta"] == ("algorithm.beta", 0.1, "how much a nat weighs")
    assert "algorithm.gae_lambda" not in told and "algorithm.gae_lambda" in flat(default())


def test_a_config_that_names_another_algorithm_has_its_options(toy):
    config = default()
    config.algorithm.update(name="toy", deviation="population")
    assert earlier.settled(config).algorithm.to_dict() == {
        "name": "toy",
        "beta": 0.1,
        "deviation": "population",
    }
    config.algorithm.discount = 0.5
    with pytest.warns(UserWarning, match=r"algorithm\.discount: no option of the algorithm 'toy'"):
        assert "discount" not in earlier.settled(config).algorithm
    assert config.algorithm.discount == 0.5, "the given one stays as it is"
    own = default("toy")
    own.algorithm.beta = 0.25
    assert earlier.settled(own).algorithm.beta == 0.25


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({"objective": "distill"}, {"name": "distill"}),
        ({"advantage.estimator": "gae"}, {"name": "ppo", "estimator": ""}),
        ({"advantage.estimator": "rloo"}, {"name": "grpo", "estimator": "rloo"}),
        (
            {"advantage.gae_lambda": 0.5, "advantage.deviation": "population"},
            {"name": "grpo", "gae_lambda": 0.5, "deviation": "population"},
        ),
        ({"training.loss": "gspo"}, {"name": "grpo", "loss": "gspo"}),
    ],
)
def test_keys_of_an_earlier_version_are_read_with_one_sentence(given, read_as):
    """From a file, from the command line, and in the identity of a checkpoint."""
    config = default()
    config.update_from_flattened_dict(given)
    with pytest.warns(UserWarning, match="keys of an earlier version, read as") as warned:
        settled = earlier.settled(config)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert read_as.items() <= settled.algorithm.to_dict().items()
    assert not {"objective", "advantage"} & set(settled) and "loss" not in settled.training
    with pytest.warns(UserWarning, match="earlier version"):
        said = of_command(*(f"{name}={value}" for name, value in given.items()))
    assert said.algorithm.to_dict() == settled.algorithm.to_dict()
    saved = {"seed": 0, **EARLIER, **given}
    own = {f"algorithm.{key}": value for key, value in settled.algorithm.items()}
    assert earlier.identity(saved).items() >= own.items()
    assert not EARLIER.keys() & earlier.identity(saved).keys()


def test_what_is_as_today_is_read_without_a_word(recwarn):
    config = default()
    settled = earlier.settled(config)
    assert flat(settled) == flat(config) and settled.is_locked
    assert earlier.settled(settled) == settled
    saved = {"seed": 7, "algorithm.name": "ppo", "data.eval": "rows.jsonl"}
    read = earlier.identity(saved)
    assert read.items() >= saved.items()
    # what was no key yet has its default, as JSON has it
    assert read["data.mixture"] == [] and read["kl.coefficient"] == 0.04
    assert earlier.identity({"algorithm.name": "online_dpo"})["algorithm.history"] == "current"
    assert not recwarn


def test_an_objective_of_a_file_is_told_what_it_is_now():
    config = default()
    config.objective = "own.py:Objective"
    with pytest.raises(ValueError, match=r"an algorithm now: .*docs/how-to/algorithm\.md"):
        earlier.settled(config)


def test_what_a_run_needs_is_read_off_the_algorithm(toy):
    config = earlier.settled(default("toy"))
    assert derived.scorers(config) == ()
    assert derived.calls(config) == ("generation", "policy_training")
    assert aggregate_name(config) == "token_mean"
    config = default()
    assert derived.calls(config) == ("generation", "reference_inference", "policy_training")
    config.algorithm.name = "ppo"
    config.training.minibatches = 2
    assert derived.calls(config) == (
        "generation",
        *(f"{role}_inference" for role in ("policy", "reference", "critic")),
        "policy_training",
        "critic_training",
    )
    config.algorithm.name = "distill"
    assert derived.calls(config) == ("generation", "policy_training")
    config.generation.temperature = 0.7
    assert derived.temperature(config) == 0.7
    config.algorithm.name = "sft"  # whose samples are drawn from no model
    assert derived.temperature(config) == 1.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_minibatches_keep_groups_together(count):
    groups = np.array([7, 7, 3, 3, 3, 5, 9, 9, 1, 1, 1, 2])
    drawn = list(minibatches(len(groups), count, 2, seed=1, step=4, groups=groups))
    assert len(drawn) == 2 * count
    for epoch in (drawn[:count], drawn[count:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(len(groups)))
        whole = [set(groups[rows].tolist()) for rows in epoch]
        assert sum(map(len, whole)) == 6, "no group is in two minibatches"
    with pytest.raises(ValueError, match="6 groups cannot be split into 4 equal minibatches"):
        next(minibatches(len(groups), 4, 1, seed=1, step=4, groups=groups))
