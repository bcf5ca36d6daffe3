"""The samples of a step and what they earn; and the same over held-out prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.experience import bound
from rlhf_jax.generation.engine import Decoding, Request, RoundReport, Sample, generate, warm_up
from rlhf_jax.generation.rollout import History, Tally, requests
from rlhf_jax.inference.rewards import Answer, Scorer
from rlhf_jax.model.transformer import cast, unstack
from rlhf_jax.stages import Memory, Observer, Stages
from rlhf_jax.training.batching import signal
from rlhf_jax.types import Model


@dataclasses.dataclass(frozen=True)
class Collected:
    """Finished samples in the order of their ids, as answers, and what they earned."""

    samples: list[Sample]
    answers: list[Answer]
    rewards: np.ndarray  # [B] float32

    def table(self) -> list[dict[str, Any]]:
        """One row a sample, for people to read; the reward is None where scoring failed."""
        rewards = [float(reward) if np.isfinite(reward) else None for reward in self.rewards]
        rows = zip(self.answers, rewards, strict=True)
        return [{"prompt": a.prompt, "response": a.response, "reward": reward} for a, reward in rows]

    def rows(self, chosen: np.ndarray) -> Collected:
        """The samples of these indices."""
        return Collected([self.samples[i] for i in chosen], [self.answers[i] for i in chosen], self.rewards[chosen])


def collect(
    policy: Model, drafter: Model | None, prompts: Prompts, memory: Memory, step: int, stages: Stages, observe: Observer
) -> tuple[Collected, Tally, dict[str, float]]:
    """Samples of `prompts_per_step` prompts and their rewards, counts of the generation, and the metrics of both.

    With `resample`, prompts whose samples all earned the same are set aside and others drawn, up to that many more
    roll-outs; those set aside fill what is still missing (dynamic sampling: DAPO, Yu et al. 2025, 3.2).
    """
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    tally, found, seconds = Tally(), [], {"generation": 0.0, "inference": 0.0}
    seen, kept = np.zeros(0, np.float32), np.zeros(0, int)  # rewards as the advantages will see them, samples to keep
    for attempt in range(stages.resample + 1):
        first_id = (step * (stages.resample + 1) + attempt) * stages.prompts_per_step * stages.samples_per_prompt
        with _timed("generation", seconds, observe):
            chosen = memory.batches.next()
            asked = [prompts.tokens[index] for index in chosen]
            wanted = requests(asked, stages.samples_per_prompt, stages.max_new_tokens, first_id, memory.history)
            samples = roll_out(target, drafter, wanted, stages.decoding, stages.mesh, _counting(tally, observe))
        with _timed("inference", seconds, observe):
            found.append(earn(samples, prompts, np.repeat(chosen, stages.samples_per_prompt), stages))
        ended = finished(samples, stages.decoding.stop_tokens)
        seen = np.append(seen, bound(found[-1][0].rewards, ended, stages.shaping))
        kept, enough = choose_groups(seen, stages.samples_per_prompt, stages.prompts_per_step)
        if enough:
            break
    everything = _joined([collected for collected, _ in found])
    metrics = tally.metrics(seconds["generation"]) | _together([figures for _, figures in found])
    metrics |= {"inference/seconds": seconds["inference"], "generation/attempts": len(found)}
    metrics["generation/groups_without_signal"] = float(1 - signal(seen, stages.samples_per_prompt).mean())
    return everything.rows(kept), tally, metrics | _outcome(everything, stages)


def choose_groups(rewards: np.ndarray, group: int, wanted: int) -> tuple[np.ndarray, bool]:
    """Sample indices [wanted * group] of the first `wanted` groups whose rewards differ, and whether there are so many.

    Where there are not, the first of the others fill up; groups stay in order.
    """
    teaches = signal(rewards, group)
    chosen = np.sort(np.argsort(~teaches, kind="stable")[:wanted])
    return (chosen[:, None] * group + np.arange(group)).reshape(-1), int(teaches.sum()) >= wanted


def earn(
    samples: list[Sample], prompts: Prompts, rows: np.ndarray, stages: Stages
) -> tuple[Collected, dict[str, float]]:
    """The samples of prompts `rows` [B], as answers with their rewards, and what the reward reports.

    A sample whose scoring failed earns `stages.failed`.
    """
    answers = answered(samples, prompts, rows, stages.tokenizer)
    scores, figures = stages.reward(answers)
    rewards = np.where(np.isnan(scores.values), np.float32(stages.failed), scores.values)
    return Collected(samples, answers, rewards), figures


def answered(samples: list[Sample], prompts: Prompts, rows: np.ndarray, tokenizer: Tokenizer) -> list[Answer]:
    """What the reward reads: each sample's text beside its prompt, row and messages."""
    return [
        Answer(prompts.texts[row], prompts.messages[row], prompts.rows[row], tokenizer.decode(sample.tokens))
        for sample, row in zip(samples, rows, strict=True)
    ]


