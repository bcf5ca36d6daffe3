"""Place the samples of a simulated stage on its slices: by rules, or as a run does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_jax.generation.reallocation import forecasts, length_model
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts, PromptLengths
from rlhf_jax.generation.reallocation.planner import ClusterView, Reallocation, plan_reallocation
from rlhf_jax.planner.simulated_stage import FINISHED, WAITS, Policy, SimulatedStage

Predict = Callable[[SimulatedStage, np.ndarray], np.ndarray]  # tokens left [m, Q] of samples [m]


def from_lists(lists: list[np.ndarray]) -> Policy:
    """Return a policy by which each slice takes its own samples, in order, as rows become free."""
    taken = [0] * len(lists)

    def policy(stage: SimulatedStage) -> Reallocation:
        admissions = []
        for there, room in enumerate((stage.machine.rows - stage.live).tolist()):
            some = lists[there][taken[there] : taken[there] + room]
            taken[there] += len(some)
            admissions += [(sample, there) for sample in some.tolist()]
        return Reallocation(admissions, [], np.zeros(stage.slices, bool))

    return policy


def static(slices: int, count: int) -> Policy:
    """Return a policy that gives each slice the same number of samples, whatever their lengths."""
    return from_lists(np.array_split(np.arange(count), slices))


def even(stage: SimulatedStage) -> Reallocation:
    """Decide by counts alone, which never differ by more than one.

    Samples wait in one queue; after each end rows move from the fullest slice to the emptiest.
    """
    waiting = np.flatnonzero(stage.place == WAITS).tolist()
    live = stage.live
    place = stage.place.copy()
    admissions = []
    moves = []
    while waiting and live.min() < stage.machine.rows:
        there = int(live.argmin())
        admissions.append((waiting.pop(0), there))
        live[there] += 1
    while live.max() - live.min() > 1:
        here = int(live.argmax())
        there = int(live.argmin())
        sample = int(np.flatnonzero(place == here)[-1])
        place[sample] = there
        moves.append((sample, there))
        live[[here, there]] += [-1, 1]
    return Reallocation(admissions, moves, np.zeros(stage.slices, bool))


def ours(predict: Predict, scoring: float = 0.0) -> Policy:
    """Return the policy of a run, `reallocation.planner`, with predicted lengths.

    scoring: inference seconds per token, 0 if the stages are not fused.
    """

    def policy(stage: SimulatedStage) -> Reallocation:
        rows = np.flatnonzero(stage.place != FINISHED)
        plan = plan_reallocation(_view(stage, rows, predict(stage, rows), scoring))
        admissions, moves = (
            [(int(rows[row]), there) for row, there in some]
            for some in (plan.admissions, plan.moves)
        )
        return Reallocation(admissions, moves, plan.freed)

    return policy


def _view(stage: SimulatedStage, rows: np.ndarray, left: np.ndarray, scoring: float) -> ClusterView:
    """Return the planner's view of samples [m] with left [m, Q] tokens to come.

    Speeds are of the tokens to come.
    """
    machine = stage.machine
    mean = left @ length_model.SHARES
    context = stage.prompt + stage.done[rows]
    typical = float(((context + mean / 2) * mean).sum() / mean.sum())
    return ClusterView(
        place=stage.place[rows],
        left=left,
        context=context,
        rows=machine.rows,
        slices=stage.slices,
        speed=machine.rate(
            np.maximum(np.arange(machine.rows + 1), 1), np.full(machine.rows + 1, typical)
        ),
        move_seconds=machine.latency,
        token_seconds=machine.token_bytes / machine.bandwidth,
        freed=stage.freed,
        unscored=stage.unscored,
        scoring=scoring,
    )


def known_lengths(stage: SimulatedStage, rows: np.ndarray) -> np.ndarray:
    """Return the tokens [m, Q] that samples [m] will write, as an oracle."""
    left = stage.total[rows] - stage.done[rows]
    return np.repeat(left[:, None], len(length_model.SHARES), axis=1)


def by_siblings(
    known: LengthForecasts, total: np.ndarray, per_prompt: int, limit: float
) -> Predict:
    """Return forecasts by a prompt's ended samples, neighbours in `total`.

    limit: most tokens of a response.
    """
    curves = np.tile(length_model.survival(known.lengths), (len(total), 1))
    believed = known.belief(forecasts.BY_SIBLINGS) is not None
    starts = np.arange(0, len(total), per_prompt)
    ended_before = np.zeros(len(starts), int)

    def predict(stage: SimulatedStage, rows: np.ndarray) -> np.ndarray:
        over = stage.place == FINISHED
        ended = np.add.reduceat(over, starts)
        for start in starts[ended > ended_before].tolist() if believed else ():
            own = slice(start, start + per_prompt)
            lengths = total[own][over[own]]
            references = forecasts.sibling_references([lengths], [len(over[own])], [limit])
            curves[own] = forecasts.survival(known, references)
        ended_before[:] = ended
        return length_model.remaining(curves, rows, stage.done[rows], limit)

    return predict


def prompts_of(total: np.ndarray, per_prompt: int, limit: float) -> list[PromptLengths]:
    """Return what a stage with responses of these lengths [n] shows of siblings."""
    groups = np.array_split(total, range(per_prompt, len(total), per_prompt))
    return [PromptLengths(np.zeros(0), own, own < limit, limit) for own in groups]
