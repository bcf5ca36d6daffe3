"""What makes a config valid: every mistake is one sentence, before any weight is loaded."""

from __future__ import annotations

import math
import operator
import pathlib
from collections.abc import Sequence

from pallas_kernels import dispatch
from rlhf_jax import mesh
from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config, ModelConfigs, flat
from rlhf_jax.rewards.combination import load_reward
from rlhf_jax.training import kl
from rlhf_jax.training.advantages import ESTIMATORS
from rlhf_jax.training.distill import student_config
from rlhf_jax.training.losses import AGGREGATES
from rlhf_jax.types import ModelConfig

MOST_SAMPLED = 64  # the largest top-k whose sampled sets are kept for training
DTYPES = ("auto", "float32", "bfloat16")
ACCEPTANCE = ("replayable", "rejection")
KL_PLACES = ("loss", "reward")
OBJECTIVES = ("reward", "distill")


def validate(config: Config, num_devices: int, num_processes: int = 1) -> None:
    """Raise ValueError or FileNotFoundError with one sentence for the first thing that cannot work.

    Files are looked for and the rewards imported; the model itself is checked where it is opened.
    """
    _finite(config)
    _one_of(config, "objective", OBJECTIVES)
    for kernel in config.kernels:
        _one_of(config, f"kernels.{kernel}", dispatch.WANTED)
    earns = (
        (_check_rewards, _check_advantage, _check_kl)
        if config.objective == "reward"
        else (_check_distillation,)
    )
    for check in (
        _check_run,
        _check_files,
        _check_generation,
        _check_drafter,
        _check_evaluation,
        _check_training,
    ):
        check(config)
    for check in earns:
        check(config)
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    devices = mesh.abstract_mesh(mesh.sizes(*sizes, num_devices, config.mesh.slices))
    slices = devices.shape["slices"]
    _require(
        slices % num_processes == 0 or num_processes % slices == 0,
        f"mesh.slices is {slices}, and the run's {num_processes} processes cannot share them"
        " evenly: set mesh.slices"
        f" to a multiple of {num_processes} or to a number that divides it.",
    )
    _check_fusion(config, slices)
    _check_batch(config, devices)


def _check_fusion(config: Config, slices: int) -> None:
    """Inference fused with generation needs a slice to spare, and who scores what depends on the
    clock.
    """
    fused = config.generation.fuse_inference
    _require(
        not fused or slices > 1,
        "generation.fuse_inference needs slices that end apart, and mesh.slices is 1; raise it or"
        " leave the key False.",
    )
    _require(
        not fused or config.objective == "reward",
        "generation.fuse_inference has nothing to score with the objective 'distill'; leave the"
        " key False.",
    )
    _require(
        not fused or not config.deterministic,
        "generation.fuse_inference scores a sample where there is time, which a deterministic run"
        " must not do; leave"
        " one of the two keys False.",
    )


def validate_models(config: Config, models: ModelConfigs) -> None:
    """Raise ValueError where a model is of the wrong kind, has too short a context or another
    vocabulary.
    """
    policy, drafter, critic, rewards = models
    for name, model in (("model", policy), ("drafter", drafter)):
        _require(
            model is None or not model.scalar_head,
            f"{name}.path is a reward model, which scores text and cannot write it; give a"
            " language model.",
        )
    for path, model in zip(config.reward.models, rewards, strict=True):
        _require(
            model.scalar_head,
            f"reward.models: {path} is a language model; give a sequence classifier.",
        )
    longest = config.data.max_prompt_tokens + config.generation.max_new_tokens
    for name, model in (("model", policy), ("drafter", drafter), ("critic", critic)):
        _require(
            model is None or longest <= model.max_context,
            f"data.max_prompt_tokens + generation.max_new_tokens is {longest}, but the {name}'s"
            " context is"
            f" {model and model.max_context}; lower one of the two.",
        )
    _require(
        drafter is None
        or config.generation.acceptance == "replayable"
        or drafter.vocab_size == policy.vocab_size,
        "Rejection compares laws over one vocabulary: the drafter's has"
        f" {drafter and drafter.vocab_size} tokens, the"
        f" model's {policy.vocab_size}; use acceptance 'replayable' or another drafter.",
    )
    _require(
        critic is None or critic.vocab_size == policy.vocab_size,
        "The critic reads the policy's tokens: its vocabulary has"
        f" {critic and critic.vocab_size}, the model's"
        f" {policy.vocab_size}; give a critic.path of the same vocabulary, or '' for the policy's"
        " own trunk.",
    )