def evaluate(
    policy: Model,
    drafter: Model | None,
    prompts: Prompts,
    measures: Mapping[str, Scorer],
    decoding: Decoding,
    samples_per_prompt: int,
    stages: Stages,
    observe: Observer = lambda phase, report: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means of the measures over held-out prompts, and the table of samples with the first measure.

    The noise is the same every time and not training's (another seed), so two evaluations are paired. Samples that a
    measure failed on are left out of its mean, and counted.
    """
    observe("evaluation", None)
    wanted = requests(prompts.tokens, samples_per_prompt, stages.max_new_tokens, 0, History(0))
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    samples = roll_out(target, drafter, wanted, decoding, stages.mesh, functools.partial(observe, "evaluation"))
    answers = answered(samples, prompts, np.repeat(np.arange(len(prompts)), samples_per_prompt), stages.tokenizer)
    scores = {name: measure(answers).values for name, measure in measures.items()}
    means = {f"eval/{name}": float(np.nanmean(values)) for name, values in scores.items() if np.isfinite(values).any()}
    failed = {f"eval/{name}/failed": int(np.isnan(values).sum()) for name, values in scores.items()}
    means |= {name: count for name, count in failed.items() if count}
    return means, Collected(samples, answers, next(iter(scores.values()))).table()


def roll_out(
    target: Model,
    drafter: Model | None,
    wanted: Sequence[Request],
    decoding: Decoding,
    mesh: jax.sharding.Mesh,
    observe: Callable[[RoundReport], None] = lambda report: None,
) -> list[Sample]:
    """All samples of the requests, by sample id."""
    samples = generate(target, drafter, wanted, decoding, mesh, observe)
    return sorted(samples, key=lambda sample: sample.sample_id)


def decoding_weights(policy: Model, dtype, mesh: jax.sharding.Mesh) -> Model:
    """The policy as generation wants it: layers unrolled, in `dtype`, split over the tensor axis only.

    On a CPU a tied head is copied as [M, V], which is read faster than the embedding the other way round.
    """
    return _decoding_weights(policy, dtype, mesh, jax.default_backend() == "cpu")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decoding_weights(policy: Model, dtype, mesh: jax.sharding.Mesh, untie: bool) -> Model:
    model = unstack(cast(policy, dtype))
    if untie and model.head is None:
        model = dataclasses.replace(model, head=model.embed.T)
    return jax.lax.with_sharding_constraint(model, meshes.model_shardings(model, mesh, "generation"))


def compile_rounds(policy: Model, drafter: Model | None, stages: Stages) -> None:
    """Compile the rounds of a step ahead of use, for every number of rows they may shrink to."""
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    samples = stages.prompts_per_step * stages.samples_per_prompt
    warm_up(target, drafter, samples, stages.decoding, stages.mesh)


def finished(samples: Sequence[Sample], stop_tokens: tuple[int, ...]) -> np.ndarray:
    """[B] bool: the response ends with a stop token, and was not cut off."""
    return np.array([sample.tokens[-1] in stop_tokens for sample in samples])


@contextlib.contextmanager
def _timed(phase: str, seconds: dict[str, float], observe: Observer) -> Iterator[None]:
    observe(phase, None)
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def _counting(tally: Tally, observe: Observer) -> Callable[[RoundReport], None]:
    def arrived(report: RoundReport) -> None:
        tally.add(report)
        observe("generation", report)

    return arrived


def _joined(parts: Sequence[Collected]) -> Collected:
    samples = [sample for part in parts for sample in part.samples]
    answers = [answer for part in parts for answer in part.answers]
    return Collected(samples, answers, np.concatenate([part.rewards for part in parts]))


def _together(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of several attempts: failures add up, the rest are means."""
    names = dict.fromkeys(name for figures in attempts for name in figures)
    found = {name: [figures[name] for figures in attempts if name in figures] for name in names}
    return {name: float((np.sum if name.endswith("/failed") else np.mean)(values)) for name, values in found.items()}


def _outcome(collected: Collected, stages: Stages) -> dict[str, float]:
    ended = finished(collected.samples, stages.decoding.stop_tokens)
    return {
        "reward/mean": float(collected.rewards.mean()),
        "reward/std": float(collected.rewards.std()),
        "response/length_mean": float(np.mean([len(sample.tokens) for sample in collected.samples])),
        "response/unfinished": float(1 - ended.mean()),
    }
