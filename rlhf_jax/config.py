"""All keys of a run: their defaults, and what makes them valid."""

from __future__ import annotations

import operator
import pathlib
from typing import Any

from ml_collections import ConfigDict

from rlhf_jax import mesh
from rlhf_jax.generation import tree
from rlhf_jax.inference.rewards import load_reward
from rlhf_jax.types import ModelConfig

# An ml_collections.ConfigDict; type checkers cannot know its keys.
Config = Any
MOST_SAMPLED = 64  # the largest top-k whose sampled sets are kept for training
DTYPES = ("auto", "float32", "bfloat16")
ACCEPTANCE = ("replayable", "rejection")


def default() -> Config:
    """Every key of a run with its default, locked: a config file changes values and adds no keys."""
    config = ConfigDict(
        {
            "workdir": "runs/default",  # all of a run lives here: metrics, samples, the trained policy
            "steps": 100,  # roll-out and update, that many times
            "seed": 0,  # of prompts, sampling and training; the same seed gives the same run
            "model": _model(),
            "drafter": {"path": ""},  # the small model of the 'model-*' strategies, given as model.path is
            "data": _data(),
            "reward": _reward(),
            "generation": _generation(),
            "evaluation": _evaluation(),
            "training": _training(),
            "mesh": _mesh(),
            "compilation_cache": "~/.cache/rlhf_jax/compiled",  # of programs, between runs; '' for none
        }
    )
    return config.lock()


def _model() -> dict:
    return {
        "path": "",  # Hugging Face folder, .gguf file, or hub name org/name
        "compute_dtype": "auto",  # of matrix products: bfloat16 on accelerators and float32 on CPU, or named
    }


def _data() -> dict:
    return {
        "train": "",  # .jsonl or .parquet file of prompts
        "eval": "",  # held-out prompts, '' for none
        "prompt_key": "prompt",  # the field that holds a string or chat messages
        "system": "",  # system prompt before every prompt, '' for none
        "max_prompt_tokens": 256,  # longer prompts are dropped and counted
    }


def _reward() -> dict:
    return {
        "function": "",  # FILE.py:function or package.module:function of (prompt, response, row) -> float
        "metrics": ConfigDict(),  # name -> function as above: measured in evaluation, never trained on
    }


def _generation() -> dict:
    return {
        "prompts_per_step": 8,  # different prompts of one roll-out
        "samples_per_prompt": 4,  # the group that advantages are relative to
        "max_new_tokens": 128,  # the longest response
        "temperature": 1.0,  # of the sampled law, and of the one that is trained
        "top_k": 0,  # sample among the k likeliest, at most 64; 0 for all
        "top_p": 1.0,  # for evaluation only: refused here unless 1
        "strategy": "plain",  # or lookup-chain-4, model-chain-4, model-tree-2x2x1, ...
        "acceptance": "replayable",  # drafts equal to the target's own draw, or 'rejection'
        "rows": 32,  # live rows at most
        "fewest_rows": 8,  # in the tail the batch halves down to this; each halving is a program to compile
        "history_tokens": 0,  # of earlier roll-outs of the same prompt, for lookup
    }


def _evaluation() -> dict:
    return {
        "every": 0,  # steps between evaluations on data.eval, and one at each end; 0 for none
        "samples_per_prompt": 1,  # their mean is reported
        "temperature": 1.0,  # 0 is the likeliest token
        "top_p": 1.0,  # sample among the likeliest tokens of this joint probability
        "top_k": 0,  # sample among the k likeliest; 0 for all
    }


def _training() -> dict:
    return {
        "epochs": 1,  # times that each roll-out is trained on
        "minibatches": 1,  # optimizer steps an epoch
        "microbatch_rows": 8,  # rows over all devices whose activations exist at one time
        "learning_rate": 1e-6,  # of AdamW
        "warmup_steps": 0,  # optimizer steps in which the rate rises linearly
        "weight_decay": 0.0,  # of AdamW; norms and biases are spared
        "max_grad_norm": 1.0,  # the gradient is clipped to this global norm
        "clip_low": 0.2,  # the ratio is clipped at 1 - clip_low
        "clip_high": 0.2,  # and at 1 + clip_high
        "kl_coefficient": 0.04,  # of the KL divergence to the reference; 0 keeps no reference
        "remat": True,  # keep only each layer's input for the backward pass
        "length_bucket": 64,  # token slots of a micro-batch are a multiple of this
    }


def _mesh() -> dict:
    return {
        "data": 1,  # copies of the weights; -1 for the devices that are left
        "fsdp": -1,  # devices over which the weights are split in training
        "tensor": 1,  # devices over which heads, feed-forward and vocabulary are split
        "device_memory_gb": 0.0,  # 10^9 bytes; 0 asks the device
    }


def keys(config: Config, prefix: str = "") -> set[str]:
    """Dotted names of all values; `reward.metrics` is one value."""
    names = set()
    for key, value in config.items():
        nested = isinstance(value, ConfigDict) and prefix + key != "reward.metrics"
        names |= keys(value, f"{prefix}{key}.") if nested else {prefix + key}
    return names


def validate(config: Config, num_devices: int) -> None:
    """Raise ValueError or FileNotFoundError with one sentence for the first thing that cannot work.

    Files are looked for and the rewards imported; the model itself is checked where it is opened.
    """
    for check in (_check_run, _check_files, _check_rewards, _check_generation, _check_evaluation):
        check(config)
    _check_training(config)
    _check_batch(config, mesh.sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, num_devices))


