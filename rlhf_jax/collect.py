"""The samples of a step and what they earn; and the same over held-out prompts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.engine import warm_up
from rlhf_jax.generation.history import GenerationCounts, as_rollout, requests
from rlhf_jax.generation.requests import GenerationConfig, RoundReport, Sample
from rlhf_jax.generation.scheduler import shared
from rlhf_jax.generation.speculative.drafters import teacher
from rlhf_jax.generation.strategy import prior
from rlhf_jax.generation.strategy.acceptance import Observations
from rlhf_jax.inference.overlap import Scored, Scoring, ScoringModels, ScoringQueue
from rlhf_jax.model.transformer import cast, pad_vocab, unstack
from rlhf_jax.monitoring.trace import Timeline, idle_share, since
from rlhf_jax.rewards.combination import Response, Scorer
from rlhf_jax.rollout import placing_of, roll_out, spans_of
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.slice_groups import slice_group_of
from rlhf_jax.state import HostState, Observer, RolloutStats, Stages
from rlhf_jax.training.batching import signal
from rlhf_jax.training.distill import student_for
from rlhf_jax.training.experience import penalise_and_clip
from rlhf_jax.types import Model, ModelConfigs

T = TypeVar("T")
KEPT = 0.5  # what counts of acceptance weigh once the policy has moved
READ = 8  # texts that a draft model reads after a stage, at most,
SPARED = 16  # and of so many one: far less than it saves


@dataclasses.dataclass(frozen=True)
class RewardedRollout:
    """Finished samples in the order they were asked for, as answers, and what they earned."""

    samples: list[Sample]
    answers: list[Response]
    rewards: np.ndarray  # [B] float32
    # by sample id, what slices had time for
    scored: dict[int, Scored] = dataclasses.field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        """One row a sample, for people to read; the reward is None where scoring failed."""
        rewards = [float(reward) if np.isfinite(reward) else None for reward in self.rewards]
        rows = zip(self.answers, rewards, strict=True)
        return [
            {"prompt": a.prompt, "response": a.response, "reward": reward} for a, reward in rows
        ]

    def rows(self, chosen: np.ndarray) -> RewardedRollout:
        """The samples of these indices."""
        samples, answers = ([held[i] for i in chosen] for held in (self.samples, self.answers))
        return RewardedRollout(samples, answers, self.rewards[chosen], self.scored)


def collect(
    policy: Model,
    drafter: Model | None,
    prompts: Prompts,
    memory: HostState,
    step: int,
    stages: Stages,
    observe: Observer,
    judges: ScoringModels,
) -> tuple[RewardedRollout, RolloutStats, dict[str, float]]:
    """Samples of `prompts_per_step` prompts and their rewards, what generation has learned, and
    metrics.

    Where inference is fused, `judges` score beside the policy what is finished. `memory.timeline`
    is this step's.

    With `resample`, prompts whose samples all earned the same are set aside and others drawn, up to
    that many more roll-outs; those set aside fill what is still missing (dynamic sampling: DAPO, Yu
    et al. 2025, 3.2).
    """
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    drafter = student_for(target, drafter, stages.mesh)
    scoring_queue = _backlog(target, judges, stages)
    memory.timeline = Timeline()
    selector = copy.deepcopy(memory.drafting.selector)
    tally = GenerationCounts()
    found = []
    seconds = {"generation": 0.0, "inference": 0.0}
    used = set[int]()  # ids of earlier samples whose noise is repeated
    # rewards as the advantages will see them, samples to keep
    seen = np.zeros(0, np.float32)
    kept = np.zeros(0, int)
    for attempt in range(stages.resample + 1):
        first_id = (
            (step * (stages.resample + 1) + attempt)
            * stages.prompts_per_step
            * stages.samples_per_prompt
        )
        with _timed("generation", seconds, observe):
            rows = memory.batches.next()
            asked = [prompts.tokens[index] for index in rows]
            history = memory.drafting.history
            repeated = stages.repeated_noise
            wanted = requests(
                asked,
                stages.samples_per_prompt,
                stages.max_new_tokens,
                first_id,
                history,
                repeated,
                used,
            )
            placing = placing_of(
                stages, memory.drafting.lengths, f"step {step} attempt {attempt}", scoring_queue
            )
            counting = _counting(tally, memory.timeline, observe)
            aside = (
                _idle_work(
                    scoring_queue, dict(zip(map(id, wanted), rows, strict=True)), prompts, stages
                )
                if scoring_queue
                else {}
            )
            samples = roll_out(
                target,
                drafter,
                wanted,
                stages.decoding,
                stages,
                placing,
                selector,
                counting,
                **aside,
            )
        with _timed("inference", seconds, observe):
            scored = (
                _scored_by_all(scoring_queue, stages)
                if scoring_queue and stages.reward_models
                else {}
            )
            found.append(
                compute_rewards(
                    samples, prompts, np.repeat(rows, stages.samples_per_prompt), stages, scored
                )
            )
        ended = finished(samples, stages.decoding.stop_tokens)
        seen = np.append(seen, penalise_and_clip(found[-1][0].rewards, ended, stages.shaping))
        kept, enough = choose_groups(seen, stages.samples_per_prompt, stages.prompts_per_step)
        if enough:
            break
    everything = _joined([collected for collected, _ in found])
    tally = sum(_spoken(tally, GenerationCounts(), stages), GenerationCounts())
    chosen = selector.metrics() if selector else {}
    with _timed("generation", seconds, observe):
        learned = learn(RolloutStats(tally, selector), drafter, everything.samples, stages)
    metrics = (
        tally.metrics(seconds["generation"]) | chosen | _together([figures for _, figures in found])
    )
    metrics |= {"inference/seconds": seconds["inference"], "generation/attempts": len(found)}
    if scoring_queue:
        everything = dataclasses.replace(
            everything, scored=scored or _scored_by_all(scoring_queue, stages)
        )
        memory.timeline.spans += scoring_queue.spans()
    of_all = _spoken(since(memory.timeline.spans, memory.timeline.start), [], stages)
    memory.timeline.spans = [span for spans in of_all for span in spans]
    metrics["generation/idle_share"] = idle_share(
        memory.timeline.spans, stages.mesh.shape["slices"]
    )
    metrics["generation/groups_without_signal"] = float(
        1 - signal(seen, stages.samples_per_prompt).mean()
    )
    return everything.rows(kept), learned, metrics | _outcome(everything, stages)


def _backlog(target: Model, judges: ScoringModels, stages: Stages) -> ScoringQueue | None:
    """What slices score beside generation, where inference is fused with it."""
    if not stages.scoring:
        return None
    place = functools.partial(decoding_weights, dtype=stages.dtype, mesh=stages.mesh)
    reference, critic = (judge and place(judge) for judge in judges)
    training = stages.training
    rows = max(1, stages.training.microbatch_rows // stages.mesh.shape["slices"])
    rewards = {
        name: dataclasses.replace(
            judge, model=place(judge.model), rows=rows, bucket=stages.decoding.max_length
        )
        for name, judge in stages.reward_models.items()
    }
    return ScoringQueue(
        Scoring(
            target,
            reference,
            critic,
            training.temperature,
            rows,
            stages.decoding.max_length,
            rewards,
        )
    )


def _idle_work(
    scoring_queue: ScoringQueue, row_of: Mapping[int, int], prompts: Prompts, stages: Stages
) -> dict[str, Any]:
    """What a roll-out hands to a backlog: finished samples, their prompts by request, and idle
    slices.
    """

    def heard(sample: Sample) -> None:
        if not stages.reward_models:
            return scoring_queue.add(sample)
        (answer,) = answered(
            [sample], prompts, np.array([row_of[id(sample.request)]]), stages.tokenizer
        )
        return scoring_queue.add(sample, answer)

    return {"finished": heard, "spare": scoring_queue}


def _spoken(own: T, nothing: T, stages: Stages) -> list[T]:
    """What each process has to say of its slices: of those that share one, the first."""
    return distributed.gather(own if slice_group_of(stages.mesh).leads else nothing)


def _scored_by_all(scoring_queue: ScoringQueue, stages: Stages) -> dict[int, Scored]:
    """What the slices of all processes have scored."""
    return {
        number: scored
        for part in _spoken(scoring_queue.scored(), {}, stages)
        for number, scored in part.items()
    }


def learn(
    learned: RolloutStats,
    drafter: Model | None,
    samples: Sequence[Sample],
    stages: Stages,
    decoding: GenerationConfig | None = None,
) -> RolloutStats:
    """The end of a stage for its selector: how well the draft model predicts some of the texts,
    costs fitted anew.

    The draft model reads a few texts once, teacher-forced, so that it is known even where it never
    drafted.
    """
    decoding = decoding or stages.decoding
    selector = learned.selector
    if selector is None:
        return learned
    # Under rejection, text has noise of its own: no rank in the drafter's draw says what would have
    # been accepted.
    if (
        drafter is not None
        and decoding.uses_drafter("model")
        and decoding.acceptance == "replayable"
    ):
        chosen = samples[:: max(1, len(samples) // READ)][
            : min(READ, max(1, len(samples) // SPARED))
        ]
        selector.taught("model", read_texts(drafter, chosen, decoding, stages))
    selector.stage_ended(KEPT)
    if distributed.started():  # all begin the next stage alike
        selector.restore(distributed.broadcast(selector.state()))
    return learned


def read_texts(
    drafter: Model, samples: Sequence[Sample], decoding: GenerationConfig, stages: Stages
) -> Observations:
    """What the draft model would have done on finished texts, READ rows, or as many as the devices
    share evenly.
    """
    rollout = as_rollout(samples, decoding.max_length)
    rows = shared(READ, stages.mesh)
    padding = ((0, rows - len(samples)), (0, 0))
    tokens = np.pad(rollout.tokens, padding)
    mask = np.pad(rollout.mask, padding)
    key = np.full((rows, 2), decoding.seed, np.uint32)
    key[: len(samples), 1] = rollout.sample_id
    placed = meshes.place_rows((tokens, mask, key), stages.mesh)
    scored = teacher.score(
        drafter, *placed, decoding.sampling, rows=rows, attend=stages.draft_attend
    )
    rank, confidence = distributed.fetch(scored)
    seen_prompt = np.array(
        [sample.seen_prompt for sample in samples] + [False] * (rows - len(samples))
    )
    return teacher.as_evidence(rank, confidence, mask, seen_prompt)


def choose_groups(rewards: np.ndarray, group: int, wanted: int) -> tuple[np.ndarray, bool]:
    """Sample indices [wanted * group] of the first `wanted` groups whose rewards differ, and
    whether there are so many.

    Where there are not, the first of the others fill up; groups stay in order.
    """
    trains_drafter = signal(rewards, group)
    chosen = np.sort(np.argsort(~trains_drafter, kind="stable")[:wanted])
    return (chosen[:, None] * group + np.arange(group)).reshape(-1), int(
        trains_drafter.sum()
    ) >= wanted


def compute_rewards(
    samples: list[Sample],
    prompts: Prompts,
    rows: np.ndarray,
    stages: Stages,
    scored: Mapping[int, Scored] = {},
) -> tuple[RewardedRollout, dict[str, float]]:
    """The samples of prompts `rows` [B], as answers with their rewards, and what the reward
    reports.

    What slices have `scored` of them is not scored again. A sample whose scoring failed earns
    `stages.failed`.
    """
    answers = answered(samples, prompts, rows, stages.tokenizer)
    own = [
        scored[sample.sample_id].rewards if sample.sample_id in scored else {} for sample in samples
    ]
    known = {
        name: {at: one[name] for at, one in enumerate(own) if name in one}
        for name in stages.reward_models
    }
    scores, figures = stages.reward(answers, known)
    rewards = np.where(np.isnan(scores.values), np.float32(stages.failed), scores.values)
    return RewardedRollout(samples, answers, rewards), figures


def answered(
    samples: list[Sample], prompts: Prompts, rows: np.ndarray, tokenizer: Tokenizer
) -> list[Response]:
    """What the reward reads: each sample's text beside its prompt, row and messages."""
    return [
        Response(
            prompts.texts[row],
            prompts.messages[row],
            prompts.rows[row],
            tokenizer.decode(sample.tokens),
        )
        for sample, row in zip(samples, rows, strict=True)
    ]


