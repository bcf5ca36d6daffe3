"""Check the keys of prompts, generation and drafting, and the models that work on samples."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import math

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.checks import require, require_not_negative, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.data.rows import is_dataset, is_file_name
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation import drafting
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.placement.plan import Plan
from rlhf_jax.runtime.files import find, is_remote
from rlhf_jax.training.distill import student_config
from rlhf_jax.types import ModelConfig, ModelConfigs

OWN_ARGUMENTS = ("messages", "add_generation_prompt")  # of a chat template, set by the run
MOST_SAMPLED = 64  # the largest top-k whose sampled sets are kept for training
# Fields of its shape in which a student may differ: embedding and head are the policy's, and the
# context is checked for every model.
FREE_OF_STUDENT = ("max_context", "tied", "scalar_head")


def check_data(config: Config) -> None:
    """Check that model and prompts are named, with valid templates and columns."""
    require(
        bool(config.model.path),
        "model.path is empty; give --model a folder, a .gguf file or a hub name.",
    )
    require_positive(config, "data.max_prompt_tokens")
    require(
        not (config.data.raw and (config.data.system or config.data.template_arguments)),
        "data.raw leaves the chat template out, which data.system and data.template_arguments are"
        " for; give one or the other.",
    )
    require(
        not (config.data.raw and algorithm_of(config).rates_chats),
        "data.raw is set, but a reward model reads chats by their template; clear it.",
    )
    require(
        bool(config.data.train),
        "data.train is empty; give a .jsonl or .parquet file of prompts, a data set, or a function"
        " that returns rows, FILE.py:NAME.",
    )
    require_one_of(config, "data.on_bad_row", ("error", "skip"))
    _check_date(config)
    _check_template_arguments(config)
    _check_columns(config)
    sources = {f"data.{key}": config.data[key] for key in ("train", "eval")}
    sources |= {f"data.mixture[{index}]": path for index, path in enumerate(config.data.mixture)}
    shares = config.data.shares
    require(
        len(shares) in (0, 1 + len(config.data.mixture)),
        f"data.shares is {tuple(shares)}; give one for data.train and each of data.mixture.",
    )
    require(
        all(isinstance(share, int | float) and 0 < share < math.inf for share in shares),
        f"data.shares is {tuple(shares)}; shares must be numbers above 0.",
    )
    for key, path in sources.items():
        if is_file_name(path) and not is_remote(path) and not find(path).is_file():
            raise FileNotFoundError(f"{key}: there is no file {path}.")
        require(
            not path or not is_dataset(path) or importlib.util.find_spec("datasets") is not None,
            f"{key} is {path}, which is no .jsonl or .parquet file but a data set: pip install"
            " 'rlhf_jax[datasets]' to read it.",
        )


def _check_date(config: Config) -> None:
    """Check that the date for chat templates is a valid YYYY-MM-DD."""
    date = config.data.date
    try:
        fits = not date or datetime.date.fromisoformat(date).isoformat() == date
    except ValueError:
        fits = False
    require(fits, f"data.date is {date!r}; it must be a day as 2024-01-31, or ''.")


def _check_template_arguments(config: Config) -> None:
    """Check that a chat template can take the arguments, including tools and documents."""
    arguments = config.data.template_arguments.to_dict()
    clashes = [name for name in OWN_ARGUMENTS if name in arguments]
    require(
        not clashes, f"data.template_arguments has {', '.join(clashes)}, which the run sets itself."
    )
    for name in ("tools", "documents"):
        value = arguments.get(name)
        fits = isinstance(value, list | tuple) and all(isinstance(item, dict) for item in value)
        require(
            value is None or fits,
            f"data.template_arguments: {name} is {value!r:.60}; it must be a list of objects.",
        )


def _check_columns(config: Config) -> None:
    """Check that new names of columns are texts, and that no two columns get the same."""
    columns = config.data.columns.to_dict()
    names = [*columns, *columns.values()]
    require(
        all(isinstance(name, str) and name for name in names),
        f"data.columns is {columns!r:.80}; it must hold old and new names, none empty.",
    )
    new = list(columns.values())
    twice = [name for name in new if new.count(name) > 1]
    require(not twice, f"data.columns renames two columns to {twice and twice[0]!r}; name each.")


def check_generation(config: Config) -> None:
    """Check the sampling options, the number of rows, the drafting strategy and the drafter."""
    generation = config.generation
    positive = (
        "prompts_per_step",
        "samples_per_prompt",
        "max_new_tokens",
        "temperature",
        "max_rows",
        "min_rows",
    )
    require_positive(config, *(f"generation.{name}" for name in positive))
    not_negative = ("history_tokens", "resample", "repeated_noise", "fewest_samples", "hottest")
    require_not_negative(config, *(f"generation.{name}" for name in not_negative))
    require(
        generation.top_p == 1 and 0 <= generation.top_k <= MOST_SAMPLED,
        f"generation.top_p is {generation.top_p} and generation.top_k {generation.top_k}: other"
        f" truncation than a top_k of up to {MOST_SAMPLED} is for evaluation: training"
        " renormalises.",
    )
    require(
        all(isinstance(string, str) and string for string in generation.stop_strings),
        f"generation.stop_strings is {generation.stop_strings}; it must hold texts, none empty.",
    )
    require_one_of(config, "generation.acceptance", tuple(RULES))
    _check_dynamic_sampling(config)
    _check_strategy(config)
    _check_drafter(config)


def _check_dynamic_sampling(config: Config) -> None:
    """Check that samples and temperatures may depend on the rewards of earlier visits."""
    generation = config.generation
    if not derived.samples_dynamically(config):
        return
    require(
        generation.fewest_samples <= generation.samples_per_prompt,
        f"generation.fewest_samples is {generation.fewest_samples}, more than samples_per_prompt ="
        f" {generation.samples_per_prompt}; lower it.",
    )
    require(
        generation.fewest_samples != 1,
        "generation.fewest_samples is 1, and a prompt's samples are compared; give 2 or more.",
    )
    require(
        not (config.training.lag or generation.fuse_inference or generation.repeated_noise),
        "generation.fewest_samples and generation.hottest need training.lag = 0,"
        " generation.repeated_noise = 0 and no generation.fuse_inference.",
    )
    require(
        not algorithm_of(config).temperatures(config),
        "algorithm.temperatures gives each sample its own; set generation.fewest_samples and"
        " generation.hottest to 0.",
    )


def _check_strategy(config: Config) -> None:
    """Check that the drafting strategy has the drafts and the noise that it needs."""
    generation = config.generation
    repeated = generation.repeated_noise
    replays = drafting.replays(config)
    require(
        not RULES[generation.acceptance].depends_on_drafts or not (repeated or replays),
        f"Under generation.acceptance {generation.acceptance!r} a text depends on its drafts and"
        " cannot be replayed: set generation.repeated_noise to 0 and no 'replay-*' strategy, or"
        " acceptance 'replayable'.",
    )
    require(
        not repeated or replays,
        f"generation.repeated_noise is {repeated}, but generation.strategy"
        f" {generation.strategy!r} replays nothing: choose 'adaptive' or a 'replay-*' strategy, or"
        " set 0.",
    )
    require(
        repeated <= generation.samples_per_prompt,
        f"generation.repeated_noise is {repeated} of {generation.samples_per_prompt} samples of a"
        " prompt; lower it.",
    )
    require(
        derived.names_model(config) or not drafting.drafts_by_model(config),
        f"generation.strategy {generation.strategy!r} drafts with a model; give drafter.path or"
        " drafter.layers.",
    )


def _check_drafter(config: Config) -> None:
    """Check that a learning drafter is a student, has a use and has samples."""
    drafter = config.drafter
    generation = config.generation
    require_not_negative(config, "drafter.layers", "drafter.learning_rate")
    require_positive(config, "drafter.samples")
    require(
        drafter.layers > 0 or not drafter.learning_rate,
        f"drafter.learning_rate is {drafter.learning_rate}, but only a student is kept current:"
        " set drafter.layers, or 0.",
    )
    require(
        drafting.has_drafter(config) or not drafter.learning_rate,
        f"drafter.learning_rate is {drafter.learning_rate}, but generation.strategy"
        f" {generation.strategy!r} has no use for a student: choose 'adaptive' or a 'model-*'"
        " strategy, or set 0.",
    )
    samples = generation.prompts_per_step * generation.samples_per_prompt
    learns_beside = drafting.trains_drafter(config) and not derived.makes_drafter(config)
    require(
        drafter.samples <= samples or not learns_beside,
        f"drafter.samples is {drafter.samples}, but a step has {samples}; lower it.",
    )


def slices_key(config: Config) -> str:
    """Name the key or file that sets the number of slices of generation."""
    in_file = config.plan.endswith(".json")
    return f"slices of generation in {config.plan}" if in_file else "mesh.slices"


def check_fused_inference(config: Config, slices: int) -> None:
    """Check that scoring during generation has idle slices, models and nondeterminism."""
    fused = config.generation.fuse_inference
    require(
        not fused or slices > 1,
        "generation.fuse_inference needs slices that end apart, and"
        f" {slices_key(config)} is 1; raise it or leave the key False.",
    )
    require(
        not fused or bool(derived.scorers(config)) or bool(config.reward.models),
        "generation.fuse_inference has nothing to score with the algorithm"
        f" {config.algorithm.name!r}; leave the key False.",
    )
    require(
        not fused or not config.deterministic,
        "generation.fuse_inference scores a sample where there is time, which a deterministic run"
        " must not do; leave one of the two keys False.",
    )
    require(
        not (fused and config.mesh.idle_on_host),
        "generation.fuse_inference scores beside generation, with models that mesh.idle_on_host"
        " keeps on the host meanwhile; leave one of the two keys False.",
    )


def check_lag(config: Config, plan: Plan) -> None:
    """Check that prefetched samples have devices, and an algorithm that weighs them."""
    lag = config.training.lag
    require(
        lag in (0, 1), f"training.lag is {lag}; it must be 0, or 1 to draw samples one step ahead."
    )
    require_positive(config, "training.lag_clip")
    if not lag:
        return
    loss = algorithm_of(config).losses.get("policy")
    weighs = loss is not None and "advantages" in loss.reads
    require(
        weighs,
        f"training.lag is 1, and algorithm {config.algorithm.name!r} does not weigh samples of"
        " older weights, as it reads no advantages; set it to 0.",
    )
    devices = set(plan.placements["generation"].devices)
    shared = [
        call
        for call, placed in plan.placements.items()
        if call != "generation" and devices & set(placed.devices)
    ]
    require(
        not shared,
        "training.lag is 1, and generation has no devices of its own:"
        f" {', '.join(shared)} on them too; set plan to 'disaggregated', or the lag to 0.",
    )
    for key in ("resample", "fuse_inference"):
        require(
            not config.generation[key],
            f"training.lag is 1, and generation.{key} waits for the rewards or models of the step"
            f" that still trains; leave {key} out, or set the lag to 0.",
        )


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
        kind = "sequence classifier" if pairs else "language model"
        needed = "language model" if pairs else "sequence classifier"
        require(model.scalar_head != pairs, f"reward.{key}: {path} is a {kind}; give a {needed}.")
    _check_sizes(config, models)
    require(
        drafter is None
        or config.generation.acceptance == "replayable"
        or drafter.vocab_size == policy.vocab_size,
        "Rejection compares distributions over one vocabulary: the drafter's has"
        f" {drafter and drafter.vocab_size} tokens, the model's {policy.vocab_size}; use"
        " acceptance 'replayable' or another drafter.",
    )
    for name, model in (("critic.path", critic), ("kl.reference", reference)):
        require(
            model is None or model.vocab_size >= policy.vocab_size,
            f"{name} has a vocabulary of {model and model.vocab_size}, and the model may write"
            f" {policy.vocab_size} tokens; give a model that can read all of them.",
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
    top_k = config.evaluation.top_k
    require(
        top_k <= policy.vocab_size,
        f"evaluation.top_k is {top_k}, but the model has {policy.vocab_size} tokens; lower it.",
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


def check_tokenizers(policy: Tokenizer, reference: Tokenizer, critic: Tokenizer) -> None:
    """Raise ValueError unless their ids mean the same tokens; vocabularies may be padded.

    A critic may name added tokens otherwise, as classifiers often do with tokens that no text has.
    """
    for role, key, model in (
        ("reference", "kl.reference", reference),
        ("critic", "critic.path", critic),
    ):
        own, other = (
            tokenizer.backend.get_vocab(with_added_tokens=role != "critic")
            for tokenizer in (policy, model)
        )
        different = next((token for token in own if own[token] != other.get(token)), None)
        require(
            different is None,
            f"{key} has another tokenizer than the model: {different!r:.40} is token"
            f" {own.get(different or '')} of the model and {other.get(different or '')} of the"
            f" {role}; give a model of the same tokenizer.",
        )


def check_student(config: Config, policy: ModelConfig, drafter: ModelConfig | None) -> None:
    """Raise ValueError if a student cannot be made from the policy, or is not in drafter.path.

    A run without drafter.layers has none, and passes. drafter: the shape of the model in
    drafter.path; None if that is empty.
    """
    layers = config.drafter.layers if drafting.has_drafter(config) else 0
    require(
        layers <= policy.num_layers,
        f"drafter.layers is {layers}, but the model has {policy.num_layers} layers to make a"
        " student of; lower it.",
    )
    if not layers or drafter is None:
        return
    wanted = student_config(policy, layers)
    for field in dataclasses.fields(ModelConfig):
        value = getattr(drafter, field.name)
        needed = getattr(wanted, field.name)
        require(
            value == needed or field.name in FREE_OF_STUDENT,
            f"drafter.path holds no student of {layers} layers of this model: its {field.name} is"
            f" {value}, not {needed}; give one that was made from it, or '' to begin with the"
            " model's own layers.",
        )
