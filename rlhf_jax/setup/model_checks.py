"""Check that the models of a run are of the right kind, and fit its config and each other."""

from __future__ import annotations

import dataclasses

from rlhf_jax.config import derived
from rlhf_jax.config.checks import require
from rlhf_jax.config.schema import Config
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation import drafting
from rlhf_jax.training.distill import student_config
from rlhf_jax.types import ModelConfig, ModelConfigs

# Fields of its shape in which a student may differ: embedding and head are the policy's, and the
# context is checked for every model.
FREE_OF_STUDENT = ("max_context", "tied", "scalar_head")


def check_models(config: Config, models: ModelConfigs) -> None:
    """Raise ValueError if a model is of the wrong kind, or does not fit config or policy.

    A model may lack room for a whole text, or have another vocabulary than the policy.
    """
    policy, drafter, critics, rewards, reference = models
    critic = next(iter(critics.values()), None)  # all are made of the same model
    named = {"model.path": policy, "drafter.path": drafter, "kl.reference": reference}
    for name, model in named.items():
        require(
            model is None or not model.scalar_head,
            f"{name} is a reward model, which scores text and cannot write it; give a"
            " language model.",
        )
    for path, model in zip(derived.reward_models(config), rewards, strict=True):
        pairs = path in config.reward.preference_models
        key = "preference_models" if pairs else "models"
        kind, asked = ("sequence classifier", "language model")[:: 1 if pairs else -1]
        require(model.scalar_head != pairs, f"reward.{key}: {path} is a {kind}; give a {asked}.")
    _check_sizes(config, models)
    require(
        drafter is None
        or config.generation.acceptance == "replayable"
        or drafter.vocab_size == policy.vocab_size,
        "Rejection compares distributions over one vocabulary: the drafter's has"
        f" {drafter and drafter.vocab_size} tokens, the model's {policy.vocab_size}; use"
        " acceptance 'replayable' or another drafter.",
    )
    require(
        critic is None or critic.vocab_size == policy.vocab_size,
        "The critic reads the policy's tokens: its vocabulary has"
        f" {critic and critic.vocab_size}, the model's {policy.vocab_size}; give a critic.path of"
        " the same vocabulary, or '' for the policy's own trunk.",
    )
    for role, model in critics.items():
        require(
            model.scalar_head or derived.trains(config, role),
            f"The {role} of algorithm {config.algorithm.name!r} scores and is not trained; give a"
            " critic.path that is a reward model.",
        )


def _check_sizes(config: Config, models: ModelConfigs) -> None:
    """Check that models have room for a whole text, and evaluation tokens to choose from."""
    policy, drafter, critics, _, reference = models
    critic = next(iter(critics.values()), None)
    kept = config.evaluation.top_k
    require(
        kept <= policy.vocab_size,
        f"evaluation.top_k is {kept}, but the model has {policy.vocab_size} tokens; lower it.",
    )
    longest = derived.text_tokens(config)
    limit = "generation.max_new_tokens" if derived.generates(config) else "data.max_response_tokens"
    readers = {"model": policy, "drafter": drafter, "critic": critic, "reference": reference}
    for name, model in readers.items():
        require(
            model is None or longest <= model.max_context,
            f"data.max_prompt_tokens + {limit} is {longest}, but the {name}'s"
            f" context is {model and model.max_context}; lower one of the two.",
        )


def check_tokenizers(policy: Tokenizer, reference: Tokenizer) -> None:
    """Raise ValueError unless the ids of both mean the same tokens; vocabularies may be padded."""
    own, other = (
        tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (policy, reference)
    )
    different = next((token for token in own if own[token] != other.get(token)), None)
    require(
        different is None,
        f"kl.reference has another tokenizer than the model: {different!r:.40} is token"
        f" {own.get(different or '')} of the model and {other.get(different or '')} of the"
        " reference; give a model of the same tokenizer.",
    )


def check_student(config: Config, policy: ModelConfig, path: ModelConfig | None) -> None:
    """Raise ValueError if a student cannot be made from the policy, or is not in drafter.path.

    path: the model in drafter.path, or None if that is empty.
    """
    layers = config.drafter.layers if drafting.has_drafter(config) else 0
    require(
        layers <= policy.num_layers,
        f"drafter.layers is {layers}, but the model has {policy.num_layers} layers to make a"
        " student of; lower it.",
    )
    if not layers or path is None:
        return
    wanted = student_config(policy, layers)
    for field in dataclasses.fields(ModelConfig):
        value = getattr(path, field.name)
        needed = getattr(wanted, field.name)
        require(
            value == needed or field.name in FREE_OF_STUDENT,
            f"drafter.path holds no student of {layers} layers of this model: its {field.name} is"
            f" {value}, not {needed}; give one that was made from it, or '' to begin with the"
            " model's own layers.",
        )
