"""One iteration of RLHF: generation, inference, training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax.generation.ahead import SamplesAhead
from rlhf_jax.generation.requests import Request, RoundReport, Sample, as_sequences
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.inference.overlap import Scoring, ScoringQueue
from rlhf_jax.inference.scoring import compile_scores, score
from rlhf_jax.model.decoding import decoding_weights
from rlhf_jax.monitoring.parts import CallWatch, PhaseParts
from rlhf_jax.monitoring.trace import Span, since
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.rewards.samples import table_of
from rlhf_jax.rollout import RewardedRollout, draw_ahead, reward_samples, roll_out
from rlhf_jax.runtime import distributed, to_host
from rlhf_jax.runtime.beside import WorkBeside
from rlhf_jax.runtime.compilation import shapes
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.state import (
    HostState,
    Observer,
    Run,
    RunState,
    StepReport,
    decoding_models,
    ignore,
    scorers,
    weights_received,
)
from rlhf_jax.training.distill import distill
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.training.importance import weigh_advantages
from rlhf_jax.training.learn import compile_update, measure_update
from rlhf_jax.training.learn import learn as update
from rlhf_jax.training.optimizer import norms_and_finite, take_step
from rlhf_jax.types import Model, Models


def step(state: RunState, run: Run, observe: Observer = ignore) -> tuple[RunState, StepReport]:
    """Take one iteration over the next prompts.

    The models are used up once training begins; what is raised before that leaves them whole.
    `observe` may raise, but not in training, nor while samples of the next step are waited for.
    """
    models = decoding_models(state.models, run)
    if run.training.lag:
        return _step_ahead(models, state, run, observe)
    queue = scoring_queue(models[0], state.models, run)
    rolled = roll_out(models, state, run.prompts, run.generation, run.rewards, queue, observe)
    del models, queue  # else generation's weights would stay while others work
    learned = learn(state, run, rolled, observe)
    return _finish(learned, rolled, rolled.host, run)


def _step_ahead(
    models: ModelPair, state: RunState, run: Run, observe: Observer
) -> tuple[RunState, StepReport]:
    """Train on samples from before the last update, and draw the next ones beside.

    Both begin with the weights that the step begins with. The first step draws its own samples
    before, and the last one draws none.
    """
    began = time.perf_counter()
    settings = run.generation
    spans = []

    def draw(
        host: HostState, report: Callable[[RoundReport], None]
    ) -> tuple[HostState, SamplesAhead]:
        drawn = draw_ahead(models, host, state.step, run.prompts, settings, run.rewards, report)
        spans.extend(since(drawn[1].spans, began - drawn[1].began))
        return drawn

    ahead = state.host.ahead
    host = dataclasses.replace(state.host, ahead=None)
    if ahead is None:
        observe("generation", None)
        host, ahead = draw(host, functools.partial(observe, "generation"))
    with contextlib.ExitStack() as stack:
        beside = None
        if state.step + 1 < run.config.steps:
            work = functools.partial(draw, host)
            beside = stack.enter_context(WorkBeside(work, "generation"))
        prompts = run.prompts.prompts
        rolled = reward_samples(ahead, host, prompts, settings, run.rewards, observe)
        learned = learn(state, run, rolled, observe, beside and beside.check)
        if beside:
            waits = time.perf_counter()
            observe("waiting", None)
            host, following = beside.result(functools.partial(observe, "waiting"))
            host = dataclasses.replace(host, ahead=following)
            learned.metrics["lag/waited_seconds"] = time.perf_counter() - waits
    rolled = dataclasses.replace(rolled, began=began, spans=spans)
    return _finish(learned, rolled, host, run)


class Learned(NamedTuple):
    """Hold what a step has learned from its roll-out."""

    models: Models
    metrics: dict[str, float]  # those of the roll-out, too
    spans: list[Span]  # of inference and training, by the clock of `time.perf_counter`
    stage_times: Mapping[str, StageTimes] | None  # of pipelines


def learn(
    state: RunState,
    run: Run,
    rolled: RewardedRollout,
    observe: Observer,
    before_update: Callable[[], None] | None = None,
) -> Learned:
    """Score a roll-out, and train policy, critic and student on it; the models are used up.

    Where it was drawn ahead, each token weighs as much as `training.importance` says. What
    `before_update` raises leaves the models whole.
    """
    metrics = rolled.metrics | weights_received(state.models, run)
    coefficient = state.host.kl_coefficient
    watch = CallWatch()
    measures = state.host.stage_times is None and not run.config.deterministic

    def heard(phase: str, parts: PhaseParts) -> None:
        watch.follow(parts, tasks=measures and distributed.count() == 1)
        observe(phase, parts)

    with _timed("inference", metrics, observe):
        samples = as_sequences(rolled.samples, run.generation.decoding.max_length)
        models = scorers(state.models, run)
        of_inference = functools.partial(heard, "inference")
        scored, padding = score(samples, models, run.scoring, rolled.scored, of_inference)
        batch, kl = prepare(scored, rolled.rewards, rolled.ended, coefficient, run.advantage)
        metrics |= {"kl/coefficient": coefficient, "inference/padding": padding}
        metrics |= {"plan/changed": 1.0} if state.host.plan_changed else {}
        told = {} if kl is None else {"kl/response": kl}
        behind = 0 if rolled.drawn_at is None else state.step - rolled.drawn_at
        if rolled.drawn_at is not None:
            batch, weights = weigh_advantages(batch, run.training.lag_clip)
            told |= weights | {"lag/updates": float(behind)}
        if "logprobs" in scored.columns and not behind:
            columns = scored.columns
            told |= mismatch(columns["sampled_logprobs"], columns["logprobs"], scored.mask)
        # What is not finite is the update's to tell.
        metrics |= {name: value for name, value in told.items() if math.isfinite(value)}
    if before_update:
        before_update()

    with watch, _timed("training", metrics, observe):
        stage_times = state.host.stage_times
        if measures:
            stage_times = measure_update(state.models, batch, run.learners, state.step) or None
        models, losses = update(
            state.models,
            batch,
            run.learners,
            step=state.step,
            kl_weight=0.0 if run.advantage.kl_in_reward else coefficient,
            observe=functools.partial(heard, "training"),
            skipped=state.host.skipped,
            stage_times=stage_times,
        )
        spans = watch.spans(run.lanes.of)
    models, distilled = distill_drafter(models, samples, run, state.step + 1, observe)
    return Learned(models, metrics | losses | distilled, spans, stage_times)


def compile_step(state: RunState, run: Run) -> None:
    """Compile inference and training of the next step, for samples as long as they may be.

    Nothing is run but the advantages. Shorter samples may need programs of other sizes.
    """
    # Weights that go elsewhere stay where they are: only shapes do.
    models: Models = shapes(state.models)
    rows, _ = run.prompts.batches.take(state.host.position)
    top_k = run.generation.decoding.sampling.top_k
    tokens = run.generation.max_new_tokens
    samples = [
        Sample(
            0,
            Request(run.prompts.prompts.tokens[row], (0,), tokens),
            [],
            tokens=[0] * tokens,
            logprobs=[0.0] * tokens,
            support=[np.zeros(top_k, np.int32)] * tokens if top_k else [],
        )
        for row in np.repeat(rows, run.generation.samples_per_prompt)
    ]
    sequences = as_sequences(samples, run.generation.decoding.max_length)
    scored = compile_scores(sequences, scorers(models, run), run.scoring)
    rewards = np.zeros(len(samples), np.float32)
    ended = np.ones(len(samples), bool)  # else none may be trained on (training.drop_overlong)
    batch, _ = prepare(scored, rewards, ended, 0.0, run.advantage)
    compile_update(models, batch, run.learners, state.step)


def apply_gradient(
    state: RunState,
    run: Run,
    rolled: RewardedRollout,
    weights: Model,
    metrics: Mapping[str, jax.Array],
) -> tuple[RunState, StepReport]:
    """End the step of an objective that has a gradient of its own, of the policy's weights.

    metrics: "loss/policy" and "kl/mean", [] float32, and what else there is to tell. Where one of
    them or the gradient is not finite, the policy stays as it is, and the step is counted as
    skipped; ValueError where more than `training.max_skipped` come in a row.
    """
    gradient = Gradient(weights, dict(metrics))
    (norm,), (finite,) = norms_and_finite([gradient])
    policy = take_step(run.learners["policy"], state.models["policy"], gradient, finite)
    found = to_host.fetch({**metrics, "gradient/norm": norm})
    told = {name: float(value) for name, value in found.items()}
    broken = [name for name, value in told.items() if not math.isfinite(value)]
    skipped = state.host.skipped + 1 if broken else 0
    if skipped > run.training.max_skipped:
        raise ValueError(
            f"{broken[0]} is {told[broken[0]]}; the step was not taken, and training.max_skipped is"
            f" {run.training.max_skipped}: lower the learning rate."
        )
    told |= rolled.metrics | dict.fromkeys(broken, 0.0)
    told |= {"training/skipped": float(bool(broken)), "training/skipped_in_row": float(skipped)}
    host = dataclasses.replace(rolled.host, step=state.step + 1, skipped=skipped)
    before = told["generation/seconds"] + told["inference/seconds"]
    told["training/seconds"] = time.perf_counter() - rolled.began - before
    models = state.models | {"policy": policy.counted()}
    return RunState(models, host), report_step(rolled, told, host)


def report_step(rolled: RewardedRollout, metrics: dict[str, float], host: HostState) -> StepReport:
    """Put together what there is to tell of a finished step: of its roll-out, and the metrics."""
    metrics["generation/tokens_so_far"] = host.training.counts.tokens
    table = table_of(rolled.responses, rolled.rewards)
    selector = host.training.selector
    return StepReport(metrics, table, rolled.spans, selector.last_stage if selector else [])


def scoring_queue(policy: Model, models: Models, run: Run) -> ScoringQueue | None:
    """Make the queue of what slices score beside generation; None where none does.

    policy: as generation has it.
    """
    if not run.generation.scoring_seconds:
        return None
    layout = run.generation.layout
    length = run.generation.decoding.max_length
    rows = max(1, run.scoring.microbatch_rows // layout.slices)
    place = functools.partial(decoding_weights, layout=layout)
    rewards = {
        name: dataclasses.replace(one, model=place(one.model), rows=rows, length_bucket=length)
        for name, one in run.rewards.models.items()
    }
    scoring = scorers(models, run)
    return ScoringQueue(
        Scoring(
            {role: policy if role == "policy" else place(one) for role, one in scoring.items()},
            temperature=run.scoring.temperature,
            rows=rows,
            length_bucket=run.scoring.length_bucket,
            max_length=length,
            rewards=rewards,
        )
    )


def prepare(
    batch: Sequences,
    rewards: np.ndarray,
    ended: np.ndarray,
    kl_coefficient: float,
    advantage: AdvantageConfig,
) -> tuple[Sequences, float | None]:
    """Return scored samples with rewards and advantages; what is not trained on is masked out.

    rewards [B] float32 (NaN where scoring failed) and ended [B] bool (the response has an end) are
    of whole samples. Returns also the KL of a response to the reference, in nats; None where the
    update measures it.
    """
    columns = batch.columns
    mask, advantages, returns, kl = jax.device_get(
        compute_advantages(
            rewards,
            ended,
            batch.mask,
            columns.get("logprobs"),
            columns.get("reference_logprobs"),
            columns.get("values"),
            kl_coefficient=np.float32(kl_coefficient),
            config=advantage,
        )
    )
    found = {"rewards": rewards, "advantages": advantages}
    found |= {} if returns is None else {"returns": returns}
    prepared = dataclasses.replace(batch, mask=mask).with_columns(**found)
    return prepared, None if kl is None else float(kl)


def distill_drafter(
    models: Models, samples: Sequences, run: Run, step: int, observe: Observer
) -> tuple[Models, dict[str, float]]:
    """Let the student learn from the policy as it is now, where it is kept current."""
    if run.distillation is None:
        return models, {}
    start = time.perf_counter()
    alive = functools.partial(observe, "training", None)
    student, metrics = distill(
        models["drafter"],
        models["policy"].weights,
        samples,
        run.distillation,
        step,
        alive,
        run.frozen.get("student"),
    )
    seconds = {"drafter/seconds": time.perf_counter() - start}
    return models | {"drafter": student}, metrics | seconds


def _finish(
    learned: Learned, rolled: RewardedRollout, host: HostState, run: Run
) -> tuple[RunState, StepReport]:
    """End a step: the host learns of the KL that was measured, and all is reported.

    Where no KL was measured, as every minibatch was skipped, the coefficient stays.
    """
    models, metrics, spans, stage_times = learned
    coefficient = host.kl_coefficient
    if "kl/response" in metrics:
        kl = metrics["kl/response"]
        coefficient = run.next_kl_coefficient(coefficient, kl, len(rolled.samples))
    step = host.step + 1
    host = dataclasses.replace(
        host,
        step=step,
        kl_coefficient=coefficient,
        distilled_at=step if run.distillation else host.distilled_at,
        skipped=int(metrics["training/skipped_in_row"]),
        stage_times=stage_times,
    )
    if "drafter" in (*models, *run.frozen):
        metrics |= _drafter_age(models, host)
    metrics.setdefault("kl/response", 0.0)
    spans += [
        Span(lane, "inference", *rolled.rewarded, len(rolled.samples), "reward_inference", 0)
        for lane in run.lanes.of_call.get("reward_inference", ())
        if distributed.leads()
    ]
    of_ranks = distributed.gather(since(spans, rolled.began))
    spans = itertools.chain(rolled.spans, *of_ranks)
    rolled = dataclasses.replace(rolled, spans=list(spans))
    return RunState(models, host), report_step(rolled, metrics, host)


def _drafter_age(models: Models, host: HostState) -> dict[str, float]:
    """Count a student's updates, the policy's when the drafter last learned, and those since."""
    version = int(to_host.fetch(models["drafter"].version)) if "drafter" in models else 0
    return {
        "drafter/version": version,
        "drafter/policy_step": host.distilled_at,
        "drafter/behind": host.step - host.distilled_at,
    }


@contextlib.contextmanager
def _timed(phase: str, metrics: dict[str, float], observe: Observer) -> Iterator[None]:
    """Say that a phase begins, and add the seconds that it takes to `PHASE/seconds`."""
    observe(phase, None)
    start = time.perf_counter()
    yield
    name = f"{phase}/seconds"
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
