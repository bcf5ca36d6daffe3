"""A run, from its config to the trained policy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlhf_jax import iteration
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.schema import Config
from rlhf_jax.evaluation import evaluate
from rlhf_jax.generation.decoding import completed, decoding_models
from rlhf_jax.generation.stage import begin_selectors, first_programs
from rlhf_jax.generation.strategy import cost
from rlhf_jax.inference.scoring import score
from rlhf_jax.memory import host
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.mesh import FLOAT32
from rlhf_jax.models.files import huggingface
from rlhf_jax.monitoring import console, metrics
from rlhf_jax.monitoring.callbacks import Callback
from rlhf_jax.placement.plan import training_layout
from rlhf_jax.rewards.combination import Reward
from rlhf_jax.rewards.learned import LEARNED_REWARD
from rlhf_jax.rewards.sources import offer
from rlhf_jax.run import Run
from rlhf_jax.runtime import distributed, to_host
from rlhf_jax.runtime.compilation import compile_only, configure_jax, shapes, trace_only
from rlhf_jax.runtime.files import write_atomically
from rlhf_jax.runtime.foreign import one_line
from rlhf_jax.runtime.mirror import folder_of, mirrored
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.session import Session, preview
from rlhf_jax.setup.describe import print_setup
from rlhf_jax.setup.models import load
from rlhf_jax.setup.run_spec import RunSpec, date_of_run
from rlhf_jax.setup.run_spec import prepare as prepare_run
from rlhf_jax.state import RunState, remembered
from rlhf_jax.training.learn import compile_update
from rlhf_jax.training.prepare import prepare
from rlhf_jax.types import Memory, Model, ModelConfigs, Models


class Result(NamedTuple):
    """Hold the results of a run."""

    state: RunState
    metrics: list[dict[str, float]]  # one per step, as in metrics.jsonl
    workdir: pathlib.Path
    warnings: list[str]  # the warnings of the report, the gravest first


def train(
    config: Config,
    *,
    reward: Reward | None = None,
    prompts: Sequence[str | dict[str, Any]] | None = None,
    callbacks: Sequence[Callback] = (),
    reward_id: str = "",
) -> Result:
    """Run the training that a config describes; mistakes are found before any weight is loaded.

    `reward` is a function that replaces those of the config; it runs in a thread of this process,
    and a call that takes too long fails, its thread abandoned. A resumed run needs the same
    function, by its source and the plain values of its closure, or by `reward_id`. `prompts` are
    texts, or rows as in a prompt file; they are kept in the workdir. Raises ValueError, OSError or
    errors of the runtime; Stopped after a signal.
    """
    from rlhf_jax.report.run import read_run
    from rlhf_jax.report.warnings import warnings

    if config.dry_run:
        raise ValueError("dry_run has no result: set it to False, or call rlhf_jax.trainer.plan.")
    config = copy.deepcopy(config)
    if reward is not None:
        config.reward.functions = (offer(reward, reward_id),)
    state, spec = do_run(config, callbacks, prompts)
    warning_lines = distributed.run_on_leader(lambda: warnings(read_run(spec.workdir)))
    return Result(state, metrics.read_rows(spec.workdir, "metrics"), spec.workdir, warning_lines)


def do_run(
    config: Config,
    callbacks: Sequence[Callback] = (),
    prompts: Sequence[str | dict[str, Any]] | None = None,
) -> tuple[RunState, RunSpec]:
    """Run from the beginning or from the last checkpoint to the end.

    prompts: as in `train`.
    """
    configure_jax(config.deterministic, config.compilation_cache)
    with mirrored(config.workdir):
        if prompts is not None:
            config.data.train = str(_keep_prompts(config, prompts))
        spec = _open(config)
        with Session(spec, callbacks) as session:
            state = session.restore() or session.begin()
            run = session.start(state)
            if state.step < config.steps:
                state = compile_ahead(state, run, session)
            while state.step < config.steps and not session.ends:
                state = measure_if_due(state, run, session)
                if session.ends:
                    break
                began = time.perf_counter()
                with session.profiled(state.step):
                    state, report = iteration.step(state, run, session.observe)
                session.log(report, state, time.perf_counter() - began)
            session.save(state)
            state = measure_if_due(state, run, session, last=True)
        export(state, run, spec)
    distributed.run_on_leader(lambda: console.where_time_went(session.seconds()))
    return state, spec


def plan(config: Config) -> None:
    """Run all checks that precede a run, print the resources it would use, and stop.

    Nothing is written. If devices or weights are missing, the plan is computed from shapes alone.
    """
    from rlhf_jax.planner.describe import print_plan
    from rlhf_jax.planner.planned import hardware_of, missing_inputs, plan_run

    config = copy.deepcopy(config)
    configure_jax(config.deterministic, config.compilation_cache)
    if lacks := missing_inputs(config):
        print(f"A plan computed from shapes alone, as {lacks}.")
        planned = plan_run(config, hardware_of(config))
        print_plan(config, planned)
        on_cpu = planned.hardware.platform == "cpu"
        # the devices per host of absent hardware are unknown
        host.check(config, [(on_cpu * planned.hardware.count, planned.parts)], 0, on_cpu)
        if planned.hardware.gigabytes and not on_cpu:
            memory_parts.check(planned.parts, planned.hardware.gigabytes * memory_parts.GIGA)
        print("Only the memory was checked, as at the start of a run; nothing was written.")
        return
    spec = _open(config)
    outcome = preview(spec)
    if distributed.leads():
        checked = "config, models, prompts, rewards, devices, memory and workdir"
        print(f"Checked as a run would be: {checked}; {outcome}, and nothing was written.")


def _open(config: Config) -> RunSpec:
    """Open, check and print all that a config names, on the day of its run."""
    config.data.date = distributed.run_on_leader(lambda: date_of_run(config))
    spec = distributed.run_on_all(lambda: prepare_run(config))
    parts = list(spec.layouts.values())
    layout = training_layout(spec.layouts)
    if layout.role == "pipelined":
        copies = layout.split("data")
        parts += [stage for copy in copies for stage in copy.split()]
    if any(len(part.owners) < distributed.count() for part in parts):
        distributed.divide()
    distributed.run_on_all(lambda: print_setup(spec))
    return spec


def _keep_prompts(config: Config, prompts: Sequence[str | dict[str, Any]]) -> pathlib.Path:
    """Write prompts to a file in the workdir, so that the run can be resumed without them."""
    rows = [{config.data.prompt_key: row} if isinstance(row, str) else row for row in prompts]
    path = folder_of(config.workdir) / "prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"prompts: a row has what no JSON file can hold ({one_line(error)}); give texts,"
            " numbers, lists and dicts."
        ) from error
    distributed.run_on_leader(lambda: write_atomically(path, text.encode()))
    return path


def compile_ahead(state: RunState, run: Run, session: Session) -> RunState:
    """Compile the programs of a step, and wait for those of generation.

    Selectors start with XLA's estimates of the cost of rounds.
    """
    longest = run.source.longest(state.host)
    settings = run.generation
    if settings is None:
        compile_step(state, run, longest, session)
        return state
    session.observe("compiling", None)
    before = remembered(state.host)
    selectors = before.selectors()
    models = decoding_models(state.models, run.frozen, settings.layout)
    first_samples = longest.mask[:: settings.samples_per_prompt]
    prompts = first_samples.argmax(axis=1).tolist()
    programs, analyse = first_programs(models, prompts, settings, looks_back=bool(selectors))
    for program in programs:
        session.programs.add(program, "generation")
    compile_step(state, run, longest, session)
    session.wait_for_programs("generation")
    configs = ModelConfigs(models[0].config, models[1] and models[1].config)
    decoding = settings.decoding
    costs = functools.partial(
        cost.prior_of_models,
        configs,
        settings.layout.platform,
        models[0].norm.dtype.itemsize,
        rows=decoding.max_rows,
        cache_length=decoding.max_length,
    )
    after = before.with_selectors(begin_selectors(selectors, settings, analyse, costs))
    return state._replace(host=dataclasses.replace(state.host, generation=after))


def compile_step(state: RunState, run: Run, longest: Sequences, session: Session) -> None:
    """Compile inference and training for samples of the largest size.

    Nothing is run but the advantages. Shorter samples may need programs of other sizes.
    """
    if not run.learners:  # a student's programs are small
        return
    # Weights that move to other devices stay in place: only shapes move.
    models: Models = shapes(state.models)
    scorers = shapes(run.scoring.models_of(models, run.frozen))
    chosen, _ = algorithm_of(run.config).choose(longest, run.config)
    score_longest = functools.partial(score, chosen, scorers, run.scoring)

    def compile_training() -> None:
        scored, _ = score_longest(execute=trace_only)
        batch, _, _ = prepare(scored, 0.0, run.config, {})
        compile_update(models, batch, run.learners, state.step)

    session.programs.add(functools.partial(score_longest, execute=compile_only), "inference")
    session.programs.add(compile_training, "training")


def measure_if_due(state: RunState, run: Run, session: Session, last: bool = False) -> RunState:
    """Evaluate if due: every `eval.every` steps, and after the last one."""
    due = last or state.step % max(1, run.config.evaluation.every) == 0

    def stands() -> bool:  # by this process, or by one that took the last step
        rows = metrics.read_rows(session.spec.workdir, "evaluations")
        return bool(rows) and rows[-1]["step"] == state.step

    evaluation = run.evaluation or run.held_out
    if evaluation is None or not due or (last and distributed.run_on_leader(stands)):
        return state
    best = _best_so_far(run, session.spec)
    state, report = evaluate(state, run, session.observe)
    session.log_evaluation(report, state.step)
    measured = report.means.get(run.config.checkpoint.best, -math.inf)
    if state.step and measured > best:
        write_model(session.spec, "best", state.models["policy"].weights)
    return state


def _best_so_far(run: Run, spec: RunSpec) -> float:
    """Return the highest value so far of the measure whose best policy is kept; -inf if none."""
    key = run.config.checkpoint.best

    def find() -> float:
        rows = metrics.read_rows(spec.workdir, "evaluations") if key else []
        return max((row[key] for row in rows if key in row), default=-math.inf)

    return distributed.run_on_leader(find)


def write_model(spec: RunSpec, name: str, model: Model) -> None:
    """Write a model into a folder of the workdir, in Hugging Face format."""
    whole = to_host.to_leader(model) if distributed.started() else model
    source = spec.critic if model.config.scalar_head else spec.policy
    save = functools.partial(
        huggingface.save,
        spec.workdir / name,
        whole,
        spec.policy.tokenizer,
        spec.policy.stop_tokens,
        jnp.float32,
        source.repeated,
    )
    distributed.run_on_leader(save)


def write_learned_reward(spec: RunSpec, memory: Memory) -> None:
    """Write the reward model with the head that it has learned in the run, as a folder.

    Its other weights are read again, as those of the run may have lost precision.
    """
    source = spec.rewards[0]  # before preference models
    layout = dataclasses.replace(spec.layouts["reward_inference"], dtype=FLOAT32)
    model = load(source, layout)
    whole = to_host.to_leader(model) if distributed.started() else model
    if memory:  # else there was no label
        whole = dataclasses.replace(whole, head=memory["theta"].astype(np.float32)[:, None])
    save = functools.partial(
        huggingface.save,
        spec.workdir / LEARNED_REWARD,
        whole,
        source.tokenizer,
        source.stop_tokens,
        jnp.float32,
        source.repeated,
    )
    distributed.run_on_leader(save)


def print_measures(spec: RunSpec) -> None:
    """Print what a model is worth that was only measured, and write the report."""
    from rlhf_jax.report.page import write_report

    place = write_report(spec.workdir)
    means = metrics.read_rows(spec.workdir, "evaluations")[-1]
    rows = [(key, [f"{means[key]:.4g}"]) for key in means if metrics.is_measure(key)]
    console.table(["held out", spec.config.model.path], rows)
    print(f"The samples are in {place}.")


def export(state: RunState, run: Run, spec: RunSpec) -> None:
    """Write the trained models as folders, and print a summary of the run."""
    if not run.config.steps:  # nothing was trained
        distributed.run_on_leader(lambda: print_measures(spec))
        return
    # A critic beside a policy that learns has done its work; else critics are what a run is for.
    roles = ["policy"] if "policy" in run.learners else run.learners
    trained = {role: state.models[role].weights for role in roles}
    if "drafter" in state.models and run.config.drafter.learning_rate:
        policy = state.models["policy"].weights
        trained["drafter"] = completed(state.models["drafter"].weights, policy)
    for name, model in trained.items():
        write_model(spec, name, model)
    names = [*trained]
    if run.config.reward.labels:
        write_learned_reward(spec, state.host.memory.get("reward", {}))
        names.append(LEARNED_REWARD)

    def print_summary() -> None:
        from rlhf_jax.report.page import write_report
        from rlhf_jax.report.run import read_run
        from rlhf_jax.report.warnings import warnings

        write_report(spec.workdir)
        if spec.held_out:
            console.compare(*metrics.before_and_after(spec.workdir))
        console.warn(warnings(read_run(spec.workdir)))
        workdir = run.config.workdir.rstrip("/")
        folders = [f"the trained {name} is in {workdir}/{name}" for name in names]
        print(f"T{' and '.join(folders)[1:]}, and what happened in {workdir}/report.html.")

    distributed.run_on_leader(print_summary)
