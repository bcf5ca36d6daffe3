"""RLHF in one command: python launch/train.py --config configs/quickstart.py --config.any.key=value

The same command again goes on from the last checkpoint. As several processes: launch/local.sh,
slurm.sh, tpu.sh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from rlhf_jax import build, rlhf
from rlhf_jax import mesh as meshes
from rlhf_jax.collect import compile_rounds, evaluate
from rlhf_jax.config import command_line, memory
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.history import GenerationCounts
from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.model.weights import huggingface
from rlhf_jax.model.weights.source import digest
from rlhf_jax.monitoring import console, metrics, trace
from rlhf_jax.monitoring.report.page import ALGORITHMS, write_report
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint.store import Checkpoints, named_leaves
from rlhf_jax.runtime.distributed import Place
from rlhf_jax.runtime.signals import Stop, Stopped, listen_for_signals
from rlhf_jax.runtime.slice_groups import slice_group_of
from rlhf_jax.runtime.watchdog import Watchdog
from rlhf_jax.state import FrozenModels, HostState, Stages, drafter_of
from rlhf_jax.training.distill import completed
from rlhf_jax.training.update import Optimizers
from rlhf_jax.types import Experience, TrainState

EVALUATION_SEED = 1 << 31  # keeps evaluation's noise apart from training's
STOP = "stop"  # the word under which a signal is published
STEPS = {"reward": rlhf.step, "distill": rlhf.distill_step}  # by objective


def main(argv: list[str]) -> int:
    """The exit code; a mistake of the user's is one sentence on stderr."""
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
        return distributed.leave(
            stopped.exit_code, f"Stopped by {stopped.name}: {' '.join(stopped.__notes__)}.", place
        )
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        of_device = distributed.is_of_device(error)
        said = _with_notes(_of_device(error) if of_device else str(error), error)
        return distributed.leave(1 if of_device else 2, f"error: {said}", place)
    except KeyboardInterrupt:
        said = "error: stopped by the keyboard; what was written stays in the workdir."
        return distributed.leave(130, said, place)
    return distributed.leave(0, "", place)


def _with_notes(said: str, error: Exception) -> str:
    """What is said of an error, and what else failed on the way out, as one sentence."""
    *firsts, last = dict.fromkeys([said, *getattr(error, "__notes__", ())])
    return "; also: ".join([*(each.removesuffix(".") for each in firsts), last])


def _of_device(error: Exception) -> str:
    """What an error of the runtime says, and what to do."""
    reason = str(error).splitlines()[0].rstrip(".")
    if distributed.started() and "RESOURCE_EXHAUSTED" not in reason:
        return (
            f"the processes cannot go on together ({reason}); where one has ended its own words"
            " say why, and the same"
            " command goes on from the last checkpoint."
        )
    change = "lower training.microbatch_rows or generation.max_rows"
    return f"the device failed ({reason}); if its memory is full, {change}."


@dataclasses.dataclass(frozen=True)
class Setting:
    """What stands around the loop of steps."""

    run: build.Run
    stages: Stages
    models: FrozenModels
    saved: Checkpoints
    writer: metrics.Writer | None  # the leader's; the others write nothing
    watch: RunObserver


def train(config: Config) -> None:
    """The run that a config describes. Mistakes are found before any weight is loaded."""
    fix_kernels(config)
    run = distributed.run_on_all(lambda: build.prepare(config))
    distributed.run_on_all(lambda: print_setup(run))
    if config.dry_run:
        return
    keep_programs(config.compilation_cache)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(listen_for_signals())
        check_alike(run)
        saved = stack.enter_context(checkpoints(run))
        optimizers = build.make_optimizers(run)
        state, remembered = start_or_resume(run, optimizers, saved)
        opened = functools.partial(
            metrics.open_run, run.workdir, config.to_json_best_effort(), int(state.step)
        )
        writer = distributed.run_on_all(lambda: opened() if distributed.leads() else None)
        stack.callback(writer.close if writer else lambda: None)
        progress = stack.enter_context(console.Progress(config.steps, int(state.step), screen()))
        watchdog = stack.enter_context(
            Watchdog(config.watchdog_seconds, progress.say if writer else _say_by_rank)
        )
        watch = RunObserver(progress, watchdog, stop, follows=not slice_group_of(run.mesh).leads)
        stages = build.make_stages(run, optimizers, stack, watch.working)
        models = build.frozen(run)
        setting = Setting(run, stages, models, saved, writer, watch)
        state = loop(setting, state, remembered, make_evaluation(setting, remembered, stack))
    finish(run, state)


