"""A run, from its config to the trained policy."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from rlhf_jax import build
from rlhf_jax.build import Opened
from rlhf_jax.build.describe import print_setup
from rlhf_jax.config import command_line
from rlhf_jax.config.schema import Config
from rlhf_jax.evaluation import evaluate
from rlhf_jax.generation.stage import compile_first_rounds
from rlhf_jax.generation.strategy import prior
from rlhf_jax.model.decoding import completed
from rlhf_jax.model.weights import huggingface
from rlhf_jax.monitoring import console, metrics
from rlhf_jax.monitoring.report.page import write_report
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.distributed import Place
from rlhf_jax.runtime.signals import Stopped
from rlhf_jax.session import Session
from rlhf_jax.state import Run, RunState, decoding_models
from rlhf_jax.types import ModelConfigs


def train(config: Config) -> None:
    """Do the run that a config describes; mistakes are found before any weight is loaded.

    Raises ValueError, OSError or what the runtime raises; Stopped where a signal asked for it.
    """
    opened = distributed.run_on_all(lambda: build.prepare(config))
    distributed.run_on_all(lambda: print_setup(opened))
    if config.dry_run:
        return
    with Session(opened) as session:
        state = session.restore() or session.begin()
        run = session.start(state)
        state = compile_ahead(state, run, session)
        while state.step < config.steps:
            state = measure_if_due(state, run, session)
            began = time.perf_counter()
            state, report = run.objective.step(state, run, session.observe)
            session.log(report, state, time.perf_counter() - began)
        session.save(state)
        state = measure_if_due(state, run, session)
    export(state, run, opened)
    distributed.run_on_leader(lambda: console.where_time_went(session.seconds()))


def compile_ahead(state: RunState, run: Run, session: Session) -> RunState:
    """Compile the rounds that steps begin with, and let selectors begin with what they cost."""
    session.observe("compiling", None)
    models = decoding_models(state.train, run)
    configs = ModelConfigs(models[0].config, models[1] and models[1].config)
    decoding = run.generation.decoding
    costs = functools.partial(
        prior.costs,
        configs,
        jax.default_backend(),
        models[0].norm.dtype.itemsize,
        rows=decoding.max_rows,
        slots=decoding.max_length,
    )
    selectors = compile_first_rounds(models, state.host.selectors(), run.generation, costs)
    return RunState(state.train, state.host.with_selectors(selectors))


def measure_if_due(state: RunState, run: Run, session: Session) -> RunState:
    """Evaluate every so many steps, and after the last one."""
    due = state.step % max(1, run.config.evaluation.every) == 0 or state.step >= run.config.steps
    if run.evaluation is None or not due:
        return state
    state, report = evaluate(state, run, session.observe)
    session.log_evaluation(report, state.step)
    return state


def export(state: RunState, run: Run, opened: Opened) -> None:
    """Write what was trained as folders, and say what has changed."""
    trained = {"policy": state.train.policy} if run.objective.trains_policy else {}
    if state.train.drafter is not None and run.config.drafter.learning_rate:
        trained["drafter"] = completed(state.train.drafter, state.train.policy)
    for name, model in trained.items():
        whole = distributed.to_leader(model) if distributed.started() else model
        parts = (opened.policy.tokenizer, opened.policy.stop_tokens, jnp.float32)
        folder = opened.workdir / name
        distributed.run_on_leader(functools.partial(huggingface.save, folder, whole, *parts))

    def print_summary() -> None:
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        report = write_report(opened.workdir, devices)
        if opened.held_out:
            console.compare(*metrics.before_and_after(opened.workdir))
        folders = [f"the trained {name} is in {opened.workdir}/{name}" for name in trained]
        print(f"T{' and '.join(folders)[1:]}, and what happened in {report}.")

    distributed.run_on_leader(print_summary)


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code. A mistake is one sentence on stderr."""
    place = Place()
    try:
        place, argv = command_line.place(argv)
        if place.size is None:  # which rank this is, and so whether it speaks, is known only then
            distributed.start(place)
        config = command_line.read(argv)
        if place.size is not None:
            distributed.start(place)
        train(config)
    except Stopped as stopped:
        said = f"Stopped by {stopped.name}: {' '.join(stopped.__notes__)}."
        return distributed.leave(stopped.exit_code, said, place)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        of_device = distributed.is_of_device(error)
        said = str(error)
        if of_device:
            reason = said.splitlines()[0].rstrip(".")
            change = "lower training.microbatch_rows or generation.max_rows"
            said = f"the device failed ({reason}); if its memory is full, {change}."
            if distributed.started() and "RESOURCE_EXHAUSTED" not in reason:
                said = (
                    f"the processes cannot go on together ({reason}); where one has ended its own"
                    " words say why, and the same command goes on from the last checkpoint."
                )
        # what else failed on the way out stands behind it
        *firsts, last = dict.fromkeys([said, *getattr(error, "__notes__", ())])
        said = "; also: ".join([*(each.removesuffix(".") for each in firsts), last])
        return distributed.leave(1 if of_device else 2, f"error: {said}", place)
    except KeyboardInterrupt:
        said = "error: stopped by the keyboard; what was written stays in the workdir."
        return distributed.leave(130, said, place)
    return distributed.leave(0, "", place)
