"""One iteration: draw samples, score them, and learn from them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhf_jax.config.algorithms import algorithm_of
from rlhf_jax.inference.scoring import score
from rlhf_jax.monitoring.parts import CallWatch, PhaseParts
from rlhf_jax.monitoring.phases import timed
from rlhf_jax.monitoring.trace import Span, since
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.placement.transfer import bytes_moved
from rlhf_jax.run import Run, StepReport
from rlhf_jax.runtime import distributed
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sources.drawn import Drawn
from rlhf_jax.state import Observer, RunState, ignore
from rlhf_jax.training.distill import drafter_age, keep_current
from rlhf_jax.training.learn import learn, measure_update
from rlhf_jax.training.prepare import prepare
from rlhf_jax.types import Memory, Models


class Learned(NamedTuple):
    """Hold the results of the update of a step."""

    models: Models
    metrics: dict[str, float]
    spans: list[Span]  # of inference and training, by the clock of `time.perf_counter`
    memory: Memory  # of the algorithm
    stage_times: Mapping[str, StageTimes] | None  # of pipelines


def step(state: RunState, run: Run, observe: Observer = ignore) -> tuple[RunState, StepReport]:
    """Run one iteration on the next samples.

    The models are donated once training starts; an exception before that leaves them valid.
    `observe` may raise, except during training and while samples of the next step are awaited.
    """
    with run.source.draw(state, observe) as drawn:
        learned = learn_from(drawn, state, run, observe)
    metrics = drawn.metrics | learned.metrics
    coefficient = drawn.host.kl_coefficient
    if "kl/response" in metrics:  # otherwise every minibatch was skipped
        metrics["kl/coefficient"] = coefficient
        samples = len(drawn.batch.tokens)
        coefficient = run.next_kl_coefficient(coefficient, metrics["kl/response"], samples)
    host = drawn.host.remember("algorithm", learned.memory)
    host = host.after_update(metrics, coefficient, learned.stage_times)
    if run.learners and "drafter" in (*learned.models, *run.frozen):
        metrics |= drafter_age(learned.models, host.step, host.distilled_at)
    strategies = []
    if host.generation:
        metrics["generation/tokens_so_far"] = host.generation.training.counts.tokens
        strategies = host.generation.training.strategies
    of_ranks = distributed.gather(since(learned.spans, drawn.began))
    spans = list(itertools.chain(drawn.spans, *of_ranks))
    return RunState(learned.models, host), StepReport(metrics, drawn.table, spans, strategies)


def learn_from(drawn: Drawn, state: RunState, run: Run, observe: Observer) -> Learned:
    """Score samples and train all learners on them; the models are donated."""
    metrics = drawn.metrics | _changes_of_place(state, run)
    measures = state.host.stage_times is None and not run.config.deterministic
    with CallWatch() as watch:
        record = functools.partial(_record, watch, observe, measures and distributed.count() == 1)
        with timed("inference", metrics, observe):
            models = run.scoring.models_of(state.models, run.frozen)
            progress = functools.partial(record, "inference")
            chosen, metrics_of_choice = algorithm_of(run.config).choose(drawn.batch, run.config)
            scored, padding = score(chosen, models, run.scoring, drawn.scored, progress)
            memory = state.host.memory.get("algorithm", {})
            batch, memory, measured = prepare(
                scored, state.host.kl_coefficient, run.config, memory, drawn.behind
            )
            metrics |= metrics_of_choice | measured | {"inference/padding": padding}
        if drawn.check:
            drawn.check()
        models = state.models
        times = state.host.stage_times
        if run.learners:
            with timed("training", metrics, observe):
                progress = functools.partial(record, "training")
                models, losses, times = _update(batch, state, run, measures, progress)
                metrics |= losses
        spans = watch.spans(run.lanes.of)
    if run.distillation:
        alive = functools.partial(observe, "training", None)
        updates = state.step + ("policy" in run.learners)
        models, distilled = keep_current(models, drawn.batch, run.distillation, updates, alive)
        metrics |= distilled
    return Learned(models, metrics, spans, memory, times)


def _changes_of_place(state: RunState, run: Run) -> dict[str, float]:
    """Return the 10^6 bytes that devices receive when weights move to other calls.

    It also reports whether the plan differs from the previous step's.
    """
    models = state.models
    moved = {"generation": ("policy", run.generation.layout)} if run.generation else {}
    moved |= {f"{role}_inference": (role, own) for role, own in run.scoring.layouts.items()}
    changed = {"plan/changed": 1.0} if state.host.plan_changed else {}
    return changed | {
        f"weights/{call}": bytes_moved(models[role].weights, layout, layout.dtype).received / 1e6
        for call, (role, layout) in moved.items()
        if layout.mesh is not None and role in models
    }


def _update(
    batch: Sequences,
    state: RunState,
    run: Run,
    measures: bool,
    progress: Callable[[PhaseParts], None],
) -> tuple[Models, dict[str, float], Mapping[str, StageTimes] | None]:
    """Update the learners, after measuring pipeline stages if that is due."""
    times = state.host.stage_times
    if measures:
        times = measure_update(state.models, batch, run.learners, state.step) or None
    models, losses = learn(
        state.models,
        batch,
        run.learners,
        step=state.step,
        observe=progress,
        skipped=state.host.skipped,
        stage_times=times,
    )
    return models, losses, times


def _record(
    watch: CallWatch, observe: Observer, tasks: bool, phase: str, parts: PhaseParts
) -> None:
    """Record the parts of a phase, and pass them on."""
    watch.follow(parts, tasks=tasks)
    observe(phase, parts)
