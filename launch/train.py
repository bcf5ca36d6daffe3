"""RLHF in one command: python launch/train.py --config configs/quickstart.py --config.any.key=value

The same command again goes on from the last checkpoint.
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

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import build, command_line, memory, metrics, rlhf
from rlhf_jax import mesh as meshes
from rlhf_jax.checkpoint.store import Checkpoints, named_leaves
from rlhf_jax.collect import compile_rounds, evaluate
from rlhf_jax.config import Config
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.rollout import Tally
from rlhf_jax.generation.samples import RoundReport
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.model import huggingface
from rlhf_jax.model.source import digest
from rlhf_jax.report.page import ALGORITHMS, write_report
from rlhf_jax.stages import Frozen, Memory, Stages, drafter_of
from rlhf_jax.stopping import Stop, Stopped, listening
from rlhf_jax.training.distill import completed
from rlhf_jax.training.update import Optimizers
from rlhf_jax.types import Experience, TrainState
from rlhf_jax.watchdog import Watchdog

EVALUATION_SEED = 1 << 31  # keeps evaluation's noise apart from training's
STEPS = {"reward": rlhf.step, "distill": rlhf.distill_step}  # by objective


def main(argv: list[str]) -> int:
    """The exit code; a mistake of the user's is one sentence on stderr."""
    try:
        train(command_line.read(argv))
    except Stopped as stopped:
        print(f"{str(stopped).capitalize()}: {' '.join(stopped.__notes__)}.", file=sys.stderr)
        return stopped.exit_code
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        change = "lower training.microbatch_rows or generation.rows"
        print(f"error: the device failed ({reason}); if its memory is full, {change}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped by the keyboard; what was written stays in the workdir.", file=sys.stderr)
        return 130
    return 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What stands around the loop of steps."""

    run: build.Run
    stages: Stages
    models: Frozen
    saved: Checkpoints
    writer: metrics.Writer
    watch: Watch


def train(config: Config) -> None:
    """The run that a config describes. Mistakes are found before any weight is loaded."""
    fix_kernels(config)
    run = build.prepare(config)
    announce(run)
    if config.dry_run:
        return
    keep_programs(config.compilation_cache)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(listening())
        saved = stack.enter_context(checkpoints(run))
        optimizers = build.make_optimizers(run)
        state, remembered = start_or_resume(run, optimizers, saved)
        writer = metrics.open_run(run.workdir, config.to_json_best_effort(), int(state.step))
        stack.callback(writer.close)
        progress = stack.enter_context(metrics.Progress(config.steps, int(state.step)))
        watchdog = stack.enter_context(Watchdog(config.watchdog_seconds, progress.say))
        watch = Watch(progress, watchdog, stop)
        stages, models = build.make_stages(run, optimizers, stack, watch.working), build.frozen(run)
        setting = Setting(run, stages, models, saved, writer, watch)
        state = loop(setting, state, remembered, make_evaluation(setting, remembered, stack))
    finish(run, state)


def checkpoints(run: build.Run) -> Checkpoints:
    """Those in the workdir; the config may differ from theirs where it says so."""
    asked = run.config.checkpoint
    settings = build.settings(run.config)
    return Checkpoints(run.workdir / "checkpoints", asked.keep, build.identity(run), settings, asked.allow_changes)


def start_or_resume(run: build.Run, optimizers: Optimizers, saved: Checkpoints) -> tuple[TrainState, Memory]:
    """The state of the last checkpoint, or that of a new run."""
    remembered = build.new_memory(run)
    found = saved.restore(build.state_template(run, optimizers))
    if found is None:
        return build.new_state(run, optimizers), remembered
    remembered.restore(found.host)
    print(f"Going on from step {found.step}, saved in {run.workdir}/checkpoints; another workdir starts anew.\n")
    return found.state, remembered


def loop(setting: Setting, state: TrainState, remembered: Memory, evaluate: Evaluate) -> TrainState:
    """Evaluate every so often; roll out, infer and update up to `config.steps` times; save every so often.

    A signal is answered at the next round, reward or phase, but not within an update. Whatever ends the loop, a
    state that is whole is saved.
    """
    config, watch = setting.run.config, setting.watch
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
            "the same command goes on from there" if saved else "nothing is saved, the run began or keeps none"
        )
        raise
    except Exception:
        if not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(state)
        ):  # else an update has begun, and used the state up
            with contextlib.suppress(OSError):  # the first error is the one to be told
                save(setting, state, remembered)
        raise
    return state


def one_step(setting: Setting, state: TrainState, remembered: Memory) -> TrainState:
    """One iteration, written down; a batch that spoils it is kept, and one that is abandoned comes again."""
    step, start, run = int(state.step), time.perf_counter(), setting.run
    position = remembered.batches.state()
    take = STEPS[run.config.objective]
    try:
        state, figures, table = take(state, setting.models, run.prompts, remembered, setting.stages, setting.watch)
    except Exception as error:
        remembered.batches.restore(position)
        if not isinstance(error, rlhf.Ruined):
            raise
        batch, reason = post_mortem(run.workdir, step, error.experience), str(error).rstrip(".")
        raise ValueError(f"Step {step}: {reason}; the batch is in {batch}, checkpoints are as they were.") from error
    figures |= {"step": step, "step/seconds": time.perf_counter() - start}
    setting.writer.write(figures)
    setting.writer.write_samples(step, table)
    if remembered.drafting.selector:
        setting.writer.write_strategies(step, remembered.drafting.selector.last_stage)
    setting.watch.progress.finish(figures)
    return state


def save(setting: Setting, state: TrainState, remembered: Memory) -> bool:
    """A checkpoint of all that the next step depends on, written while the run goes on; whether one is wanted."""
    setting.watch.beat("saving")
    wanted = bool(setting.run.config.checkpoint.every and int(state.step))
    if wanted:
        setting.writer.sync()
        setting.saved.save(int(state.step), state, remembered.state())
    return wanted


def post_mortem(workdir: Path, step: int, experience: Experience) -> Path:
    """The batch of a step in `post-mortem/step-N.npz`, an array of it under each name."""
    path = workdir / "post-mortem" / f"step-{step:06d}.npz"
    with contextlib.suppress(OSError):  # on a full disk what has happened must still be told
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **named_leaves(experience))
    return path


@dataclasses.dataclass
class Watch:
    """Hears of each phase and of the rounds of generation as they arrive: shows them, and stops where asked to."""

    progress: metrics.Progress
    watchdog: Watchdog
    stop: Stop
    tally: Tally = dataclasses.field(default_factory=Tally)
    start: float = 0.0
    phase: str = "starting"

    def __call__(self, phase: str, report: RoundReport | None) -> None:
        if phase != "training":  # an update that has begun is finished
            self.stop.check()
        self.beat(phase)
        if report is None:
            self.tally, self.start = Tally(), time.perf_counter()
            self.progress.update(phase)
            return
        self.tally.add(report)
        seen = self.tally.metrics(time.perf_counter() - self.start)
        numbers = {name: seen[f"generation/{name}"] for name in ("tokens_per_second", "tokens_per_round")}
        self.progress.update(phase, live_rows=report.live, **numbers)

    def beat(self, phase: str) -> None:
        """The phase is alive."""
        self.phase = phase
        self.watchdog.beat(phase)

    def working(self) -> None:
        """The phase there is goes on, waiting for rewards."""
        self.stop.check()
        self.beat(self.phase)


Evaluate = Callable[[TrainState], None]  # of the state after so many updates


def make_evaluation(setting: Setting, remembered: Memory, stack: contextlib.ExitStack) -> Evaluate:
    """A function that measures the policy on held-out prompts when it is time to."""
    run, stages, asked = setting.run, setting.stages, setting.run.config.evaluation
    if run.held_out is None:
        return lambda state: None
    make = functools.partial(build.function_scorer, run.config, stack=stack, observe=setting.watch.working)
    others = {name: make(spec) for name, spec in run.config.reward.metrics.items()}
    measures = {"reward": lambda answers: stages.reward(answers)[0]} | others
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    decoding = dataclasses.replace(stages.decoding, sampling=sampling, seed=run.config.seed ^ EVALUATION_SEED)
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
            setting.writer.write_evaluation(step, *found)

    return evaluation


def finish(run: build.Run, state: TrainState) -> None:
    """What was trained as folders, the report, and what has changed."""
    trained = {"policy": state.policy} if run.config.objective == "reward" else {}
    if state.drafter is not None and run.config.drafter.learning_rate:
        trained["drafter"] = completed(state.drafter, state.policy)
    for name, model in trained.items():
        huggingface.save(run.workdir / name, model, run.policy.tokenizer, run.policy.stop_tokens, jnp.float32)
    report = write_report(run.workdir, f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    if run.held_out:
        metrics.compare(*metrics.before_and_after(run.workdir))
    folders = " and ".join(f"the trained {name} is in {run.workdir}/{name}" for name in trained)
    print(f"T{folders[1:]}, and what happened in {report}.")


def fix_kernels(config: Config) -> None:
    """With `deterministic`, a GPU's sums have one order. Flags are read when the first device is asked for."""
    if config.deterministic:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"


