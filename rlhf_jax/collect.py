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
from rlhf_jax import drafting, processes
from rlhf_jax import mesh as meshes
from rlhf_jax.config import ModelConfigs
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.experience import bound
from rlhf_jax.fusion import Backlog, Judges, Scored, Scoring
from rlhf_jax.generation.board import shared
from rlhf_jax.generation.crew import crew_of
from rlhf_jax.generation.drafters import teacher
from rlhf_jax.generation.engine import warm_up
from rlhf_jax.generation.rollout import Tally, as_rollout, requests
from rlhf_jax.generation.samples import Decoding, RoundReport, Sample
from rlhf_jax.generation.strategy.acceptance import Evidence
from rlhf_jax.inference.rewards import Answer, Scorer
from rlhf_jax.model.transformer import cast, pad_vocab, unstack
from rlhf_jax.roll_out import placing_of, roll_out, spans_of
from rlhf_jax.stages import Learned, Memory, Observer, Stages
from rlhf_jax.timeline import Timeline, idle_share, since
from rlhf_jax.training.batching import signal
from rlhf_jax.training.distill import student_for
from rlhf_jax.types import Model

T = TypeVar("T")
KEPT = 0.5  # what counts of acceptance weigh once the policy has moved
READ = 8  # texts that a draft model reads after a stage, at most,
SPARED = 16  # and of so many one: far less than it saves


@dataclasses.dataclass(frozen=True)
class Collected:
    """Finished samples in the order they were asked for, as answers, and what they earned."""

    samples: list[Sample]
    answers: list[Answer]
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

    def rows(self, chosen: np.ndarray) -> Collected:
        """The samples of these indices."""
        samples, answers = ([held[i] for i in chosen] for held in (self.samples, self.answers))
        return Collected(samples, answers, self.rewards[chosen], self.scored)


