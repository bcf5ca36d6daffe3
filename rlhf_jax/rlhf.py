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
from rlhf_jax.generation.requests import Request, RoundReport, Sample, as_rollout
from rlhf_jax.generation.speculative.round import ModelPair
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.inference.overlap import Scoring, ScoringQueue
from rlhf_jax.inference.scoring import TokenScores, compile_scores, score
from rlhf_jax.model.decoding import decoding_weights
from rlhf_jax.monitoring.parts import CallWatch, PhaseParts
from rlhf_jax.monitoring.trace import Span, since
from rlhf_jax.placement.pipelined import StageTimes
from rlhf_jax.rewards.samples import table_of
from rlhf_jax.rollout import RewardedRollout, draw_ahead, reward_samples, roll_out
from rlhf_jax.runtime import distributed, to_host
from rlhf_jax.runtime.beside import WorkBeside
from rlhf_jax.runtime.compilation import shapes
from rlhf_jax.runtime.shards import counted_up
from rlhf_jax.state import (
    HostState,
    Observer,
    Run,
    RunState,
    StepReport,
    decoding_models,
    ignore,
    weights_received,
)
from rlhf_jax.training.distill import distill
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages
from rlhf_jax.training.gradients import Gradient
from rlhf_jax.training.importance import weigh_advantages
from rlhf_jax.training.optimizer import apply, examine
from rlhf_jax.training.update import compile_update, measure_update, update
from rlhf_jax.types import Experience, Model, Rollout, TrainState


def step(state: RunState, run: Run, observe: Observer = ignore) -> tuple[RunState, StepReport]:
    """Take one iteration over the next prompts.

    The train state is used up once training begins; what is raised before that leaves it whole.
    `observe` may raise, but not in training, nor while samples of the next step are waited for.
    """
    models = decoding_models(state.train, run)
    if run.training.lag:
        return _step_ahead(models, state, run, observe)
    queue = scoring_queue(models, state.train, run)
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

    train: TrainState
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
    """Score a roll-out, and train policy, critic and student on it; the train state is used up.

    Where it was drawn ahead, each token weighs as much as `training.importance` says. What
    `before_update` raises leaves the train state whole.
    """
    metrics = rolled.metrics | weights_received(state.train, run)
    coefficient = state.host.kl_coefficient
    watch = CallWatch()
    measures = state.host.stage_times is None and not run.config.deterministic

    def heard(phase: str, parts: PhaseParts) -> None:
        watch.follow(parts, tasks=measures and distributed.count() == 1)
        observe(phase, parts)

    with _timed("inference", metrics, observe):
        rollout = as_rollout(rolled.samples, run.generation.decoding.max_length)
        models = (state.train.policy, run.frozen.reference, state.train.critic)
        of_inference = functools.partial(heard, "inference")
        scores = score(*models, rollout, run.scoring, rolled.scored, of_inference)
        experience, kl = make_experience(
            rollout, rolled.rewards, rolled.ended, scores, coefficient, run.advantage
        )
        metrics |= {"kl/coefficient": coefficient, "inference/padding": scores.padding}
        metrics |= {"plan/changed": 1.0} if state.host.plan_changed else {}
        told = {} if kl is None else {"kl/response": kl}
        behind = 0 if rolled.drawn_at is None else state.step - rolled.drawn_at
        if rolled.drawn_at is not None:
            experience, weights = weigh_advantages(experience, run.training.lag_clip)
            told |= weights | {"lag/updates": float(behind)}
        if scores.logprobs is not None and not behind:
            told |= mismatch(rollout.logprobs, scores.logprobs, rollout.mask)
        # What is not finite is the update's to tell.
        metrics |= {name: value for name, value in told.items() if math.isfinite(value)}
    if before_update:
        before_update()

    with watch, _timed("training", metrics, observe):
        stage_times = state.host.stage_times
        learns = (experience, run.optimizers, run.training)
        if measures:
            stage_times = measure_update(state.train, *learns) or None
        train, losses = update(
            state.train,
            *learns,
            kl_weight=0.0 if run.advantage.kl_in_reward else coefficient,
            observe=functools.partial(heard, "training"),
            skipped=state.host.skipped,
            stage_times=stage_times,
        )
        spans = watch.spans(run.lanes.of)
    train, distilled = distill_drafter(train, rollout, run, observe)
    return Learned(train, metrics | losses | distilled, spans, stage_times)


def compile_step(state: RunState, run: Run) -> None:
    """Compile inference and training of the next step, for samples as long as they may be.

    Nothing is run but the advantages. Shorter samples may need programs of other sizes.
    """
    # Weights that go elsewhere stay where they are: only shapes do.
    train = dataclasses.replace(shapes(state.train), step=state.train.step)
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
    rollout = as_rollout(samples, run.generation.decoding.max_length)
    reference = run.frozen.reference
    compile_scores(train.policy, reference, train.critic, rollout, run.scoring)

    zeros = np.zeros(rollout.mask.shape, np.float32)
    scores = TokenScores(
        logprobs=zeros if run.scoring.policy_logprobs else None,
        reference_logprobs=None if reference is None else zeros,
        values=None if train.critic is None else zeros,
    )
    rewards = np.zeros(len(samples), np.float32)
    ended = np.ones(len(samples), bool)  # else none may be trained on (training.drop_overlong)
    experience, _ = make_experience(rollout, rewards, ended, scores, 0.0, run.advantage)
    compile_update(train, experience, run.optimizers, run.training)


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
    train = state.train
    optimizer = run.optimizers.policy
    gradient = Gradient(weights, dict(metrics))
    (norm,), finite = examine((gradient,))
    policy, moments = apply(train.policy, train.optimizer, gradient, finite, optimizer=optimizer)
    train = dataclasses.replace(
        train, policy=policy, optimizer=moments, step=counted_up(train.step)
    )
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
    host = dataclasses.replace(rolled.host, skipped=skipped)
    before = told["generation/seconds"] + told["inference/seconds"]
    told["training/seconds"] = time.perf_counter() - rolled.began - before
    return RunState(train, host), report_step(rolled, told, host)