def evaluate(
    policy: Model,
    drafter: Model | None,
    prompts: Prompts,
    measures: Mapping[str, Scorer],
    memory: HostState,
    decoding: GenerationConfig,
    samples_per_prompt: int,
    stages: Stages,
    observe: Observer = lambda phase, report: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means of the measures over held-out prompts, and the table of samples with the first measure.

    The noise is the same every time and not training's (another seed), so two evaluations are
    paired, and the text of the one before is the draft of this one. Samples that a measure failed
    on are left out of its mean, and counted.
    """
    observe("evaluation", None)
    wanted = requests(
        prompts.tokens, samples_per_prompt, stages.max_new_tokens, 0, memory.evaluation.history
    )
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    drafter = student_for(target, drafter, stages.mesh)
    selector = copy.deepcopy(memory.evaluation.selector)
    tally = GenerationCounts()
    counting = _counting(tally, Timeline(), observe, "evaluation")
    placing = placing_of(stages, memory.evaluation.lengths, "evaluation")
    samples = roll_out(target, drafter, wanted, decoding, stages, placing, selector, counting)
    tally = sum(_spoken(tally, GenerationCounts(), stages), GenerationCounts())
    memory.evaluated = (
        samples,
        learn(RolloutStats(tally, selector), drafter, samples, stages, decoding),
    )
    answers = answered(
        samples, prompts, np.repeat(np.arange(len(prompts)), samples_per_prompt), stages.tokenizer
    )
    scores = {name: measure(answers).values for name, measure in measures.items()}
    means = {
        f"eval/{name}": float(np.nanmean(values))
        for name, values in scores.items()
        if np.isfinite(values).any()
    }
    failed = {f"eval/{name}/failed": int(np.isnan(values).sum()) for name, values in scores.items()}
    means |= {name: count for name, count in failed.items() if count}
    means["eval/generation/tokens_per_round"] = tally.metrics(0.0)["generation/tokens_per_round"]
    return means, RewardedRollout(samples, answers, next(iter(scores.values()))).table()


def decoding_weights(policy: Model, dtype, mesh: jax.sharding.Mesh) -> Model:
    """The policy as generation wants it: layers unrolled, in `dtype`, split over the tensor axis
    only.

    On a CPU a tied head is copied as [M, V], which is read faster than the embedding the other way
    round. Where the vocabulary is split, each device has whole blocks of the two-level draw.
    """
    return _decoding_weights(policy, dtype, mesh, jax.default_backend() == "cpu")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decoding_weights(policy: Model, dtype, mesh: jax.sharding.Mesh, untie: bool) -> Model:
    model = unstack(cast(policy, dtype))
    if untie and model.head is None:
        model = dataclasses.replace(model, head=model.embed.T)
    if mesh.shape["tensor"] > 1 and not model.config.scalar_head:
        model = pad_vocab(model, BLOCK * mesh.shape["tensor"])
    return jax.lax.with_sharding_constraint(
        model, meshes.model_shardings(model, mesh, "generation")
    )


def compile_rounds(policy: Model, drafter: Model | None, memory: HostState, stages: Stages) -> None:
    """Compile the rounds that a step begins with ahead of use, for every number of rows they may
    shrink to.

    What XLA says of them is where a selector's costs begin, unless it has measured some for these
    models and devices.
    """
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    drafter = student_for(target, drafter, stages.mesh)
    selectors = memory.selectors()
    prompts = range(stages.prompts_per_step)
    samples = (
        len(prompts if stages.plan_reallocation else slice_group_of(stages.mesh).share(prompts))
        * stages.samples_per_prompt
    )
    does = warm_up(target, drafter, samples, stages.decoding, stages.mesh, bool(selectors))
    models = ModelConfigs(target.config, drafter and drafter.config)
    size = stages.decoding.max_rows, stages.decoding.max_length
    for selector in selectors:
        selector.begin(
            prior.costs(models, jax.default_backend(), target.norm.dtype.itemsize, does, *size)
        )


def finished(samples: Sequence[Sample], stop_tokens: tuple[int, ...]) -> np.ndarray:
    """[B] bool: the response ends with a stop token, and was not cut off."""
    return np.array([sample.tokens[-1] in stop_tokens for sample in samples])


@contextlib.contextmanager
def _timed(phase: str, seconds: dict[str, float], observe: Observer) -> Iterator[None]:
    observe(phase, None)
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def _counting(
    tally: GenerationCounts, timeline: Timeline, observe: Observer, phase: str = "generation"
) -> Callable[[RoundReport], None]:
    def arrived(report: RoundReport) -> None:
        tally.add(report)
        for span in spans_of(report):
            timeline.add(span)
        observe(phase, report)

    return arrived


def _joined(parts: Sequence[RewardedRollout]) -> RewardedRollout:
    samples = [sample for part in parts for sample in part.samples]
    answers = [answer for part in parts for answer in part.answers]
    return RewardedRollout(samples, answers, np.concatenate([part.rewards for part in parts]))


def _together(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of several attempts: failures add up, the rest are means."""
    names = dict.fromkeys(name for figures in attempts for name in figures)
    found = {name: [figures[name] for figures in attempts if name in figures] for name in names}
    return {
        name: float((np.sum if name.endswith("/failed") else np.mean)(values))
        for name, values in found.items()
    }


def _outcome(collected: RewardedRollout, stages: Stages) -> dict[str, float]:
    ended = finished(collected.samples, stages.decoding.stop_tokens)
    return {
        "reward/mean": float(collected.rewards.mean()),
        "reward/std": float(collected.rewards.std()),
        "response/length_mean": float(
            np.mean([len(sample.tokens) for sample in collected.samples])
        ),
        "response/unfinished": float(1 - ended.mean()),
    }
