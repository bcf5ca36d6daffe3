"""One iteration of RLHF, composed of the stages: generation, inference, training."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from rlhf_jax import mesh as meshes
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.generation.engine import Decoding, Request, RoundReport, Sample, generate, warm_up
from rlhf_jax.generation.rollout import History, Tally, as_rollout, requests
from rlhf_jax.inference import rewards as scoring
from rlhf_jax.inference.logprobs import mismatch, score_rollout
from rlhf_jax.model.transformer import cast, unstack
from rlhf_jax.training.advantages import group_advantages
from rlhf_jax.training.update import UpdateConfig, update
from rlhf_jax.types import Experience, Model, Rollout, TrainState

Observer = Callable[[str, RoundReport | None], None]  # of (phase, the round that arrived in it)


@dataclasses.dataclass(frozen=True)
class Stages:
    """Everything that stays the same from step to step."""

    decoding: Decoding
    training: UpdateConfig
    optimizer: optax.GradientTransformation
    reward: scoring.Reward
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    dtype: Any  # of generation, inference and the products of training
    samples_per_prompt: int
    max_new_tokens: int


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


def compile_rounds(policy: Model, drafter: Model | None, prompts: int, stages: Stages) -> None:
    """Compile the rounds of a step of `prompts` prompts ahead of use, for every number of rows it may shrink to."""
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    warm_up(target, drafter, prompts * stages.samples_per_prompt, stages.decoding, stages.mesh)


def roll_out(
    target: Model,
    drafter: Model | None,
    wanted: Sequence[Request],
    decoding: Decoding,
    mesh: jax.sharding.Mesh,
    observe: Callable[[RoundReport], None] = lambda report: None,
) -> tuple[list[Sample], dict[str, float]]:
    """All samples of the requests, by sample id, and the generation stage's metrics."""
    tally, start = Tally(), time.perf_counter()

    def arrived(report: RoundReport) -> None:
        tally.add(report)
        observe(report)

    samples = list(generate(target, drafter, wanted, decoding, mesh, arrived))
    samples.sort(key=lambda sample: sample.sample_id)
    return samples, tally.metrics(time.perf_counter() - start)


def infer(
    policy: Model, reference: Model | None, rollout: Rollout, rewards: np.ndarray, stages: Stages
) -> tuple[Experience, dict[str, float]]:
    """What training needs of a rollout: log-probs recomputed in canonical order and fixed shapes, and advantages.

    rewards [B] float32. Without a reference the policy is its own. The metrics say how far the recomputed law is
    from the one that was sampled (`mismatch/...`).
    """
    placed = meshes.place_rows(rollout, stages.mesh)
    score = functools.partial(
        score_rollout,
        rollout=placed,
        temperature=stages.training.temperature,
        rows=stages.training.micro_rows,
        attend=stages.training.attend,
    )
    logprobs = score(_cast(policy, stages.dtype))
    reference_logprobs = logprobs if reference is None else score(reference)
    logprobs, reference_logprobs = jax.device_get((logprobs, reference_logprobs))
    advantages = np.asarray(group_advantages(rewards, stages.samples_per_prompt))
    experience = Experience(
        rollout=rollout,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        rewards=rewards,
        advantages=np.where(rollout.mask, advantages[:, None], np.float32(0)),
    )
    return experience, mismatch(rollout.logprobs, logprobs, rollout.mask)


_cast = jax.jit(cast, static_argnums=1)


def step(
    state: TrainState,
    reference: Model | None,
    drafter: Model | None,
    prompts: Prompts,
    chosen: np.ndarray,
    history: History,
    stages: Stages,
    observe: Observer = lambda phase, report: None,
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One iteration over the chosen prompts: the new state, its metrics and a table of its samples.

    `state` is used up. Sample ids count on from step to step, so that no noise is ever used twice.
    """
    observe("generation", None)
    wanted = _wanted(prompts, chosen, int(state.step), history, stages)
    target = decoding_weights(state.policy, stages.dtype, stages.mesh)
    watch = functools.partial(observe, "generation")
    samples, metrics = roll_out(target, drafter, wanted, stages.decoding, stages.mesh, watch)
    del target  # its memory is training's now
    history.add(samples)

    observe("inference", None)
    start = time.perf_counter()
    responses, rows = _responses(samples, stages), np.repeat(np.asarray(chosen), stages.samples_per_prompt)
    asked = [prompts.texts[row] for row in rows]
    rewards = scoring.score(stages.reward, asked, responses, [prompts.rows[row] for row in rows])
    rollout = as_rollout(samples, stages.decoding.slots)
    experience, seen = infer(state.policy, reference, rollout, rewards, stages)
    metrics |= (
        seen
        | _outcome(samples, rewards, stages.decoding.stop_tokens)
        | {"inference/seconds": time.perf_counter() - start}
    )

    observe("training", None)
    start = time.perf_counter()
    place = functools.partial(meshes.place_rows, mesh=stages.mesh)
    state, trained = update(state, experience, stages.optimizer, stages.training, place)
    metrics |= trained | {"training/seconds": time.perf_counter() - start}
    return state, metrics, _table(asked, responses, rewards)


def evaluate(
    policy: Model,
    drafter: Model | None,
    prompts: Prompts,
    measures: dict[str, scoring.Reward],
    decoding: Decoding,
    stages: Stages,
    samples_per_prompt: int,
    observe: Observer = lambda phase, report: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means of the measures over held-out prompts, and the table of samples.

    The noise is the same every time and not training's (another seed), so two evaluations are paired.
    """
    observe("evaluation", None)
    wanted = requests(prompts.tokens, samples_per_prompt, stages.max_new_tokens, 0, History(0))
    target = decoding_weights(policy, stages.dtype, stages.mesh)
    samples, _ = roll_out(target, drafter, wanted, decoding, stages.mesh, functools.partial(observe, "evaluation"))
    responses, rows = _responses(samples, stages), np.repeat(np.arange(len(prompts)), samples_per_prompt)
    asked, sources = [prompts.texts[row] for row in rows], [prompts.rows[row] for row in rows]
    scores = {name: scoring.score(measure, asked, responses, sources) for name, measure in measures.items()}
    means = {f"eval/{name}": float(values.mean()) for name, values in scores.items()}
    return means, _table(asked, responses, next(iter(scores.values())))


def _wanted(prompts: Prompts, chosen, step: int, history: History, stages: Stages) -> list[Request]:
    first_id = step * len(chosen) * stages.samples_per_prompt
    tokens = [prompts.tokens[index] for index in chosen]
    return requests(tokens, stages.samples_per_prompt, stages.max_new_tokens, first_id, history)


def _responses(samples: list[Sample], stages: Stages) -> list[str]:
    return [stages.tokenizer.decode(sample.tokens) for sample in samples]


def _outcome(samples: list[Sample], rewards: np.ndarray, stop_tokens: tuple[int, ...]) -> dict[str, float]:
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response/length_mean": float(np.mean([len(sample.tokens) for sample in samples])),
        "response/unfinished": float(np.mean([sample.tokens[-1] not in stop_tokens for sample in samples])),
    }


def _table(asked: list[str], responses: list[str], rewards: np.ndarray) -> list[dict[str, Any]]:
    rows = zip(asked, responses, rewards, strict=True)
    return [{"prompt": prompt, "response": response, "reward": float(reward)} for prompt, response, reward in rows]
