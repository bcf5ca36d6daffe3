"""Check that a config can work; every mistake is one sentence, before any weight is loaded."""

from __future__ import annotations

import math
import operator
import re

from pallas_kernels import dispatch
from rlhf_jax.config import derived
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.checks import (
    require,
    require_even_split,
    require_not_negative,
    require_one_of,
    require_positive,
    require_texts,
)
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.losses.aggregate import AGGREGATES
from rlhf_jax.monitoring import sinks
from rlhf_jax.monitoring.callbacks import StopAt
from rlhf_jax.monitoring.meanings import meaning_of
from rlhf_jax.placement.pipelined import check_pipelines, is_pipelined
from rlhf_jax.placement.plan import Plan
from rlhf_jax.placement.presets import plan_of
from rlhf_jax.rewards.functions import Signature
from rlhf_jax.rewards.learned import LEARNED_REWARD, check_labels
from rlhf_jax.rewards.sources import check_sources, term_names
from rlhf_jax.runtime import mirror
from rlhf_jax.setup.sample_checks import (
    check_data,
    check_fused_inference,
    check_generation,
    check_lag,
    slices_key,
)
from rlhf_jax.training.optimizer import SCHEDULES

# Names that every evaluation writes as eval/NAME.
OWN_MEASURES = ("reward", "finished", "distinct_pairs", "generation/tokens_per_round")
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
HEARTBEATS = (5, 40)  # seconds; launchers end a run 50 s after a rank has died
TOO_LARGE = 1 << 31  # no number of a config is as large except the seed: shapes are 32 bits wide


def validate(config: Config, num_devices: int, num_processes: int = 1) -> dict[str, Signature]:
    """Check a config; return the call signatures of the reward's functions, by their specs.

    Files are looked for, and rewards imported in processes of their own; the model is checked when
    it is opened. Raises ValueError or FileNotFoundError, in one sentence, for the first problem.
    """
    check_values(config)
    _check_devices(config, num_devices, num_processes)
    # last, as the functions are imported
    return check_sources(config) if derived.rewarded(config) else {}


def check_values(config: Config) -> None:
    """Check the values of a config as far as that needs no device and no code of a reward's.

    Raises ValueError or FileNotFoundError, in one sentence, for the first problem.
    """
    require_texts(config)
    for name, value in flat(config).items():
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, f"{name} is {value}; it must be finite.")
        counts = isinstance(value, int) and name != "seed"
        require(not counts or abs(value) < TOO_LARGE, f"{name} is {value}; it must be below 2^31.")
    algorithm = algorithm_of(config)
    for kernel in config.kernels:
        require_one_of(config, f"kernels.{kernel}", dispatch.WANTED)

    _check_roles(config)
    _check_run(config)
    check_data(config)
    if derived.generates(config):
        check_generation(config)
    else:
        require_positive(config, "data.rows_per_step", "data.max_response_tokens")
    _check_evaluation(config)
    _check_training(config)
    _check_critic(config)
    if derived.rewarded(config):
        _check_rewards(config)
    algorithm.check_options(config)
    algorithm.check(config)
    _check_unused(config)
    _check_aggregate(config)


def _check_run(config: Config) -> None:
    """Check the workdir, the number of steps and the numerics of a run."""
    require(bool(config.workdir), "workdir is empty; name a folder for all files of the run.")
    mirror.require(config.workdir)
    require_positive(config, "checkpoint.keep")
    require(
        config.steps > 0 or (config.steps == 0 and config.evaluation.every > 0),
        f"steps is {config.steps}; it must be above 0, or with evaluations 0, to measure alone.",
    )
    require(
        not config.profile or re.fullmatch(r"\d+:\d+", config.profile) is not None,
        f"profile is {config.profile!r}; it must be '' or steps such as '5:7', both included.",
    )
    sinks.require(config.sinks)
    if config.stop_at:
        _check_measured(config, "stop_at", StopAt(config.stop_at).key)
    if best := config.checkpoint.best:
        require(
            best.startswith("eval/"),
            f"checkpoint.best is {best!r}; it must be a measure of evaluations, as 'eval/reward'.",
        )
        _check_measured(config, "checkpoint.best", best)
    require(0 <= config.seed < 2**32, f"seed is {config.seed}; it must lie in 0 .. 2^32 - 1.")
    require_not_negative(config, "mesh.device_memory_gb", "watchdog_seconds", "checkpoint.every")
    require_one_of(config, "model.compute_dtype", COMPUTE_DTYPES)
    check_heartbeat(config)