def collect(
    policy: Model,
    drafter: Model | None,
    prompts: Prompts,
    memory: Memory,
    step: int,
    stages: Stages,
    observe: Observer,
    judges: Judges,
) -> tuple[Collected, Learned, dict[str, float]]:
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
    backlog = _backlog(target, judges, stages)
    memory.timeline = Timeline()
    selector = copy.deepcopy(memory.drafting.selector)
    tally = Tally()
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
                stages, memory.drafting.lengths, f"step {step} attempt {attempt}", backlog
            )
            counting = _counting(tally, memory.timeline, observe)
            aside = (
                _aside(backlog, dict(zip(map(id, wanted), rows, strict=True)), prompts, stages)
                if backlog
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
            scored = _scored_by_all(backlog, stages) if backlog and stages.reward_models else {}
            found.append(
                earn(samples, prompts, np.repeat(rows, stages.samples_per_prompt), stages, scored)
            )
        ended = finished(samples, stages.decoding.stop_tokens)
        seen = np.append(seen, bound(found[-1][0].rewards, ended, stages.shaping))
        kept, enough = choose_groups(seen, stages.samples_per_prompt, stages.prompts_per_step)
        if enough:
            break
    everything = _joined([collected for collected, _ in found])
    tally = sum(_spoken(tally, Tally(), stages), Tally())
    chosen = selector.metrics() if selector else {}
    with _timed("generation", seconds, observe):
        learned = learn(Learned(tally, selector), drafter, everything.samples, stages)
    metrics = (
        tally.metrics(seconds["generation"]) | chosen | _together([figures for _, figures in found])
    )
    metrics |= {"inference/seconds": seconds["inference"], "generation/attempts": len(found)}
    if backlog:
        everything = dataclasses.replace(
            everything, scored=scored or _scored_by_all(backlog, stages)
        )
        memory.timeline.spans += backlog.spans()
    of_all = _spoken(since(memory.timeline.spans, memory.timeline.start), [], stages)
    memory.timeline.spans = [span for spans in of_all for span in spans]
    metrics["generation/idle_share"] = idle_share(
        memory.timeline.spans, stages.mesh.shape["slices"]
    )
    metrics["generation/groups_without_signal"] = float(
        1 - signal(seen, stages.samples_per_prompt).mean()
    )
    return everything.rows(kept), learned, metrics | _outcome(everything, stages)


def _backlog(target: Model, judges: Judges, stages: Stages) -> Backlog | None:
    """What slices score beside generation, where inference is fused with it."""
    if not stages.scoring:
        return None
    place = functools.partial(decoding_weights, dtype=stages.dtype, mesh=stages.mesh)
    reference, critic = (judge and place(judge) for judge in judges)
    training = stages.training
    rows = max(1, stages.training.micro_rows // stages.mesh.shape["slices"])
    rewards = {
        name: dataclasses.replace(
            judge, model=place(judge.model), rows=rows, bucket=stages.decoding.slots
        )
        for name, judge in stages.reward_models.items()
    }
    return Backlog(
        Scoring(
            target, reference, critic, training.temperature, rows, stages.decoding.slots, rewards
        )
    )


def _aside(
    backlog: Backlog, row_of: Mapping[int, int], prompts: Prompts, stages: Stages
) -> dict[str, Any]:
    """What a roll-out hands to a backlog: finished samples, their prompts by request, and idle
    slices.
    """

    def heard(sample: Sample) -> None:
        if not stages.reward_models:
            return backlog.add(sample)
        (answer,) = answered(
            [sample], prompts, np.array([row_of[id(sample.request)]]), stages.tokenizer
        )
        return backlog.add(sample, answer)

    return {"finished": heard, "spare": backlog}


def _spoken(own: T, nothing: T, stages: Stages) -> list[T]:
    """What each process has to say of its slices: of those that share one, the first."""
    return processes.gather(own if crew_of(stages.mesh).leads else nothing)


def _scored_by_all(backlog: Backlog, stages: Stages) -> dict[int, Scored]:
    """What the slices of all processes have scored."""
    return {
        number: scored
        for part in _spoken(backlog.scored(), {}, stages)
        for number, scored in part.items()
    }


def learn(
    learned: Learned,
    drafter: Model | None,
    samples: Sequence[Sample],
    stages: Stages,
    decoding: Decoding | None = None,
) -> Learned:
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
    if drafter is not None and decoding.drafts_by("model") and decoding.acceptance == "replayable":
        chosen = samples[:: max(1, len(samples) // READ)][
            : min(READ, max(1, len(samples) // SPARED))
        ]
        selector.taught("model", read_texts(drafter, chosen, decoding, stages))
    selector.stage_ended(KEPT)
    if processes.started():  # all begin the next stage alike
        selector.restore(processes.from_leader(selector.state()))
    return learned


def read_texts(
    drafter: Model, samples: Sequence[Sample], decoding: Decoding, stages: Stages
) -> Evidence:
    """What the draft model would have done on finished texts, READ rows, or as many as the devices
    share evenly.
    """
    rollout = as_rollout(samples, decoding.slots)
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
    rank, confidence = processes.fetch(scored)
    familiar = np.array([sample.familiar for sample in samples] + [False] * (rows - len(samples)))
    return teacher.as_evidence(rank, confidence, mask, familiar)


def choose_groups(rewards: np.ndarray, group: int, wanted: int) -> tuple[np.ndarray, bool]:
    """Sample indices [wanted * group] of the first `wanted` groups whose rewards differ, and
    whether there are so many.

    Where there are not, the first of the others fill up; groups stay in order.
    """
    teaches = signal(rewards, group)
    chosen = np.sort(np.argsort(~teaches, kind="stable")[:wanted])
    return (chosen[:, None] * group + np.arange(group)).reshape(-1), int(teaches.sum()) >= wanted


def earn(
    samples: list[Sample],
    prompts: Prompts,
    rows: np.ndarray,
    stages: Stages,
    scored: Mapping[int, Scored] = {},
) -> tuple[Collected, dict[str, float]]:
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
    return Collected(samples, answers, rewards), figures


def answered(
    samples: list[Sample], prompts: Prompts, rows: np.ndarray, tokenizer: Tokenizer
) -> list[Answer]:
    """What the reward reads: each sample's text beside its prompt, row and messages."""
    return [
        Answer(
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
    memory: Memory,
    decoding: Decoding,
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
    tally = Tally()
    counting = _counting(tally, Timeline(), observe, "evaluation")
    placing = placing_of(stages, memory.evaluation.lengths, "evaluation")
    samples = roll_out(target, drafter, wanted, decoding, stages, placing, selector, counting)
    tally = sum(_spoken(tally, Tally(), stages), Tally())
    memory.evaluated = samples, learn(Learned(tally, selector), drafter, samples, stages, decoding)
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
    return means, Collected(samples, answers, next(iter(scores.values()))).table()


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


def compile_rounds(policy: Model, drafter: Model | None, memory: Memory, stages: Stages) -> None:
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
        len(prompts if stages.decide else crew_of(stages.mesh).share(prompts))
        * stages.samples_per_prompt
    )
    does = warm_up(target, drafter, samples, stages.decoding, stages.mesh, bool(selectors))
    models = ModelConfigs(target.config, drafter and drafter.config)
    size = stages.decoding.rows, stages.decoding.slots
    for selector in selectors:
        selector.begin(
            drafting.costs(models, jax.default_backend(), target.norm.dtype.itemsize, does, *size)
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
    tally: Tally, timeline: Timeline, observe: Observer, phase: str = "generation"
) -> Callable[[RoundReport], None]:
    def arrived(report: RoundReport) -> None:
        tally.add(report)
        for span in spans_of(report):
            timeline.add(span)
        observe(phase, report)

    return arrived


def _joined(parts: Sequence[Collected]) -> Collected:
    samples = [sample for part in parts for sample in part.samples]
    answers = [answer for part in parts for answer in part.answers]
    return Collected(samples, answers, np.concatenate([part.rewards for part in parts]))


def _together(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of several attempts: failures add up, the rest are means."""
    names = dict.fromkeys(name for figures in attempts for name in figures)
    found = {name: [figures[name] for figures in attempts if name in figures] for name in names}
    return {
        name: float((np.sum if name.endswith("/failed") else np.mean)(values))
        for name, values in found.items()
    }


def _outcome(collected: Collected, stages: Stages) -> dict[str, float]:
    ended = finished(collected.samples, stages.decoding.stop_tokens)
    return {
        "reward/mean": float(collected.rewards.mean()),
        "reward/std": float(collected.rewards.std()),
        "response/length_mean": float(
            np.mean([len(sample.tokens) for sample in collected.samples])
        ),
        "response/unfinished": float(1 - ended.mean()),
    }