def validate_models(config: Config, policy: ModelConfig, drafter: ModelConfig | None) -> None:
    """Raise ValueError where a sample exceeds a model's context, or the drafter speaks another vocabulary."""
    longest = config.data.max_prompt_tokens + config.generation.max_new_tokens
    for name, model in (("model", policy), ("drafter", drafter)):
        _require(
            model is None or longest <= model.max_context,
            f"data.max_prompt_tokens + generation.max_new_tokens is {longest}, but the {name}'s context is"
            f" {model and model.max_context}; lower one of the two.",
        )
    _require(
        drafter is None or config.generation.acceptance == "replayable" or drafter.vocab_size == policy.vocab_size,
        f"Rejection compares laws over one vocabulary: the drafter's has {drafter and drafter.vocab_size} tokens, the"
        f" model's {policy.vocab_size}; use acceptance 'replayable' or another drafter.",
    )


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _positive(config: Config, *names: str) -> None:
    for name in names:
        value = operator.attrgetter(name)(config)
        _require(value > 0, f"{name} is {value}; it must be above 0.")


def _not_negative(config: Config, *names: str) -> None:
    for name in names:
        value = operator.attrgetter(name)(config)
        _require(value >= 0, f"{name} is {value}; it must be 0 or above.")


def _check_run(config: Config) -> None:
    _require(bool(config.workdir), "workdir is empty; name the folder in which all of the run shall live.")
    _positive(config, "steps")
    _require(0 <= config.seed < 2**32, f"seed is {config.seed}; it must lie in 0 .. 2^32 - 1.")
    _not_negative(config, "mesh.device_memory_gb")
    dtype = config.model.compute_dtype
    _require(dtype in DTYPES, f"model.compute_dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")


def _check_files(config: Config) -> None:
    _require(bool(config.model.path), "model.path is empty; give a folder, a .gguf file or a hub name.")
    _positive(config, "data.max_prompt_tokens")
    _require(bool(config.data.train), "data.train is empty; give a .jsonl or .parquet file of prompts.")
    for key in ("train", "eval"):
        path = config.data[key]
        if path and not pathlib.Path(path).expanduser().is_file():
            raise FileNotFoundError(f"data.{key}: there is no file {path}.")


def _check_rewards(config: Config) -> None:
    function = config.reward.function
    _require(bool(function), "reward.function is empty; give FILE.py:function or package.module:function.")
    for spec in (function, *config.reward.metrics.values()):
        load_reward(spec)


def _check_generation(config: Config) -> None:
    generation = config.generation
    names = ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "temperature", "rows", "fewest_rows")
    _positive(config, *(f"generation.{name}" for name in names))
    _not_negative(config, "generation.history_tokens")
    _require(
        generation.top_p == 1 and 0 <= generation.top_k <= MOST_SAMPLED,
        f"generation.top_p is {generation.top_p} and generation.top_k {generation.top_k}: other"
        f" truncation than a top_k of up to {MOST_SAMPLED} is for evaluation: training renormalises.",
    )
    _require(
        generation.acceptance in ACCEPTANCE,
        f"generation.acceptance is {generation.acceptance!r}; it must be one of {', '.join(ACCEPTANCE)}.",
    )
    wants_model = tree.parse(generation.strategy).drafter == "model"
    _require(
        bool(config.drafter.path) or not wants_model,
        f"generation.strategy {generation.strategy!r} drafts with a model; give drafter.path.",
    )


def _check_evaluation(config: Config) -> None:
    _not_negative(config, "evaluation.every", "evaluation.temperature", "evaluation.top_k")
    _positive(config, "evaluation.samples_per_prompt")
    top_p = config.evaluation.top_p
    _require(0 < top_p <= 1, f"evaluation.top_p is {top_p}; it must lie above 0 and at most at 1.")
    _require(
        bool(config.data.eval) or not config.evaluation.every,
        f"evaluation.every is {config.evaluation.every} but data.eval is empty; give held-out prompts, or 0.",
    )


def _check_training(config: Config) -> None:
    positive = ("epochs", "minibatches", "microbatch_rows", "learning_rate", "max_grad_norm", "length_bucket")
    _positive(config, *(f"training.{name}" for name in (*positive, "clip_low", "clip_high")))
    zero = ("warmup_steps", "weight_decay", "kl_coefficient")
    _not_negative(config, *(f"training.{name}" for name in zero))
    clip, group = config.training.clip_low, config.generation.samples_per_prompt
    _require(clip < 1, f"training.clip_low is {clip}; it must be below 1.")
    _require(group > 1, f"generation.samples_per_prompt is {group}; GRPO compares two or more of a prompt.")


def _check_batch(config: Config, shape: dict[str, int]) -> None:
    """Every split of the rows comes out even: minibatches, micro-batches, devices."""
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    minibatches, rows = config.training.minibatches, config.training.microbatch_rows
    shards = shape["data"] * shape["fsdp"]
    _even(samples, minibatches, "samples of a step (prompts x samples per prompt)", "training.minibatches")
    _even(samples // minibatches, rows, "rows of a minibatch", "training.microbatch_rows")
    _even(rows, shards, "rows of training.microbatch_rows", "mesh.data x mesh.fsdp")
    _even(config.generation.rows, shards, "rows of generation.rows", "mesh.data x mesh.fsdp")


def _even(whole: int, parts: int, what: str, by: str) -> None:
    fits = whole > 0 and whole % parts == 0
    _require(fits, f"The {whole} {what} cannot be split evenly by {by} = {parts}; change one of them.")