def check_alike(run: build.Run) -> None:
    """Raise ValueError where a process was given another config, model or data than the leader."""
    if not distributed.started():
        return
    found = distributed.gather(build.identity(run) | flat(run.config))
    for rank, other in enumerate(found):
        for key, value in found[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"{key} is {other.get(key)!r} on rank {rank} and {value!r} on rank 0: give"
                    " all the same."
                )


def screen() -> Console:
    """Where progress is shown: the leader's."""
    return Console(quiet=not distributed.leads())


def _say_by_rank(line: str) -> None:
    print(f"rank {distributed.rank()}: {line}", file=sys.stderr, flush=True)


def checkpoints(run: build.Run) -> Checkpoints:
    """Those in the workdir; the config may differ from theirs where it says so."""
    asked = run.config.checkpoint
    settings = build.settings(run.config)
    return Checkpoints(
        run.workdir / "checkpoints", asked.keep, build.identity(run), settings, asked.allow_changes
    )


def start_or_resume(
    run: build.Run, optimizers: Optimizers, saved: Checkpoints
) -> tuple[TrainState, HostState]:
    """The state of the last checkpoint, or that of a new run."""
    remembered = build.new_memory(run)
    found = saved.restore(build.state_template(run, optimizers))
    if found is None:
        return build.new_state(run, optimizers), remembered
    remembered.restore(found.host)
    if distributed.leads():
        print(
            f"Going on from step {found.step}, saved in {run.workdir}/checkpoints; another"
            " workdir starts anew.\n"
        )
    return found.state, remembered


def loop(
    setting: Setting, state: TrainState, remembered: HostState, evaluate: Evaluate
) -> TrainState:
    """Evaluate every so often; roll out, infer and update up to `config.steps` times; save every so
    often.

    A signal is answered at the next round, reward or phase, but not within an update. Whatever ends
    the loop, a state that is whole is saved.
    """
    config = setting.run.config
    watch = setting.watch
    try:
        watch("compiling", None)
        compile_rounds(state.policy, drafter_of(state, setting.models), remembered, setting.stages)
        while int(state.step) < config.steps:
            evaluate(state)
            state = one_step(setting, state, remembered)
            if config.checkpoint.every and int(state.step) % config.checkpoint.every == 0:
                save(setting, state, remembered)
        save(setting, state, remembered)
        evaluate(state)
    except Stopped as stopped:
        saved = save(setting, state, remembered)
        stopped.add_note(
            "the same command goes on from there"
            if saved
            else "nothing is saved, the run began or keeps none"
        )
        raise
    except Exception as error:
        # no update has begun, and used it up
        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        if whole and distributed.all_here("a failed step"):
            try:
                save(setting, state, remembered)
            except OSError as failure:
                error.add_note(str(failure))
        raise
    return state


def one_step(setting: Setting, state: TrainState, remembered: HostState) -> TrainState:
    """One iteration, written down; a batch that spoils it is kept, and one that is abandoned comes
    again.
    """
    step = int(state.step)
    start = time.perf_counter()
    run = setting.run
    position = remembered.batches.state()
    take = STEPS[run.config.objective]
    try:
        state, figures, table = take(
            state, setting.models, run.prompts, remembered, setting.stages, setting.watch
        )
    except Exception as error:
        remembered.batches.restore(position)
        if not isinstance(error, rlhf.NonFiniteStep):
            raise
        batch = run.workdir / "post-mortem" / f"step-{step:06d}.npz"
        reason = str(error).rstrip(".")
        kept = (
            post_mortem(batch, error.experience)
            if distributed.leads()
            else f"the batch is in {batch}"
        )
        raise ValueError(f"Step {step}: {reason}; {kept}, checkpoints are as they were.") from error
    figures |= {"step": step, "step/seconds": time.perf_counter() - start}
    distributed.run_on_all(lambda: write(setting, figures, table, remembered))
    setting.watch.progress.finish(figures)
    return state


def write(
    setting: Setting, figures: dict[str, float], table: list[dict[str, Any]], remembered: HostState
) -> None:
    """A finished step in the files of the run."""
    writer = setting.writer
    step = int(figures["step"])
    if writer is None:
        return
    trace.write(
        setting.run.workdir, step, remembered.timeline.spans, setting.stages.mesh.shape["slices"]
    )
    writer.write(figures)
    writer.write_samples(step, table)
    if remembered.drafting.selector:
        writer.write_strategies(step, remembered.drafting.selector.last_stage)


