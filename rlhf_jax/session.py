"""The surroundings of the training loop: checkpoints, logs, progress, signals, watchdog."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Console

from rlhf_jax.config import earlier
from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.config.identity import binding_settings, own_code
from rlhf_jax.config.schema import flat
from rlhf_jax.evaluation import EvaluationReport
from rlhf_jax.generation.requests import GenerationCounts, RoundReport
from rlhf_jax.generation.slice_groups import slice_group_of
from rlhf_jax.monitoring import console, metrics, trace
from rlhf_jax.monitoring.callbacks import Callback, StopAt
from rlhf_jax.monitoring.environment import environment, most_memory
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.monitoring.phases import PhaseClock, PhaseSeconds
from rlhf_jax.monitoring.post_mortem import keep_batch
from rlhf_jax.monitoring.sending import Sender
from rlhf_jax.run import Run, StepReport
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.checkpoint.store import Checkpoints, Unsaved
from rlhf_jax.runtime.compilation import Programs
from rlhf_jax.runtime.files import is_remote
from rlhf_jax.runtime.signals import Stopped, listen_for_signals
from rlhf_jax.runtime.watchdog import Watchdog
from rlhf_jax.setup.models import initial_models, source_shapes
from rlhf_jax.setup.run import initial_host_state, make_run, restored_host_state
from rlhf_jax.setup.run_spec import ENDS, RunSpec, check_alike, identity
from rlhf_jax.state import RunState
from rlhf_jax.training.learn import NonFiniteStep

# The key under which a signal is published to other processes.
STOP = "stop"
# Seconds between two polls for a signal that another process received.
POLL_SECONDS = 1.0
# Phases after the models are donated; in the second one samples of the next step are awaited.
UPDATING = ("training", "waiting")


class Session:
    """Manage a run's files and signals during its steps; a context manager.

    However the loop ends, the last valid state is saved: `restore`, `start`, `log` and `save`
    receive each state.
    """

    def __init__(self, spec: RunSpec, callbacks: Sequence[Callback] = ()):
        self.spec = spec
        self.ends = False  # whether a callback or the config ends the run
        condition = spec.config.stop_at
        self._stop_at = StopAt(condition) if condition else None
        self._callbacks = [*callbacks, *filter(None, [self._stop_at])]
        self._stack = contextlib.ExitStack()
        self._state: RunState | None = None
        self._sender: Sender | None = None
        self._counts = GenerationCounts()  # of the phase
        self._finished = 0  # finished samples of the phase
        self.programs = Programs()  # compiled in the background
        self._clock = PhaseClock("starting")
        self._phase_start = 0.0  # in seconds of `time.perf_counter`
        self._evaluations = 0
        self._polled = 0.0  # time of the last poll, in seconds of `time.monotonic`
        self._profile = contextlib.ExitStack()
        # another process decides the next work on the slice that both share
        generation = spec.layouts.get("generation")
        self._follows = generation is not None and not slice_group_of(generation).leads

    def __enter__(self) -> Session:
        spec = self.spec
        with contextlib.ExitStack() as stack:
            # First: a signal that comes while models load ends the run in order, too.
            self._interrupt = stack.enter_context(listen_for_signals())
            stack.enter_context(self._clock)
            check_alike(spec)  # before the folder is claimed for this run
            self._checkpoints = stack.enter_context(_checkpoints_of(spec))
            # Last: what was entered is left by `stack` if anything above fails, else by `__exit__`.
            self._stack = stack.pop_all()
        return self

    def restore(self) -> RunState | None:
        """Return the state of the last checkpoint; None if there is none."""
        restored = self._checkpoints.restore(initial_models(self.spec, source_shapes))
        if restored is None:
            return None
        step = restored.step
        if distributed.leads():
            message = f"Resuming from step {step}, saved in"
            if step >= self.spec.config.steps:
                message = f"All steps are done: raise steps to resume from {step}, saved in"
            place = f"{self.spec.config.workdir}/checkpoints"
            print(f"{message} {place}; another workdir starts a new run.\n")
        return RunState(restored.state, restored_host_state(self.spec, step, restored.host))

    def begin(self) -> RunState:
        """Load the state before the first step."""
        return RunState(initial_models(self.spec), initial_host_state(self.spec))

    def start(self, state: RunState) -> Run:
        """Open the files of the run, show its progress, and load the rest of the run."""
        config = self.spec.config
        leads = distributed.leads()
        about = {"title": algorithm_of(config).title_of(config), "code": own_code(config)}
        open_files = functools.partial(
            metrics.open_run,
            self.spec.workdir,
            config.to_json_best_effort(),
            state.step,
            json.dumps(about | {"environment": environment()}),
        )
        self._writer = distributed.run_on_all(lambda: open_files() if leads else None)
        self._stack.callback(self._writer.close if self._writer else lambda: None)
        if stop_at := self._stop_at:
            self.ends = distributed.run_on_leader(lambda: stop_at.was_met(self.spec.workdir))
        screen = Console(quiet=not leads)
        progress = console.Progress(config.steps, state.step, screen, self._compiling)
        self._progress = self._stack.enter_context(progress)
        self._stack.callback(self.programs.close)

        def say_by_rank(line: str) -> None:
            print(f"rank {distributed.rank()}: {line}", file=sys.stderr, flush=True)

        say = self._progress.say if self._writer else say_by_rank
        stacks = self.spec.workdir / f"standstill-{distributed.rank()}.txt"
        program = self._clock.program
        watchdog = Watchdog(config.watchdog_seconds, say, program=program, stacks=stacks)
        self._watchdog = self._stack.enter_context(watchdog)
        if config.sinks and leads:
            self._sender = Sender(
                config.sinks,
                self.spec.workdir,
                flat(config),
                metrics.read_rows(self.spec.workdir, "evaluations", "metrics", "samples"),
                self._progress.say,
            )
            self._stack.push(self._end_sinks)
        run = make_run(self.spec, self._stack, self._alive, self.programs, state.host.remat)
        self._lanes = run.lanes.names
        self._state = state
        self._stack.push(self._save_at_end)
        return run

    def wait_for_programs(self, phase: str) -> None:
        """Wait for the programs of a phase, and show the number left."""

        def show() -> None:
            self._beat("compiling")
            self._progress.update("compiling")

        began = time.perf_counter()
        self.programs.wait(phase, show)
        self._clock.held_up += time.perf_counter() - began

    def observe(self, phase: str, report: RoundReport | PhaseParts | None) -> None:
        """Record the progress of a phase; stop after a signal.

        It also stops as soon as a save is known to have failed. An update that has begun is
        finished.
        """
        if isinstance(report, PhaseParts):
            self._beat(phase)
            self._progress.update(phase, report)
            return
        if phase not in UPDATING:
            if report is not None:
                self._listen(may_stop=not self._follows)
            else:  # all processes synchronise here, and stop if any received a signal
                signals = distributed.gather_results(self._pending_signal)
                signal = next((number for number in signals if number is not None), None)
                if signal is not None:  # a signal that arrives meanwhile waits: it is never unset
                    self._interrupt.signal = signal
                    self._interrupt.check()
        self.wait_for_programs(phase)
        self._beat(phase)
        if report is None:
            self._counts = GenerationCounts()
            self._finished = 0
            self._phase_start = time.perf_counter()
            self._progress.update(phase)
            return
        self._counts.add(report)
        self._finished += report.finished
        rates = self._counts.metrics(time.perf_counter() - self._phase_start)
        self._progress.update(
            phase,
            finished_samples=self._finished,
            live_rows=report.live,
            tokens_per_second=rates["generation/tokens_per_second"],
            tokens_per_round=rates["generation/tokens_per_round"],
        )

    @contextlib.contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Write a profile of the steps that the config names, for xprof or TensorBoard."""
        self._clock.take_held_up()  # time from before the step
        steps = self.spec.config.profile
        first, last = map(int, steps.split(":")) if steps else (0, -1)
        if step == first <= last:
            jax.profiler.start_trace(str(self.spec.workdir / "profile"))
            self._profile = self._stack.enter_context(contextlib.ExitStack())
            self._profile.callback(jax.profiler.stop_trace)
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield
        if step == last >= first:
            self._profile.close()

    def log(self, report: StepReport, state: RunState, seconds: float) -> None:
        """Log a step and its duration in seconds, show it, and save the state if due."""
        self._state = state
        self._beat("writing")
        step = state.step - 1
        report.metrics["step"] = step
        report.metrics["step/seconds"] = seconds
        report.metrics.update(most_memory())

        def write() -> None:
            if self._writer is None:  # the leader has the files
                return
            trace.write(self.spec.workdir, step, report.spans, self._lanes)
            self._writer.write(report.metrics)
            self._writer.write_rows("samples", step, report.samples)
            self._writer.write_rows("strategies", step, report.strategies)
            if self._sender:
                self._sender.add(step, report.metrics, samples=report.samples)
                # A run that resumes repeats the steps after its checkpoint, and sends them then.
                saves = self.spec.config.checkpoint.every
                self._sender.send(self._checkpoints.on_disk() if saves else state.step)

        distributed.run_on_all(write)
        compiling = self._clock.take_held_up()
        self._progress.finish(report.metrics, compiling, self._other_seconds(state.step))
        if skipped := report.metrics.get("training/skipped"):
            self._progress.say(f"{skipped:.0f} minibatches skipped: a number was not finite")
        self._call_back(lambda callback: callback.after_step(step, report.metrics))
        every = self.spec.config.checkpoint.every
        if every and state.step % every == 0:
            self.save(state)

    def seconds(self) -> list[PhaseSeconds]:
        """Return the seconds by phase since the beginning, the longest phase first."""
        return self._clock.seconds()

    def _other_seconds(self, step: int) -> float:
        """Return the predicted seconds of the evaluations that remain after a step."""
        every = self.spec.config.evaluation.every
        if not self._evaluations:
            return 0.0
        spent = {phase.phase: phase.seconds - phase.compiling for phase in self._clock.seconds()}
        later = -(-self.spec.config.steps // every) - -(-step // every) + 1
        return later * spent.get("evaluation", 0.0) / self._evaluations

    def log_evaluation(self, report: EvaluationReport, step: int) -> None:
        """Log an evaluation."""
        self._evaluations += 1

        def write() -> None:
            if self._writer is None:
                return
            self._writer.write_evaluation(step, report.means, report.samples)
            if self._sender:
                self._sender.add(step, report.means, held_out=report.samples)

        distributed.run_on_all(write)
        self._call_back(lambda callback: callback.after_evaluation(step, report.means))

    def _call_back(self, call: Callable[[Callback], bool | None]) -> None:
        """Call each callback on the leader; all processes learn whether one ends the run."""
        if not self._callbacks:
            return
        ended = self.ends
        self.ends |= distributed.run_on_leader(lambda: any([*map(call, self._callbacks)]))
        if self.ends and not ended:
            self._progress.say(f"It ends here: {self.spec.config.stop_at or 'by a callback'}.")

    def save(self, state: RunState) -> bool:
        """Save all that the next step depends on, in the background; return whether to."""
        self._beat("saving")
        if not (self.spec.config.checkpoint.every and state.step):
            return False
        distributed.run_on_all(lambda: self._writer and self._writer.sync())
        self._checkpoints.save(state.step, state.models, state.host.document())
        return True

    def __exit__(self, *raised: Any) -> None:
        self._clock.enter("ending")
        self._stack.__exit__(*raised)

    def _end_sinks(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send the remaining records if the run is over; otherwise its resumption will."""
        assert self._sender is not None
        if error is None:
            self._sender.send(math.inf)
        self._sender.close()

    def _save_at_end(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Save the last valid state when the loop ends, and add a note about it to the error."""
        state = self._state
        if state is None or not isinstance(error, Exception) or isinstance(error, Unsaved):
            return
        if isinstance(error, Stopped):
            saved = self.save(state)
            note = "nothing is saved, the run began or keeps none"
            error.add_note("the same command resumes from there" if saved else note)
            return

        raised = error
        if isinstance(error, NonFiniteStep):
            kept = keep_batch(self.spec.workdir, state.step, error.batch)
            reason = str(error).rstrip(".")
            raised = ValueError(f"Step {state.step}: {reason}; {kept}, checkpoints are unchanged.")
        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.models))
        if whole and distributed.all_here("a failed step"):  # no update has begun and donated it
            try:
                self.save(state)
            except OSError as failure:
                raised.add_note(str(failure))
        if raised is not error:
            raise raised from error

    def _beat(self, phase: str) -> None:
        """Note that a phase is alive."""
        self._clock.enter(phase)
        self._watchdog.beat(phase)

    def _compiling(self) -> str:
        """Name the program that compiles now and the number left; '' if none does."""
        name = self._clock.program()
        left = self.programs.left
        return f"{name}, {left} programs left" if name and left > 1 else name

    def _alive(self) -> None:
        """Note that the phase goes on, waiting for rewards; stop after a signal."""
        self._listen(may_stop=True)
        self._beat(self._clock.phase)

    def _pending_signal(self) -> int | None:
        """Return the signal that this process received; raise Unsaved if a save has failed."""
        self._checkpoints.check()
        return self._interrupt.signal

    def _listen(self, may_stop: bool) -> None:
        """Stop if this process or another received a signal.

        Its unfinished work is abandoned.
        """
        if not distributed.started():
            self._checkpoints.check()
        now = time.monotonic()
        if self._interrupt.signal is not None:
            distributed.publish(STOP, self._interrupt.signal)
        elif now - self._polled > POLL_SECONDS:
            self._polled = now
            signal = distributed.read_published(STOP, int)
            self._interrupt.signal = self._interrupt.signal if signal is None else signal
        if may_stop:
            self._interrupt.check()


def preview(spec: RunSpec) -> str:
    """Run the checks of a session's start and restoration, and describe what a run would do.

    Nothing is written. Remote workdirs are not read.
    """
    check_alike(spec)
    workdir = spec.config.workdir
    if is_remote(workdir):
        return f"the content of {workdir} was not read"
    template = initial_models(spec, source_shapes)
    step = distributed.run_on_leader(lambda: _checkpoints_of(spec).preview(template))
    if not step:
        return f"a run would begin in {workdir}"
    distributed.run_on_leader(lambda: metrics.check(spec.workdir))
    return f"a run would resume from step {step} in {workdir}"


def _checkpoints_of(spec: RunSpec) -> Checkpoints:
    """Return the checkpoints of a run, not yet entered."""
    settings = spec.config.checkpoint
    changeable = {*binding_settings(spec.config), ENDS}
    if spec.config.deterministic:  # another plan sums in another order
        changeable.remove("plan")
    return Checkpoints(
        spec.workdir / "checkpoints",
        settings.keep,
        identity(spec),
        changeable,
        settings.allow_changes,
        read_identity=earlier.identity,
    )
