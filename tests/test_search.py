"""The search for placements: as good as trying all, proved, and never worse than what is known."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from rlhf_jax.placement.plan import Placement
from rlhf_jax.placement.search.branch_and_bound import (
    STAGES,
    Option,
    Placed,
    Problem,
    fits,
    search,
    stage_seconds,
    step_seconds,
)

CALLS = [call for stage in STAGES for call in stage]


def options_of(draw: random.Random, blocks: int, shapes: int = 1) -> list[Option]:
    """Options on every aligned part: more blocks are faster, but not so many times as they are."""
    found = []
    work = draw.uniform(1.0, 10.0)
    scaling = draw.uniform(0.6, 1.0)
    weights = draw.uniform(1.0, 4.0)
    count = 1
    while count <= blocks:
        for shape in range(shapes):
            seconds = work / count**scaling * (1 + 0.2 * shape * draw.random())
            held = weights / count * (1.0 - 0.3 * shape)
            for first in range(0, blocks, count):
                placement = Placement(first, count, fsdp=count, tensor=1 + shape)
                found.append(Option(placement, first, count, seconds, held, held / 2))
        count *= 2
    return found


def random_problem(seed: int, blocks: int, calls: int, shapes: int = 1) -> Problem:
    draw = random.Random(seed)
    chosen = draw.sample(CALLS, calls)
    options = {call: options_of(draw, blocks, shapes) for call in chosen}
    slow = draw.uniform(0.0, 0.5)

    def transfer(call: str, option: Option, others: Placed) -> float:
        source = others.get("policy_training")
        if source is None or not call.startswith("policy") or call == "policy_training":
            return 0.0
        return slow * (source.placement != option.placement)

    return Problem(options, blocks, memory=draw.uniform(3.0, 12.0), transfer=transfer)


def by_trying_all(problem: Problem) -> float:
    """The seconds of the best choice; infinity where none fits."""
    best = math.inf
    for options in itertools.product(*problem.options.values()):
        choice = dict(zip(problem.options, options, strict=True))
        if fits(problem, choice):
            best = min(best, step_seconds(problem, choice))
    return best


@pytest.mark.parametrize("seed", range(24))
def test_the_search_finds_what_trying_all_finds(seed):
    problem = random_problem(seed, blocks=4, calls=2 + seed % 3, shapes=1 + seed % 2)
    wanted = by_trying_all(problem)
    found = search(problem)
    if found is None:
        assert wanted == math.inf
        return
    assert found.seconds == pytest.approx(wanted) and found.gap == 0.0
    assert fits(problem, found.placed)
    assert step_seconds(problem, found.placed) == pytest.approx(found.seconds)


def test_calls_of_a_stage_run_side_by_side_where_their_blocks_are_apart():
    stage = ("policy_inference", "reference_inference", "critic_inference")
    apart = {
        call: Option(Placement(first, 1), first, 1, seconds)
        for call, first, seconds in zip(stage, (0, 1, 0), (3.0, 4.0, 2.0), strict=True)
    }
    problem = Problem({call: [option] for call, option in apart.items()}, blocks=2, memory=1.0)
    assert stage_seconds(problem, stage, apart) == 5.0


def test_what_is_known_is_never_worse_and_the_gap_is_told_when_time_runs_out():
    problem = random_problem(3, blocks=16, calls=7, shapes=2)
    whole = {
        call: next(one for one in options if one.blocks == 16)
        for call, options in problem.options.items()
    }
    known = [whole] if fits(problem, whole) else []
    found = search(problem, known, limit=0.0)
    if known:
        assert found and found.seconds == step_seconds(problem, whole)
        assert 0.0 < found.gap < 1.0
    better = search(problem, known, limit=20.0)
    assert better and (not known or better.seconds <= step_seconds(problem, whole))


def test_a_choice_that_no_memory_holds_is_not_found():
    option = Option(Placement(0, 1), 0, 1, seconds=1.0, always=2.0)
    assert search(Problem({"generation": [option]}, blocks=1, memory=1.0)) is None


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_blocks_and_seven_calls_are_searched_within_a_minute(seed):
    problem = random_problem(seed, blocks=16, calls=7, shapes=2)
    began = time.process_time()
    found = search(problem, limit=60.0)
    assert found is None or found.gap == 0.0
    assert time.process_time() - began < 60.0
