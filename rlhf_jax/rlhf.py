"""One iteration of RLHF, composed of the stages: generation, inference, training."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.collect import RewardedRollout, collect, finished
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.requests import as_rollout
from rlhf_jax.inference.logprobs import mismatch, score_rollout
from rlhf_jax.inference.overlap import SCORED, Scored, ScoringModels, scored_row
from rlhf_jax.inference.values import score_values
from rlhf_jax.model.transformer import cast
from rlhf_jax.monitoring.trace import Span
from rlhf_jax.runtime import distributed
from rlhf_jax.state import FrozenModels, HostState, Observer, Stages, drafter_of
from rlhf_jax.training.distill import distill
from rlhf_jax.training.experience import compute_advantages
from rlhf_jax.training.update import NonFiniteUpdate, update
from rlhf_jax.types import Array, Experience, Model, Rollout, TrainState


class NonFiniteStep(ValueError):
    """A step that met a number that is not finite, with the batch it was to learn from."""

    def __init__(self, message: str, experience: Experience):
        super().__init__(message)
        self.experience = experience


def step(
    state: TrainState,
    frozen: FrozenModels,
    prompts: Prompts,
    memory: HostState,
    stages: Stages,
    observe: Observer = lambda phase, report: None,
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One iteration over the next prompts: the new state, its metrics and a table of its samples.

    `state` is used up once training begins; what is raised before that loses nothing but the
    position in `memory.batches`. `observe` may raise, but not in training. Sample ids count on from
    step to step, so that a run uses no noise twice unless it is asked to repeat some.
    """
    number = int(state.step)
    drafter = drafter_of(state, frozen)
    judges = ScoringModels(frozen.reference, state.critic)
    collected, learned, metrics = collect(
        state.policy, drafter, prompts, memory, number, stages, observe, judges
    )

    observe("inference", None)
    start = time.perf_counter()
    experience, kl, seen = score(state, frozen.reference, collected, memory.kl_coefficient, stages)
    metrics |= seen
    metrics["inference/seconds"] += time.perf_counter() - start
    memory.timeline.spans += _inferred(experience, memory.timeline.start, start, stages)

    observe("training", None)
    start = time.perf_counter()
    weight = 0.0 if stages.shaping.kl_in_reward else memory.kl_coefficient
    place = functools.partial(meshes.place_rows, mesh=stages.mesh)
    watch = functools.partial(observe, "training", None)
    try:
        state, trained = update(
            state, experience, stages.optimizers, stages.training, weight, place, watch
        )
    except NonFiniteUpdate as error:
        raise NonFiniteStep(str(error), experience) from error
    metrics |= trained | {"training/seconds": time.perf_counter() - start}
    state, taught = distill_drafter(state, frozen, experience.rollout, memory, stages, observe)
    metrics |= taught | (age(state, memory) if drafter is not None else {})

    samples = len(collected.samples)
    memory.remember(
        collected.samples, learned, stages.controller(memory.kl_coefficient, kl, samples)
    )
    return (
        state,
        metrics | {"generation/tokens_so_far": memory.drafting.tally.tokens},
        collected.table(),
    )