def validate_student(config: Config, policy: ModelConfig, path: ModelConfig | None) -> None:
    """Raise ValueError where a student cannot be made of the policy, or is not what drafter.path
    holds.
    """
    layers = config.drafter.layers if derived.drafts(config) else 0
    _require(
        layers <= policy.num_layers,
        f"drafter.layers is {layers}, but the model has {policy.num_layers} layers to make a"
        " student of; lower it.",
    )
    if not layers or path is None:
        return
    wanted = student_config(policy, layers)
    names = (
        "num_layers",
        "width",
        "ffn_width",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "family",
    )
    for name in (*names, "rope_theta", "rope_scaling", "norm_eps", "qkv_bias", "qk_norm"):
        found = getattr(path, name)
        needed = getattr(wanted, name)
        _require(
            found == needed,
            f"drafter.path holds no student of {layers} layers of this model: its {name} is"
            f" {found}, not {needed};"
            " give one that was made from it, or '' to begin with the model's own layers.",
        )


def needs_reference(config: Config) -> bool:
    """Whether a run has a reference, from which KL is measured."""
    return config.objective == "reward" and config.kl.coefficient > 0


def term_names(config: Config) -> list[str]:
    """What metrics call the reward's functions and models, in order: a function's name, the last
    part of a path.
    """
    functions = [spec.rpartition(":")[2] for spec in config.reward.functions]
    return functions + [pathlib.PurePath(path).name for path in config.reward.models]


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _one_of(config: Config, name: str, known: Sequence[str]) -> None:
    value = operator.attrgetter(name)(config)
    _require(value in known, f"{name} is {value!r}; it must be one of {', '.join(known)}.")


def _finite(config: Config) -> None:
    for name, value in flat(config).items():
        _require(
            not isinstance(value, float) or math.isfinite(value),
            f"{name} is {value}; it must be finite.",
        )


def _positive(config: Config, *names: str) -> None:
    for name in names:
        value = operator.attrgetter(name)(config)
        _require(value > 0, f"{name} is {value}; it must be above 0.")


def _not_negative(config: Config, *names: str) -> None:
    for name in names:
        value = operator.attrgetter(name)(config)
        _require(value >= 0, f"{name} is {value}; it must be 0 or above.")


def _check_run(config: Config) -> None:
    _require(
        bool(config.workdir),
        "workdir is empty; name the folder in which all of the run shall live.",
    )
    _positive(config, "steps", "checkpoint.keep")
    _require(0 <= config.seed < 2**32, f"seed is {config.seed}; it must lie in 0 .. 2^32 - 1.")
    _not_negative(config, "mesh.device_memory_gb", "watchdog_seconds", "checkpoint.every")
    _one_of(config, "model.compute_dtype", DTYPES)


def _check_files(config: Config) -> None:
    _require(
        bool(config.model.path), "model.path is empty; give a folder, a .gguf file or a hub name."
    )
    _positive(config, "data.max_prompt_tokens")
    _require(
        bool(config.data.train), "data.train is empty; give a .jsonl or .parquet file of prompts."
    )
    for key in ("train", "eval"):
        path = config.data[key]
        if path and not pathlib.Path(path).expanduser().is_file():
            raise FileNotFoundError(f"data.{key}: there is no file {path}.")


def _check_rewards(config: Config) -> None:
    reward = config.reward
    terms = len(reward.functions) + len(reward.models)
    _require(
        terms > 0,
        "reward.functions and reward.models are empty; give FILE.py:function or a folder.",
    )
    _require(
        len(reward.weights) in (0, terms),
        f"reward.weights has {len(reward.weights)} entries for {terms} functions and models; give"
        " one for each.",
    )
    names = term_names(config)
    _require(
        len(set(names)) == terms,
        f"The reward's functions and models are called {', '.join(names)} in the metrics; rename"
        " one of the same name.",
    )
    numbers = all(
        isinstance(weight, int | float) and math.isfinite(weight) for weight in reward.weights
    )
    _require(numbers, f"reward.weights is {reward.weights}; it must hold finite numbers.")
    _positive(config, "reward.workers", "reward.seconds")
    _not_negative(config, "reward.missing_end", "reward.clip")
    for spec in (*reward.functions, *reward.metrics.values()):
        load_reward(spec)
    _require(
        "reward" not in reward.metrics,
        "reward.metrics names a measure 'reward', which is training's; rename it.",
    )


