"""Check the keys of generation, drafting and scoring during generation."""

from __future__ import annotations

from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.checks import require, require_not_negative, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.placement.plan import Plan

MOST_SAMPLED = 64  # the largest top-k whose sampled sets are kept for training


def check_generation(config: Config) -> None:
    """Check the sampling options and the number of rows."""
    generation = config.generation
    of_samples = ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "temperature")
    positive = (*of_samples, "max_rows", "min_rows")
    require_positive(config, *(f"generation.{name}" for name in positive))
    not_negative = ("history_tokens", "resample", "repeated_noise")
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


def check_strategy(config: Config) -> None:
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


def check_drafter(config: Config) -> None:
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