def report_step(rolled: RewardedRollout, metrics: dict[str, float], host: HostState) -> StepReport:
    """Put together what there is to tell of a finished step: of its roll-out, and the metrics."""
    metrics["generation/tokens_so_far"] = host.training.counts.tokens
    table = table_of(rolled.responses, rolled.rewards)
    selector = host.training.selector
    return StepReport(metrics, table, rolled.spans, selector.last_stage if selector else [])


def scoring_queue(models: ModelPair, train: TrainState, run: Run) -> ScoringQueue | None:
    """Make the queue of what slices score beside generation; None where none does."""
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
    return ScoringQueue(
        Scoring(
            policy=models[0] if run.scoring.policy_logprobs else None,
            reference=run.frozen.reference and place(run.frozen.reference),
            critic=train.critic and place(train.critic),
            temperature=run.scoring.temperature,
            rows=rows,
            length_bucket=run.scoring.length_bucket,
            max_length=length,
            rewards=rewards,
        )
    )


def make_experience(
    rollout: Rollout,
    rewards: np.ndarray,
    ended: np.ndarray,
    scores: TokenScores,
    kl_coefficient: float,
    advantage: AdvantageConfig,
) -> tuple[Experience, float | None]:
    """Turn rewards and scores into what training needs.

    rewards [B] float32 (NaN where scoring failed) and ended [B] bool (the response has an end) are
    of whole samples. Returns also the KL of a response to the reference, in nats; None where the
    update measures it.
    """
    mask, advantages, returns, kl = jax.device_get(
        compute_advantages(
            rewards,
            ended,
            rollout.mask,
            scores.logprobs,
            scores.reference_logprobs,
            scores.values,
            kl_coefficient=np.float32(kl_coefficient),
            config=advantage,
        )
    )
    experience = Experience(
        rollout=rollout,
        mask=mask,
        logprobs=scores.logprobs,
        reference_logprobs=scores.reference_logprobs,
        rewards=rewards,
        advantages=advantages,
        values=scores.values,
        returns=returns,
    )
    return experience, None if kl is None else float(kl)


def distill_drafter(
    train: TrainState, rollout: Rollout, run: Run, observe: Observer
) -> tuple[TrainState, dict[str, float]]:
    """Let the student learn from the policy as it is now, where it is kept current."""
    if run.distillation is None:
        return train, {}
    start = time.perf_counter()
    alive = functools.partial(observe, "training", None)
    train, metrics = distill(train, rollout, run.distillation, alive, run.frozen.student)
    return train, metrics | {"drafter/seconds": time.perf_counter() - start}


def _finish(
    learned: Learned, rolled: RewardedRollout, host: HostState, run: Run
) -> tuple[RunState, StepReport]:
    """End a step: the host learns of the KL that was measured, and all is reported.

    Where no KL was measured, as every minibatch was skipped, the coefficient stays.
    """
    train, metrics, spans, stage_times = learned
    coefficient = host.kl_coefficient
    if "kl/response" in metrics:
        kl = metrics["kl/response"]
        coefficient = run.next_kl_coefficient(coefficient, kl, len(rolled.samples))
    host = dataclasses.replace(
        host,
        kl_coefficient=coefficient,
        distilled_at=int(train.step) if run.distillation else host.distilled_at,
        skipped=int(metrics["training/skipped_in_row"]),
        stage_times=stage_times,
    )
    if train.drafter is not None or run.frozen.drafter is not None:
        metrics |= _drafter_age(train, host)
    metrics.setdefault("kl/response", 0.0)
    spans += [
        Span(lane, "inference", *rolled.rewarded, len(rolled.samples), "reward_inference", 0)
        for lane in run.lanes.of_call.get("reward_inference", ())
        if distributed.leads()
    ]
    of_ranks = distributed.gather(since(spans, rolled.began))
    spans = itertools.chain(rolled.spans, *of_ranks)
    rolled = dataclasses.replace(rolled, spans=list(spans))
    return RunState(train, host), report_step(rolled, metrics, host)


def _drafter_age(train: TrainState, host: HostState) -> dict[str, float]:
    """Count a student's updates, the policy's when the drafter last learned, and those since."""
    version = train.drafter_version
    return {
        "drafter/version": 0 if version is None else int(to_host.fetch(version)),
        "drafter/policy_step": host.distilled_at,
        "drafter/behind": int(train.step) - host.distilled_at,
    }


@contextlib.contextmanager
def _timed(phase: str, metrics: dict[str, float], observe: Observer) -> Iterator[None]:
    """Say that a phase begins, and add the seconds that it takes to `PHASE/seconds`."""
    observe(phase, None)
    start = time.perf_counter()
    yield
    name = f"{phase}/seconds"
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