def _check_generation(config: Config) -> None:
    generation = config.generation
    names = (
        "prompts_per_step",
        "samples_per_prompt",
        "max_new_tokens",
        "temperature",
        "max_rows",
        "min_rows",
    )
    _positive(config, *(f"generation.{name}" for name in names))
    _not_negative(
        config, *(f"generation.{name}" for name in ("history_tokens", "resample", "repeated_noise"))
    )
    _require(
        generation.top_p == 1 and 0 <= generation.top_k <= MOST_SAMPLED,
        f"generation.top_p is {generation.top_p} and generation.top_k {generation.top_k}: other"
        f" truncation than a top_k of up to {MOST_SAMPLED} is for evaluation: training"
        " renormalises.",
    )
    _one_of(config, "generation.acceptance", ACCEPTANCE)
    _require(
        generation.acceptance == "replayable"
        or not (generation.repeated_noise or derived.uses_drafter(config, "replay")),
        "Under generation.acceptance 'rejection' a text depends on its drafts and cannot be"
        " replayed: set"
        " generation.repeated_noise to 0 and no 'replay-*' strategy, or acceptance 'replayable'.",
    )
    _require(
        not generation.repeated_noise or derived.uses_drafter(config, "replay"),
        f"generation.repeated_noise is {generation.repeated_noise}, but generation.strategy"
        f" {generation.strategy!r}"
        " replays nothing: choose 'adaptive' or a 'replay-*' strategy, or set 0.",
    )
    _require(
        generation.repeated_noise <= generation.samples_per_prompt,
        f"generation.repeated_noise is {generation.repeated_noise} of"
        f" {generation.samples_per_prompt} samples of a"
        " prompt; lower it.",
    )
    wants_model = derived.uses_drafter(config, "model")
    _require(
        bool(config.drafter.path or config.drafter.layers) or not wants_model,
        f"generation.strategy {generation.strategy!r} drafts with a model; give drafter.path or"
        " drafter.layers.",
    )


def _check_drafter(config: Config) -> None:
    drafter = config.drafter
    generation = config.generation
    _not_negative(config, "drafter.layers", "drafter.learning_rate")
    _positive(config, "drafter.samples")
    _require(
        drafter.layers > 0 or not drafter.learning_rate,
        f"drafter.learning_rate is {drafter.learning_rate}, but only a student is kept current:"
        " set drafter.layers, or"
        " 0.",
    )
    _require(
        derived.drafts(config) or not drafter.learning_rate,
        f"drafter.learning_rate is {drafter.learning_rate}, but generation.strategy"
        f" {generation.strategy!r} has no use"
        " for a student: choose 'adaptive' or a 'model-*' strategy, or set 0.",
    )
    samples = generation.prompts_per_step * generation.samples_per_prompt
    _require(
        drafter.samples <= samples
        or not (derived.trains_drafter(config) and config.objective == "reward"),
        f"drafter.samples is {drafter.samples}, but a step has {samples}; lower it.",
    )


def _check_distillation(config: Config) -> None:
    """Objective 'distill' trains a student and nothing else, so what it would not use is
    refused.
    """
    _positive(config, "drafter.layers", "drafter.learning_rate")
    unused = [
        name
        for name in ("reward.functions", "reward.models", "evaluation.every", "generation.resample")
        if operator.attrgetter(name)(config)
    ]
    _require(
        not unused,
        "objective is 'distill', which trains a drafter and earns no reward: clear"
        f" {', '.join(unused)}.",
    )


def _check_evaluation(config: Config) -> None:
    _not_negative(config, "evaluation.every", "evaluation.temperature", "evaluation.top_k")
    _positive(config, "evaluation.samples_per_prompt")
    top_p = config.evaluation.top_p
    _require(0 < top_p <= 1, f"evaluation.top_p is {top_p}; it must lie above 0 and at most at 1.")
    _require(
        bool(config.data.eval) or not config.evaluation.every,
        f"evaluation.every is {config.evaluation.every} but data.eval is empty; give held-out"
        " prompts, or 0.",
    )


