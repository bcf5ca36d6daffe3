"""Derive facts from a config: samples, models and calls of its run."""

from __future__ import annotations

import math

from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.types import ModelConfig


def adaptive(config: Config) -> bool:
    """Return whether the drafting strategy is chosen round by round."""
    return config.generation.strategy == "adaptive"


def names_model(config: Config) -> bool:
    """Return whether a config has a draft model, or layers to make one from."""
    return bool(config.drafter.path or config.drafter.layers)


def makes_drafter(config: Config) -> bool:
    """Return whether a run trains only a student, on all samples."""
    return "drafter" in algorithm_of(config).losses


def student_samples(config: Config) -> int:
    """Return the number of samples per step that a student learns from."""
    return samples(config) if makes_drafter(config) else config.drafter.samples


def generates(config: Config) -> bool:
    """Return whether the policy generates the samples of a step; otherwise the data give them."""
    return not algorithm_of(config).given


def rewarded(config: Config) -> bool:
    """Return whether the samples of a step have rewards."""
    return algorithm_of(config).rewarded and generates(config)


def prompts(config: Config) -> int:
    """Return the number of prompts per step."""
    return config.generation.prompts_per_step if generates(config) else config.data.rows_per_step


def samples(config: Config) -> int:
    """Return the number of samples per step."""
    given = algorithm_of(config).given_per_row
    return prompts(config) * (given or config.generation.samples_per_prompt)


def chosen(config: Config) -> tuple[int, int]:
    """Return the most groups of a prompt that are learned from, and the most samples of each."""
    of_prompt = algorithm_of(config).chosen
    return of_prompt(config) if of_prompt else (1, samples(config) // prompts(config))


def chosen_samples(config: Config) -> int:
    """Return the most samples of a step that are scored and learned from."""
    return prompts(config) * math.prod(chosen(config))


def response_tokens(config: Config) -> int:
    """Return the length of the longest sample without its prompt, in tokens."""
    generated = config.generation.max_new_tokens
    return generated if generates(config) else config.data.max_response_tokens


def temperature(config: Config) -> float:
    """Return the temperature of the distribution that samples are scored and trained by.

    It is the one that they are drawn at; given samples are drawn from none.
    """
    return config.generation.temperature if generates(config) else 1.0


def samples_dynamically(config: Config) -> bool:
    """Return whether the samples of a prompt or their temperature depend on its rewards so far."""
    return bool(config.generation.fewest_samples or config.generation.hottest)


def text_tokens(config: Config) -> int:
    """Return the length of the longest prompt and sample, in tokens."""
    return config.data.max_prompt_tokens + response_tokens(config)


def compares_pairs(call: str, model: ModelConfig) -> bool:
    """Return whether a model reads pairs of responses in a call: a language model among rewards."""
    return call == "reward_inference" and not model.scalar_head


def reward_tokens(config: Config, model: ModelConfig) -> int:
    """Return the tokens of the longest text of a reward's model, padded to whole buckets."""
    bucket = config.training.length_bucket
    second = response_tokens(config) if compares_pairs("reward_inference", model) else 0
    tokens = text_tokens(config) + second
    return -(-tokens // bucket) * bucket


def microbatch_rows(config: Config) -> int:
    """Return the number of longest samples that fit into a micro-batch, over all devices."""
    tokens = config.training.microbatch_tokens
    return tokens // text_tokens(config) if tokens else config.training.microbatch_rows


def batch_tokens(config: Config, minibatches: int = 1) -> int:
    """Return the most tokens of chosen samples of a step or minibatch; each prompt counts once."""
    rows = chosen_samples(config) // minibatches
    # Samples of a prompt may be in any of several minibatches.
    distinct = min(prompts(config), rows)
    return distinct * config.data.max_prompt_tokens + rows * response_tokens(config)


def group_tokens(config: Config) -> int:
    """Return the most tokens of a group of samples of a prompt; the prompt counts once."""
    _, size = chosen(config)
    return config.data.max_prompt_tokens + size * response_tokens(config)


def keeps_groups(config: Config) -> bool:
    """Return whether a loss compares the samples of a group, which are then in one line."""
    return any(loss.whole_groups for loss in algorithm_of(config).losses.values())


def scorers(config: Config) -> tuple[str, ...]:
    """Return the roles of the models that score the tokens of samples."""
    return algorithm_of(config).scorers(config)


def trains(config: Config, role: str) -> bool:
    """Return whether the model of a role learns from the samples of a step."""
    return role in algorithm_of(config).losses


def critics(config: Config) -> tuple[str, ...]:
    """Return the roles of models with scalar heads: all but policy, reference and drafter."""
    roles = dict.fromkeys([*algorithm_of(config).losses, *scorers(config)])
    return tuple(role for role in roles if role not in ("policy", "reference", "drafter"))


def trained_critics(config: Config) -> tuple[str, ...]:
    """Return the roles with scalar heads that learn from the samples of a step."""
    return tuple(role for role in critics(config) if trains(config, role))


def reward_models(config: Config) -> tuple[str, ...]:
    """Return the folders of the models that give rewards: those of texts, then those of pairs."""
    return (*config.reward.models, *config.reward.preference_models)


def calls(config: Config) -> tuple[str, ...]:
    """Return the calls of an iteration, by their names in a plan.

    Generation uses the weights of the policy's training call, trained or not; a student is trained
    in that call, too.
    """
    rewards = rewarded(config) and bool(reward_models(config))
    written = generates(config)
    return (
        *(["generation"] if written else []),
        *(f"{role}_inference" for role in scorers(config)),
        *(["reward_inference"] if rewards else []),
        *dict.fromkeys([*(["policy_training"] if written else []), *learning_calls(config)]),
    )


def learning_calls(config: Config) -> tuple[str, ...]:
    """Return the calls in which a model learns from the samples of a step, in order."""
    return tuple(f"{role}_training" for role in algorithm_of(config).losses if role != "drafter")


def aggregate_name(config: Config) -> str:
    """Name how a minibatch's losses are summed: from the config, else the algorithm's default."""
    name = config.training.aggregate
    return algorithm_of(config).aggregate(config) if name == "auto" else name
