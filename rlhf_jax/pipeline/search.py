"""Search for a short schedule: list scheduling, reversed in time and perturbed.

In the first passes the tasks with the longest path to the end are the most urgent. Then a schedule
is reversed in time and scheduled again, with the urgency of its own order and some noise, forward
and backward (Li and Willis, 1992). A slightly longer schedule may be the next one to be reversed.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from rlhf_jax.pipeline.list_scheduling import Rule, list_schedule
from rlhf_jax.pipeline.problem import RELATIVE_ERROR, PipelineProblem
from rlhf_jax.pipeline.queues import (
    Queue,
    Times,
    bound,
    queues_of,
    tails_of,
    turn_problem,
    turn_times,
)
from rlhf_jax.pipeline.schedule import (
    Schedule,
    earliest_starts,
    make_schedule,
    one_f_one_b,
    starts_of,
)

PATIENCE_TRIED = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the rules of a search
NEW_RULE = 0.3  # chance that a try uses another rule
NEW_BLEND = 0.3  # chance that it blends the order of the schedule with the path to the end
SHAKEN = 4  # most queues whose urgency a try changes
SHAKEN_IN_PART = 0.5  # chance that it changes some micro-batches of a queue, and not all
NOISE = 8.0  # deviation of the largest change of urgency, over the longest task
WORSE = 0.04  # most by which a schedule may be longer than the previous one, over the bound


class _Found(NamedTuple):
    """Hold a schedule of one of the sides."""

    makespan: float
    side: int  # 0: the original problem, 1: reversed in time
    rule: Rule
    starts: Times


class _Search(NamedTuple):
    """Hold the constants of a search."""

    # the queues of the problem, original and reversed in time, and of each the tasks' tails
    sides: tuple[tuple[list[Queue], Times], ...]
    limit: float | None
    rules: list[Rule]
    longest: float  # task
    bound: float
    within: float  # share of the bound above which the search goes on

    def schedule(self, side: int, urgency: Times, rule: Rule) -> _Found:
        """Schedule one side of the problem."""
        queues, _ = self.sides[side]
        starts = list_schedule(queues, urgency, rule, self.limit)
        makespan = max(own[-1] + queue.seconds for queue, own in zip(queues, starts, strict=True))
        return _Found(makespan, side, rule, starts)

    def is_short_enough(self, schedule: _Found) -> bool:
        """Return whether a schedule is near enough to the bound to end the search."""
        return schedule.makespan <= self.bound * (1 + self.within)

    def starts(self, schedule: _Found) -> Times:
        """Return starts in the original problem, each as early as the order of tasks allows."""
        queues, _ = self.sides[0]
        order = schedule.starts
        if schedule.side:
            order = [[-time for time in own] for own in turn_times(queues, schedule.starts)]
        return earliest_starts(queues, order)


def solve(
    problem: PipelineProblem, tries: int = 1000, seed: int = 0, within: float = RELATIVE_ERROR
) -> Schedule:
    """Return the shortest schedule found, the same for the same tries, seed and `within`.

    It is never longer than 1F1B of one pipe after the other if that fits the limit. tries: most
    passes after the first ones. within: share of the bound above which a search goes on.
    """
    search = _begin_search(problem, within)
    draws = random.Random(seed)  # noqa: S311
    current = _first_passes(problem, search)
    best = current
    for _ in range(tries):
        if search.is_short_enough(best):
            break
        candidate = _turn_and_shake(search, current, draws)
        best = min(best, candidate, key=lambda one: one.makespan)
        worse = WORSE * search.bound * draws.random() ** 4
        if candidate.makespan <= current.makespan + worse:
            current = candidate
    return make_schedule(problem, search.starts(best))


def _begin_search(problem: PipelineProblem, within: float) -> _Search:
    """Return a search of a problem, which favours each pipe in turn if there is a limit."""
    both = [queues_of(one) for one in (problem, turn_problem(problem))]
    favoured = range(1 if problem.limit is None else len(problem.pipes))
    return _Search(
        sides=tuple((queues, tails_of(queues)) for queues in both),
        limit=problem.limit,
        rules=[Rule(patience, pipe) for pipe in favoured for patience in PATIENCE_TRIED],
        longest=max(queue.seconds for queue in both[0]),
        bound=bound(problem),
        within=within,
    )


def _first_passes(problem: PipelineProblem, search: _Search) -> _Found:
    """Return the shortest schedule of both sides and all rules, the first that is short enough.

    It is at most as long as 1F1B of one pipe after the other if that fits the limit.
    """
    schedules = []
    serial = one_f_one_b(problem)
    if search.limit is None or serial.peak.max() <= search.limit * (1 + RELATIVE_ERROR):
        schedules.append(_Found(serial.makespan, 0, search.rules[0], starts_of(problem, serial)))
    for side, (_, tails) in enumerate(search.sides):
        for rule in search.rules:
            schedules.append(search.schedule(side, tails, rule))
            if search.is_short_enough(schedules[-1]):
                return schedules[-1]
    return min(schedules, key=lambda one: one.makespan)


def _turn_and_shake(search: _Search, current: _Found, draws: random.Random) -> _Found:
    """Return a schedule of the other side, with nearly the same order of tasks."""
    side = 1 - current.side
    queues, tails = search.sides[side]
    urgency = turn_times(queues, current.starts)
    if draws.random() < NEW_BLEND:
        share = draws.random()
        urgency = [
            [time + share * (tail - time) for time, tail in zip(own, other, strict=True)]
            for own, other in zip(urgency, tails, strict=True)
        ]
    _shake(urgency, NOISE * search.longest * draws.random() ** 3, draws)
    rule = draws.choice(search.rules) if draws.random() < NEW_RULE else current.rule
    return search.schedule(side, urgency, rule)


def _shake(urgency: Times, deviation: float, draws: random.Random) -> None:
    """Change the urgency of a few queues, each of all its micro-batches or of some in a row."""
    count = draws.randint(1, min(SHAKEN, len(urgency)))
    for own in draws.sample(urgency, count):
        change = draws.gauss(0.0, deviation)
        first = 0
        end = len(own)
        if draws.random() < SHAKEN_IN_PART:
            first = draws.randrange(end)
            end = draws.randint(first + 1, end)
        own[first:end] = [time + change for time in own[first:end]]