def save(setting: Setting, state: TrainState, remembered: HostState) -> bool:
    """A checkpoint of all that the next step depends on, written while the run goes on; whether one
    is wanted.
    """
    setting.watch.beat("saving")
    wanted = bool(setting.run.config.checkpoint.every and int(state.step))
    if wanted:
        distributed.run_on_all(lambda: setting.writer and setting.writer.sync())
        setting.saved.save(int(state.step), state, remembered.state())
    return wanted


def post_mortem(path: Path, experience: Experience) -> str:
    """Writes the batch of a step, an array of it under each name, and says where it is, or why it
    is not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **named_leaves(experience))
    except OSError as error:
        return f"the batch could not be kept ({error.strerror or error})"
    return f"the batch is in {path}"


@dataclasses.dataclass
class RunObserver:
    """Hears of each phase and of the rounds of generation as they arrive: shows them, and stops
    where asked to.
    """

    progress: console.Progress
    watchdog: Watchdog
    stop: Stop
    follows: bool = False  # another process decides what is next on the slice that both share
    tally: GenerationCounts = dataclasses.field(default_factory=GenerationCounts)
    start: float = 0.0
    phase: str = "starting"
    listened: float = 0.0  # when it last heard what others are asked

    def __call__(self, phase: str, report: RoundReport | None) -> None:
        if phase != "training":  # an update that has begun is finished
            self.listen(may_stop=not self.follows) if report else self.agree()
        self.beat(phase)
        if report is None:
            self.tally = GenerationCounts()
            self.start = time.perf_counter()
            self.progress.update(phase)
            return
        self.tally.add(report)
        seen = self.tally.metrics(time.perf_counter() - self.start)
        numbers = {
            name: seen[f"generation/{name}"] for name in ("tokens_per_second", "tokens_per_round")
        }
        self.progress.update(phase, live_rows=report.live, **numbers)

    def beat(self, phase: str) -> None:
        """The phase is alive."""
        self.phase = phase
        self.watchdog.beat(phase)

    def working(self) -> None:
        """The phase there is goes on, waiting for rewards."""
        self.listen()
        self.beat(self.phase)

    def agree(self) -> None:
        """Stop where any process was asked to: all come here in step."""
        signals = [number for number in distributed.gather(self.stop.signal) if number is not None]
        if signals:  # one that comes meanwhile waits for the next time: it is never unset
            self.stop.signal = signals[0]
            self.stop.check()

    def listen(self, may_stop: bool = True) -> None:
        """Stop where this process was asked to, or hears that another was: what it works on alone
        ends early.
        """
        now = time.monotonic()
        if self.stop.signal is not None:
            distributed.publish(STOP, str(self.stop.signal))
        elif now - self.listened > 1.0:
            self.listened = now
            word = distributed.published(STOP)
            self.stop.signal = self.stop.signal if word is None else int(word)
        if may_stop:
            self.stop.check()


Evaluate = Callable[[TrainState], None]  # of the state after so many updates


def make_evaluation(
    setting: Setting, remembered: HostState, stack: contextlib.ExitStack
) -> Evaluate:
    """A function that measures the policy on held-out prompts when it is time to."""
    run = setting.run
    stages = setting.stages
    asked = setting.run.config.evaluation
    if run.held_out is None:
        return lambda state: None
    make = functools.partial(
        build.function_scorer, run.config, stack=stack, observe=setting.watch.working
    )
    others = {name: make(spec) for name, spec in run.config.reward.metrics.items()}
    measures = {"reward": lambda answers: stages.reward(answers, {})[0]} | others
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    decoding = dataclasses.replace(
        stages.decoding, sampling=sampling, seed=run.config.seed ^ EVALUATION_SEED
    )
    measure = functools.partial(
        evaluate,
        prompts=run.held_out,
        measures=measures,
        memory=remembered,
        decoding=decoding,
        samples_per_prompt=asked.samples_per_prompt,
        stages=stages,
        observe=setting.watch,
    )

    def evaluation(state: TrainState) -> None:
        step = int(state.step)
        if step % asked.every == 0 or step >= run.config.steps:
            found = measure(state.policy, drafter=drafter_of(state, setting.models))
            distributed.run_on_all(
                lambda: setting.writer and setting.writer.write_evaluation(step, *found)
            )

    return evaluation


def finish(run: build.Run, state: TrainState) -> None:
    """What was trained as folders, and what there is to tell of the run."""
    trained = {"policy": state.policy} if run.config.objective == "reward" else {}
    if state.drafter is not None and run.config.drafter.learning_rate:
        trained["drafter"] = completed(state.drafter, state.policy)
    for name, model in trained.items():
        held = distributed.to_leader(model) if distributed.started() else model
        parts = run.workdir / name, held, run.policy.tokenizer, run.policy.stop_tokens, jnp.float32
        distributed.run_on_leader(functools.partial(huggingface.save, *parts))
    distributed.run_on_leader(functools.partial(print_summary, run, list(trained)))


def print_summary(run: build.Run, trained: list[str]) -> None:
    """The report, and what has changed."""
    report = write_report(run.workdir, f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    if run.held_out:
        console.compare(*metrics.before_and_after(run.workdir))
    folders = " and ".join(f"the trained {name} is in {run.workdir}/{name}" for name in trained)
    print(f"T{folders[1:]}, and what happened in {report}.")


def fix_kernels(config: Config) -> None:
    """With `deterministic`, a GPU's sums have one order. Flags are read when the first device is
    asked for.
    """
    if config.deterministic:
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
        )


def keep_programs(folder: str) -> None:
    """Keep compiled programs in a folder between runs.

    But not those of several processes on CPUs: a program that was read back no longer keeps its
    collectives in one order, and two processes then wait for each other in different ones (seen
    with jax 0.10.2).
    """
    if folder and not (distributed.started() and jax.default_backend() == "cpu"):
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def print_setup(run: build.Run) -> None:
    """Print what the run will use; raise ValueError where it does not fit the devices."""
    config = run.config
    mesh = run.mesh
    policy = run.policy
    parts = memory.plan(run.config, run.models, dict(mesh.shape), run.dtype, run.kernels[0])
    known = memory.device_memory(config, jax.local_devices()[0])
    if known is not None:
        memory.check(parts, known)
    if not distributed.leads():
        return
    unsplit = meshes.unsplit(build.weight_shapes(policy.config, run.dtype), mesh, "training")
    generation = config.generation
    samples = generation.prompts_per_step * generation.samples_per_prompt
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tokens = f"up to {samples * generation.max_new_tokens:,} tokens"
    rows = [
        (
            "model",
            f"{policy.path.name} ({policy.config.num_layers} layers of {policy.config.width}),"
            f" {run.dtype.name}",
        ),
        ("devices", f"{jax.device_count()} x {jax.devices()[0].device_kind} ({sizes})"),
        *([("processes", str(distributed.count()))] if distributed.started() else []),
        *([("drafter", _drafter(run))] if run.models.drafter else []),
        ("prompts", _counted(run.prompts, config.data.train)),
        *([("held out", _counted(run.held_out, config.data.eval))] if run.held_out else []),
        ("a step", f"{samples} samples, {tokens}, {generation.strategy}"),
        ("all steps", f"up to {config.steps * samples * generation.max_new_tokens:,} tokens"),
        ("workdir", config.workdir),
        *(("not split", line) for line in unsplit),
        ("kernels", _kernels(run.kernels[1])),
        ("memory", "\n".join(memory.table(parts))),
    ]
    name = (
        ALGORITHMS[config.advantage.estimator]
        if config.objective == "reward"
        else "distillation of a drafter"
    )
    console.describe(f"rlhf_jax: {name}, {config.steps} steps", rows)


def _kernels(why: dict[str, str]) -> str:
    """One line for each choice and its reason, after the kernels that it holds for."""
    alike = {reason: [kernel for kernel in why if why[kernel] == reason] for reason in why.values()}
    if len(alike) == 1:
        return next(iter(alike))
    return "\n".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in alike.items())


def _drafter(run: build.Run) -> str:
    """What drafts and where its weights begin: their digest, too, as another run may find others in
    the same place.
    """
    begins = (
        f"{run.drafter.path.name} ({digest(run.drafter)})"
        if run.drafter
        else "the model's own layers"
    )
    if run.student is None:
        return f"{begins}, as it is"
    learns = "kept current" if run.config.drafter.learning_rate else "as it is"
    return f"student of {run.student.num_layers} layers, from {begins}, {learns}"


def _counted(prompts: Prompts, path: str) -> str:
    dropped = "".join(f", {count} {reason} dropped" for reason, count in prompts.dropped.items())
    return f"{len(prompts)} from {path}{dropped}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