def _check_measured(config: Config, setting: str, key: str) -> None:
    """Check that a run will measure the metric that a setting names."""
    held_out = key.startswith("eval/")
    require(
        not held_out or config.evaluation.every > 0,
        f"{setting} names {key!r}, but evaluation.every is 0; give held-out prompts, and steps"
        " between evaluations.",
    )
    measures = [f"eval/{name}" for name in (*OWN_MEASURES, *config.reward.metrics)]
    measured = any(key == name or key.startswith(f"{name}/") for name in measures)
    require(
        measured or (not held_out and meaning_of(key) is not None),
        f"{setting} names {key!r}, which no run measures; the page of metrics lists the numbers of"
        f" a step, and those of an evaluation are {', '.join(measures)}.",
    )


def check_heartbeat(config: Config) -> None:
    """Raise ValueError for a heartbeat so short that slow processes would count as lost.

    This check alone runs before processes join.
    """
    seconds = config.heartbeat_seconds
    least, most = HEARTBEATS
    require(
        least <= seconds <= most,
        f"heartbeat_seconds is {seconds}; it must lie in {least} .. {most}.",
    )


def _check_evaluation(config: Config) -> None:
    """Check the sampling of held-out prompts, and that there are any."""
    require_not_negative(config, "evaluation.every", "evaluation.temperature", "evaluation.top_k")
    require_positive(config, "evaluation.samples_per_prompt")
    top_p = config.evaluation.top_p
    require(0 < top_p <= 1, f"evaluation.top_p is {top_p}; it must lie above 0 and at most at 1.")
    require(
        bool(config.data.eval) or not config.evaluation.every,
        f"evaluation.every is {config.evaluation.every} but data.eval is empty; give held-out"
        " prompts, or 0.",
    )


def _check_rewards(config: Config) -> None:
    """Check that rewards can be computed, weighed and distinguished."""
    reward = config.reward
    terms = len(reward.functions) + len(derived.reward_models(config))
    require(
        terms > 0,
        "reward.functions and reward.models are empty; give --reward FILE.py:function, or the"
        " folder of a reward model in reward.models or reward.preference_models.",
    )
    require(
        len(reward.weights) in (0, terms),
        f"reward.weights has {len(reward.weights)} entries for {terms} functions and models; give"
        " one for each.",
    )
    names = term_names(config)
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
    _check_groups(config)
    check_labels(config)
    for name in reward.metrics:
        require(
            bool(name) and name not in OWN_MEASURES and not name.endswith("/failed"),
            f"reward.metrics names a measure {name!r}, which is empty or the run's own; rename it.",
        )


def _check_groups(config: Config) -> None:
    """Check that a prompt has several samples where these are compared."""
    group = config.generation.samples_per_prompt
    measured = config.evaluation.samples_per_prompt if config.evaluation.every else 2
    for key, samples in (("generation", group), ("evaluation", measured)):
        require(
            samples > 1 or not config.reward.preference_models,
            f"reward.preference_models compare responses to one prompt; raise {key}"
            ".samples_per_prompt to at least 2.",
        )
    require(
        group > 1 or not config.generation.resample,
        f"generation.resample is {config.generation.resample}, but one sample of a prompt never"
        " differs from the others; raise generation.samples_per_prompt, or set 0.",
    )


def _check_training(config: Config) -> None:
    """Check the options of the optimizer and of the policy's loss."""
    positive = (
        "epochs",
        "minibatches",
        "microbatch_rows",
        "max_grad_norm",
        "length_bucket",
        "clip_low",
        "clip_high",
    )
    require_positive(config, *(f"training.{name}" for name in positive))
    not_negative = (
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "entropy_coefficient",
        "target_kl",
        "max_skipped",
        "microbatch_tokens",
    )
    require_not_negative(config, *(f"training.{name}" for name in not_negative))
    clip = config.training.clip_low
    require(clip < 1, f"training.clip_low is {clip}; it must be below 1.")
    require_one_of(config, "training.remat", ("auto", "on", "off"))
    require_one_of(config, "training.schedule", tuple(SCHEDULES))


def _check_aggregate(config: Config) -> None:
    """Check how losses are summed, by the config or by the algorithm."""
    require_one_of(config, "training.aggregate", ("auto", *AGGREGATES))
    aggregate = derived.aggregate_name(config)
    require(
        aggregate in AGGREGATES,
        f"The algorithm {config.algorithm.name!r}, its loss or its estimator brings the aggregate"
        f" {aggregate!r}, and there are {', '.join(AGGREGATES)}; mend it, or set"
        " training.aggregate.",
    )