def keep_programs(folder: str) -> None:
    """Keep compiled programs in a folder between runs."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def announce(run: build.Run) -> None:
    """Print what the run will use; raise ValueError where it does not fit the devices."""
    config, mesh, policy = run.config, run.mesh, run.policy
    parts = memory.plan(run.config, run.models, dict(mesh.shape), run.dtype, run.kernels[0])
    known = memory.device_memory(config, jax.devices()[0])
    if known is not None:
        memory.check(parts, known)
    unsplit = meshes.unsplit(build.weight_shapes(policy.config, run.dtype), mesh, "training")
    generation = config.generation
    samples = generation.prompts_per_step * generation.samples_per_prompt
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tokens = f"up to {samples * generation.max_new_tokens:,} tokens"
    rows = [
        ("model", f"{policy.path.name} ({policy.config.num_layers} layers of {policy.config.width}), {run.dtype.name}"),
        ("devices", f"{jax.device_count()} x {jax.devices()[0].device_kind} ({sizes})"),
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
    name = ALGORITHMS[config.advantage.estimator] if config.objective == "reward" else "distillation of a drafter"
    metrics.describe(f"rlhf_jax: {name}, {config.steps} steps", rows)


def _kernels(why: dict[str, str]) -> str:
    """One line for each choice and its reason, after the kernels that it holds for."""
    alike = {reason: [kernel for kernel in why if why[kernel] == reason] for reason in why.values()}
    if len(alike) == 1:
        return next(iter(alike))
    return "\n".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in alike.items())


def _drafter(run: build.Run) -> str:
    """What drafts and where its weights begin: their digest, too, as another run may find others in the same place."""
    begins = f"{run.drafter.path.name} ({digest(run.drafter)})" if run.drafter else "the model's own layers"
    if run.student is None:
        return f"{begins}, as it is"
    learns = "kept current" if run.config.drafter.learning_rate else "as it is"
    return f"student of {run.student.num_layers} layers, from {begins}, {learns}"


def _counted(prompts: Prompts, path: str) -> str:
    dropped = "".join(f", {count} {reason} dropped" for reason, count in prompts.dropped.items())
    return f"{len(prompts)} from {path}{dropped}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