def distill_step(
    state: TrainState,
    frozen: FrozenModels,
    prompts: Prompts,
    memory: HostState,
    stages: Stages,
    observe: Observer = lambda phase, report: None,
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """As `step`, but the policy stays and its student learns from all samples.

    What is earned is the share of the policy's tokens that the student draws too, before it learns
    from them; KL and loss are the policy's divergence from the student, in nats a token.
    """
    drafter = drafter_of(state, frozen)
    number = int(state.step)
    nobody = ScoringModels()
    collected, learned, metrics = collect(
        state.policy, drafter, prompts, memory, number, stages, observe, nobody
    )
    observe("training", None)
    rollout = as_rollout(collected.samples, stages.decoding.max_length)
    state, taught = distill_drafter(state, frozen, rollout, memory, stages, observe)
    if "drafter/not_finite" in taught:
        raise ValueError("The student's loss is not finite; lower drafter.learning_rate")
    state = dataclasses.replace(state, step=state.step + 1)
    memory.remember(collected.samples, learned, memory.kl_coefficient)
    metrics = {
        name: value for name, value in metrics.items() if not name.startswith("reward/")
    } | taught
    metrics |= {
        "reward/mean": taught["drafter/acceptance"],
        "training/seconds": taught["drafter/seconds"],
    }
    metrics |= dict.fromkeys(("kl/mean", "loss/policy"), taught["drafter/loss"])
    table = [
        {name: value for name, value in row.items() if name != "reward"}
        for row in collected.table()
    ]
    return state, metrics | {"generation/tokens_so_far": memory.drafting.tally.tokens}, table


def distill_drafter(
    state: TrainState,
    frozen: FrozenModels,
    rollout: Rollout,
    memory: HostState,
    stages: Stages,
    observe: Observer,
) -> tuple[TrainState, dict[str, float]]:
    """The state with its student taught by the policy as it is now, where it is kept current, and
    what was measured.
    """
    if stages.distillation is None:
        return state, {}
    start = time.perf_counter()
    place = functools.partial(meshes.place_rows, mesh=stages.mesh)
    watch = functools.partial(observe, "training", None)
    state, metrics = distill(state, rollout, stages.distillation, place, watch, frozen.student)
    memory.taught = int(state.step)
    return state, metrics | {"drafter/seconds": time.perf_counter() - start}


def age(state: TrainState, memory: HostState) -> dict[str, float]:
    """How old the drafter is: `drafter/version` counts a student's updates, `drafter/policy_step`
    the policy's when the drafter last learned from it, and `drafter/behind` those since.
    """
    version = 0 if state.drafter_version is None else int(state.drafter_version)
    behind = int(state.step) - memory.taught
    return {
        "drafter/version": version,
        "drafter/policy_step": memory.taught,
        "drafter/behind": behind,
    }


def score(
    state: TrainState,
    reference: Model | None,
    collected: RewardedRollout,
    kl_coefficient: float,
    stages: Stages,
) -> tuple[Experience, float, dict[str, float]]:
    """What training needs of samples, the KL of a response to the reference in nats, and metrics.

    Log-probs are recomputed in canonical order and fixed shapes; without a reference the policy is
    its own. Under top-k the reference, too, is renormalised on the sampled sets. The metrics say
    how far the recomputed law is from the one that was sampled (`mismatch/...`).
    """
    rollout = as_rollout(collected.samples, stages.decoding.max_length)
    models = (
        _cast(state.policy, stages.dtype),
        reference,
        state.critic and _cast(state.critic, stages.dtype),
    )
    if stages.scoring:
        found = _score_the_rest(models, rollout, collected.scored, stages)
    else:
        found = distributed.fetch(_score(models, rollout, stages))
    logprobs, reference_logprobs, values = found
    reference_logprobs = logprobs if reference_logprobs is None else reference_logprobs
    ended = finished(collected.samples, stages.decoding.stop_tokens)
    mask, advantages, returns, kl = jax.device_get(
        compute_advantages(
            collected.rewards,
            ended,
            rollout.mask,
            logprobs,
            reference_logprobs,
            values,
            np.float32(kl_coefficient),
            stages.shaping,
        )
    )
    experience = Experience(
        rollout, mask, logprobs, reference_logprobs, collected.rewards, advantages, values, returns
    )
    _check_finite(experience)
    seen = {"kl/response": float(kl), "kl/coefficient": kl_coefficient}
    return experience, float(kl), seen | mismatch(rollout.logprobs, logprobs, rollout.mask)


def _inferred(experience: Experience, zero: float, began: float, stages: Stages) -> list[Span]:
    """Inference on all slices at once, as the timeline has it."""
    rows = len(experience.mask)
    tokens = int(experience.rollout.mask.sum())
    count = stages.mesh.shape["slices"]
    of_slice = (
        began - zero,
        time.perf_counter() - zero,
        rows // count,
        "log-probs and values",
        tokens // count,
    )
    return [Span(number, "inference", *of_slice) for number in range(count)]


Models = tuple[Model, Model | None, Model | None]  # policy, reference, critic


def _score(
    models: Models, rollout: Rollout, stages: Stages
) -> tuple[Array, Array | None, Array | None]:
    """(log-probs, the reference's, values) of a rollout [B, T], dispatched."""
    (policy, reference, critic) = models
    training = stages.training
    placed = meshes.place_rows(rollout, stages.mesh)
    rows = training.microbatch_rows
    how = dict(
        temperature=training.temperature, rows=rows, attend=training.attend, law=training.law
    )
    score = functools.partial(score_rollout, rollout=placed, **how)
    values = critic and score_values(critic, placed, rows=rows, attend=training.critic_attend)
    return score(policy), reference and score(reference), values


def _score_the_rest(
    models: Models, rollout: Rollout, scored: dict[int, Scored], stages: Stages
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """As `_score`, on the host: what slices have scored, and the rest in parts of a fixed size."""
    numbers = rollout.sample_id.tolist()
    rows = stages.training.microbatch_rows
    rest = [row for row, number in enumerate(numbers) if number not in scored]
    found = {row: scored[number] for row, number in enumerate(numbers) if number in scored}
    for start in range(0, len(rest), rows):
        part = np.resize(rest[start : start + rows], rows)  # filled up by some of them again
        results = distributed.fetch(
            _score(models, jax.tree.map(lambda leaf, part=part: leaf[part], rollout), stages)
        )
        found |= {row: scored_row(results, i) for i, row in enumerate(part)}
    rows_of = ([getattr(found[row], name) for row in range(len(numbers))] for name in SCORED)
    logprobs, referred, values = (
        None if column[0] is None else np.stack(column) for column in rows_of
    )
    assert logprobs is not None
    return logprobs, referred, values


def _check_finite(experience: Experience) -> None:
    mask = experience.rollout.mask
    for name in ("logprobs", "reference_logprobs", "values", "advantages"):
        numbers = getattr(experience, name)
        if numbers is not None and not np.isfinite(numbers[mask]).all():
            count = int((~np.isfinite(numbers[mask])).sum())
            raise NonFiniteStep(
                f"{count} of {int(mask.sum())} {name.replace('_', ' ')} are not finite", experience
            )


_cast = jax.jit(cast, static_argnums=1)