def _check_roles(config: Config) -> None:
    """Check that no critic has the name of another model, a stage, or a folder of a run."""
    roles = {*derived.critics(config), *algorithm_of(config).losses}
    calls = ("generation", "reference", "reward", "student")
    folders = ("best", "checkpoints", "post-mortem", "profile", "sinks")
    learned = (LEARNED_REWARD,) if config.reward.labels else ()
    for name in calls + folders + learned:
        require(
            name not in roles,
            f"algorithm {config.algorithm.name!r} has a critic called {name!r}, as something else"
            " of a run is; give it another name.",
        )


def _check_unused(config: Config) -> None:
    """Check that a run names nothing that its algorithm does not use."""
    keys: list[str] = []
    if not derived.rewarded(config):
        keys += ["reward.functions", "reward.models", "reward.preference_models", "reward.labels"]
        keys += [f"generation.{name}" for name in ("resample", "fewest_samples", "hottest")]
    if not derived.generates(config):
        keys += ["drafter.path", "drafter.layers", "generation.fuse_inference"]
    if "reference" not in derived.scorers(config):
        keys += ["kl.reference"]
    unused = [key for key in keys if operator.attrgetter(key)(config)]
    require(
        not unused,
        f"Algorithm {config.algorithm.name!r} has no use for {', '.join(unused)}: clear what is"
        " named, or choose another.",
    )


def _check_critic(config: Config) -> None:
    """Check the options of a critic, which only some algorithms train."""
    require_positive(config, "critic.learning_rate", "critic.clip")
    require_not_negative(config, "critic.warmup_steps", "critic.steps_alone")
    for key, nothing in (("path", ""), ("steps_alone", 0)):
        value = config.critic[key]
        require(
            bool(derived.critics(config)) or not value,
            f"critic.{key} is {value!r}, but algorithm {config.algorithm.name!r} has no critic;"
            f" choose 'ppo', or {nothing!r}.",
        )


def _check_devices(config: Config, num_devices: int, num_processes: int) -> None:
    """Check the plan of calls, the slices of each process, and that rows split evenly."""
    plan = plan_of(config, num_devices)
    per_process = num_devices // num_processes
    for call, placed in plan.placements.items():
        ends = (placed.first, placed.first + placed.count)
        within_one = ends[0] // per_process == placed.devices[-1] // per_process
        require(
            within_one or not any(end % per_process for end in ends),
            f"plan {config.plan!r} gives {call} devices {ends[0]} to {ends[1] - 1}, and a process"
            f" has {per_process}: give it all devices of some processes, or devices of one.",
        )
    if generation := plan.placements.get("generation"):
        slices = generation.slices
        sharing = max(1, generation.count * num_processes // num_devices)
        require(
            slices % sharing == 0 or sharing % slices == 0,
            f"{slices_key(config)} is {slices}, and the {sharing} processes that generate cannot"
            f" share them evenly: set it to a multiple of {sharing} or a number that divides it.",
        )
        check_fused_inference(config, slices)
    if is_pipelined(plan):
        check_pipelined_training(config)
        check_pipelines(plan, f"plan: {config.plan or 'mesh'}")
    check_lag(config, plan)
    check_batches(config)
    check_rows(config, plan, config.plan)


def check_pipelined_training(config: Config) -> None:
    """Raise ValueError if a trained model is a student, which cannot be pipelined."""
    require(
        derived.trains(config, "policy"),
        f"Pipelines train a policy, and algorithm {config.algorithm.name!r} trains none; leave"
        " training.pipelined False, and pipelined out of the plan.",
    )


def check_batches(config: Config) -> None:
    """Raise ValueError if samples do not split evenly, or are longer than a micro-batch."""
    samples = derived.samples(config)
    minibatches = config.training.minibatches
    require_even_split(
        samples,
        minibatches,
        what="samples of a step (prompts x samples of each)",
        by="training.minibatches",
    )
    if derived.keeps_groups(config):
        prompts = derived.prompts(config)
        require_even_split(prompts, minibatches, "prompts of a step", by="training.minibatches")
    tokens = config.training.microbatch_tokens
    longest = derived.text_tokens(config)
    require(
        not tokens or tokens >= longest,
        f"training.microbatch_tokens is {tokens}, and a sample may have {longest} tokens; give as"
        " many or more, or lower generation.max_new_tokens or data.max_prompt_tokens.",
    )


def check_rows(config: Config, plan: Plan, name: str) -> None:
    """Raise ValueError if rows of generation do not split evenly over its devices.

    Packing distributes those of all other calls. name: of the plan, '' if it is the config's mesh.
    """
    placed = plan.placements.get("generation")
    if placed is None:
        return
    in_slice = placed.row_shards // placed.slices
    by = f"generation's data x fsdp of plan {name}" if name else "mesh.data x mesh.fsdp"
    require_even_split(config.generation.max_rows, in_slice, "rows of generation.max_rows", by=by)