def _check_training(config: Config) -> None:
    positive = (
        "epochs",
        "minibatches",
        "microbatch_rows",
        "learning_rate",
        "max_grad_norm",
        "length_bucket",
    )
    _positive(config, *(f"training.{name}" for name in (*positive, "clip_low", "clip_high")))
    zero = ("warmup_steps", "weight_decay", "entropy_coefficient", "target_kl")
    _not_negative(config, *(f"training.{name}" for name in zero))
    clip = config.training.clip_low
    _require(clip < 1, f"training.clip_low is {clip}; it must be below 1.")
    _one_of(config, "training.aggregate", tuple(AGGREGATES))


def _check_advantage(config: Config) -> None:
    _one_of(config, "advantage.estimator", tuple(ESTIMATORS))
    name = config.advantage.estimator
    group = config.generation.samples_per_prompt
    _require(
        group > 1 or not ESTIMATORS[name].compares_group,
        f"generation.samples_per_prompt is {group}; {name} compares two or more of a prompt.",
    )
    _require(
        group > 1 or not config.generation.resample,
        f"generation.resample is {config.generation.resample}, but one sample of a prompt never"
        " differs from the"
        " others; raise generation.samples_per_prompt, or set 0.",
    )
    for key in ("discount", "gae_lambda"):
        value = config.advantage[key]
        _require(0 <= value <= 1, f"advantage.{key} is {value}; it must lie in 0 .. 1.")
    critic = ESTIMATORS[name].needs_critic
    _require(
        critic or not config.critic.path,
        f"critic.path is {config.critic.path!r}, but advantage.estimator {name!r} has no critic;"
        " choose 'gae', or ''.",
    )
    _positive(config, "critic.learning_rate", "critic.clip")
    _not_negative(config, "critic.warmup_steps")


def _check_kl(config: Config) -> None:
    _one_of(config, "kl.place", KL_PLACES)
    _one_of(config, "kl.estimator", tuple(kl.KL))
    _not_negative(config, "kl.coefficient", "kl.target")
    _positive(config, "kl.horizon")
    _require(
        config.kl.estimator != "k1" or config.kl.place == "reward",
        "kl.estimator is 'k1' and kl.place 'loss', where its gradient has mean zero; use k2 or"
        " k3, or place 'reward'.",
    )
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    _require(
        config.kl.horizon >= samples,
        f"kl.horizon is {config.kl.horizon}, less than the {samples} samples of a step: the"
        " coefficient could jump or"
        " turn negative; raise it.",
    )
    _require(
        config.kl.coefficient > 0 or not config.kl.target,
        f"kl.target is {config.kl.target}, but kl.coefficient is 0 and would stay there; give a"
        " start above 0.",
    )


def _check_batch(config: Config, devices: mesh.AnyMesh) -> None:
    """Every split of the rows comes out even: minibatches, micro-batches, devices."""
    samples = config.generation.prompts_per_step * config.generation.samples_per_prompt
    minibatches = config.training.minibatches
    rows = config.training.microbatch_rows
    shards = mesh.row_shards(devices)
    over = "mesh.slices x mesh.data x mesh.fsdp"
    _even(
        samples,
        minibatches,
        "samples of a step (prompts x samples per prompt)",
        "training.minibatches",
    )
    _even(samples // minibatches, rows, "rows of a minibatch", "training.microbatch_rows")
    _even(rows, shards, "rows of training.microbatch_rows", over)
    if derived.trains_drafter(config) and config.objective == "reward":
        part = min(config.drafter.samples, rows)
        _even(config.drafter.samples, part, "rows of drafter.samples", "training.microbatch_rows")
        _even(part, shards, "rows of drafter.samples at one time", over)
    a_slice = shards // devices.shape["slices"]
    _even(
        config.generation.max_rows, a_slice, "rows of generation.max_rows", "mesh.data x mesh.fsdp"
    )


def _even(whole: int, parts: int, what: str, by: str) -> None:
    fits = whole > 0 and whole % parts == 0
    _require(
        fits, f"The {whole} {what} cannot be split evenly by {by} = {parts}; change one of them."
    )
