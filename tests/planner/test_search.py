"""The search for placements: as good as trying all, proved, and never worse than what is known."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from rlhf_jax.placement.plan import Placement
from rlhf_jax.planner.search.branch_and_bound import lower_bound, search
from rlhf_jax.planner.search.parts import part_sizes, part_starts
from rlhf_jax.planner.search.schedule import (
    STEADY,
    Option,
    Placed,
    Problem,
    most_bytes,
    simulate,
    stage_seconds,
    steady_seconds,
)

CALLS = (
    "generation",
    *(f"{role}_inference" for role in ("reward", "policy", "reference", "critic")),
    "policy_training",
    "critic_training",
)


def options_of(draw: random.Random, blocks: int, shapes: int = 1) -> list[Option]:
    """Options on every part: more blocks are faster, but not so many times as they are."""
    found = []
    work = draw.uniform(1.0, 10.0)
    scaling = draw.uniform(0.6, 1.0)
    weights = draw.uniform(1.0, 4.0)
    for count, starts in parts_of(blocks).items():
        for shape in range(shapes):
            seconds = work / count**scaling * (1 + 0.2 * shape * draw.random())
            held = weights / count * (1.0 - 0.3 * shape)
            for first in starts:
                placement = Placement(first, count, fsdp=count, tensor=1 + shape)
                found.append(
                    Option(placement, first, count, seconds, held, held / 2, kept=held / 4)
                )
    return found


def parts_of(blocks: int) -> dict[int, list[int]]:
    """The first blocks of all parts of 1, 2, 4 ... blocks, and of three quarters of these."""
    found = {}
    whole = 1
    while whole <= blocks:
        found[whole] = list(range(0, blocks, whole))
        if whole >= 4:
            quarter = whole // 4
            ends = [(first, first + quarter) for first in range(0, blocks, whole)]
            found[3 * quarter] = [first for pair in ends for first in pair]
        whole *= 2
    return found


def random_problem(seed: int, blocks: int, calls: int, shapes: int = 1, lag: int = 0) -> Problem:
    draw = random.Random(seed)
    chosen = draw.sample(CALLS, calls)
    if lag:  # what is drawn ahead is trained on
        chosen = list(dict.fromkeys(["generation", "policy_training", *chosen]))[:calls]
    options = {call: options_of(draw, blocks, shapes) for call in chosen}
    slow = draw.uniform(0.0, 0.5)

    def transfer(call: str, option: Option, others: Placed) -> float:
        source = others.get("policy_training")
        receives = call.startswith("policy") or call == "generation"
        if source is None or not receives or call == "policy_training":
            return 0.0
        return slow * (source.placement != option.placement)

    memory = draw.uniform(3.0, 12.0)
    return Problem(options, blocks, memory, transfer=transfer, lag=lag)


def random_choices(problem: Problem, seed: int) -> list[dict[str, Option]]:
    """Some choices of options that are allowed."""
    draw = random.Random(seed)
    choices = [
        {call: draw.choice(options) for call, options in problem.options.items()}
        for _ in range(200)
    ]
    return [choice for choice in choices if is_allowed(problem, choice)]


def is_allowed(problem: Problem, placed: Placed) -> bool:
    """Whether generation is alone where it must be, and no device holds more than it can."""
    alone = "generation" not in placed or not any(
        map(placed["generation"].shares, problem.apart("generation", placed))
    )
    return alone and most_bytes(problem, placed) <= problem.memory


def step_seconds(problem: Problem, placed: Placed) -> float:
    """The seconds of a step by stages, one after the other, or generation beside the others."""
    generation, *others = (stage_seconds(problem, stage, placed) for stage in problem.stages)
    return max(generation, sum(others)) if problem.lag else generation + sum(others)


def by_trying_all(problem: Problem) -> float:
    """The seconds of the best choice; infinity where none fits."""
    best = math.inf
    for options in itertools.product(*problem.options.values()):
        choice = dict(zip(problem.options, options, strict=True))
        if is_allowed(problem, choice):
            best = min(best, step_seconds(problem, choice))
    return best


def test_parts_are_aligned_or_three_quarters_of_what_is():
    for blocks in (1, 2, 4, 16):
        wanted = parts_of(blocks)
        assert part_sizes(blocks) == sorted(wanted)
        assert {size: part_starts(size, blocks) for size in wanted} == wanted


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 32))]
)
def test_the_search_finds_what_trying_all_finds(seed, lag):
    of_blocks = (4, 2 + seed % 3, 1 + seed % 2) if seed < 24 else (8, 3, 1)
    problem = random_problem(seed, *of_blocks, lag=lag)
    wanted = by_trying_all(problem)
    found = search(problem)
    if found is None:
        assert wanted == math.inf
        return
    assert found.seconds == pytest.approx(wanted) and found.gap == 0.0
    assert is_allowed(problem, found.placed)
    assert steady_seconds(simulate(problem, found.placed, STEADY)) == pytest.approx(found.seconds)


@pytest.mark.parametrize("lag", [0, 1])
def test_iterations_event_by_event_take_what_stages_take(lag):
    compared = 0
    for seed in range(20):
        problem = random_problem(seed, blocks=8, calls=7, shapes=2, lag=lag)
        for choice in random_choices(problem, seed):
            assert steady_seconds(simulate(problem, choice, STEADY)) == pytest.approx(
                step_seconds(problem, choice)
            )
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("lag", [0, 1])
def test_no_end_of_a_beginning_is_shorter_than_its_bound(lag):
    compared = 0
    for seed in range(10):
        problem = random_problem(seed, blocks=8, calls=7, shapes=2, lag=lag)
        for choice in random_choices(problem, seed):
            names = random.Random(seed).sample(list(choice), 4)
            bound = lower_bound(problem, {name: choice[name] for name in names})
            assert bound <= step_seconds(problem, choice) * (1 + 1e-9)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("lag", [0, 1])
def test_a_device_does_one_thing_at_a_time_and_waits_for_what_it_needs(lag):
    problem = random_problem(5, blocks=8, calls=7, shapes=2, lag=lag)
    choice = random_choices(problem, 0)[0]
    events = simulate(problem, choice, 5)
    for device in range(8):
        own = sorted((one.began, one.ended) for one in events if device in one.devices)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))
    ended = {(one.call, one.iteration): one.ended for one in events if not one.receives}
    for event in events:
        step = event.iteration
        if event.call == "generation" and step > lag:
            assert event.began >= ended["policy_training", step - 1 - lag]
        elif event.call.endswith("inference"):
            assert event.began >= ended["generation", step]
            assert step == 0 or event.began >= ended["critic_training", step - 1]
    # ahead, a step's samples are drawn while the step before it trains
    draws = next(one for one in events if (one.call, one.iteration) == ("generation", 3))
    trains = ended["policy_training", 2]
    assert (draws.began < trains) == bool(lag)


def test_generation_ahead_has_devices_of_its_own():
    problem = random_problem(1, blocks=4, calls=4, lag=1)
    found = search(problem)
    assert found
    apart = found.placed["generation"]
    assert not any(one.shares(apart) for call, one in found.placed.items() if call != "generation")
    whole = {
        call: [one for one in options if one.blocks == 4]
        for call, options in problem.options.items()
    }
    assert search(Problem(whole, 4, problem.memory, lag=1)) is None


def test_calls_that_share_a_device_take_turns_with_its_memory():
    def held(always: float, working: float, kept: float) -> Option:
        return Option(Placement(0, 1), 0, 1, 1.0, always, working, kept)

    def most(**options: Option) -> float:
        problem = Problem({call: [one] for call, one in options.items()}, 1, memory=1.0)
        return most_bytes(problem, options)

    # the policy's gradients wait for the critic's turn; what is always there adds up
    training = {"policy_training": held(10, 8, kept=3), "critic_training": held(5, 7, kept=0)}
    assert most(**training) == 15 + max(8, 7 + 3)
    # copies that score add up, and the largest call's work is there beside them
    inference = {"policy_inference": held(0, 5, kept=4), "critic_inference": held(0, 3, kept=1)}
    assert most(**inference) == (4 + 1) + max(5 - 4, 3 - 1)
    # reward models score beside generation's weights
    rewards = {"generation": held(0, 20, kept=6), "reward_inference": held(16, 15, kept=0)}
    assert most(**rewards) == 16 + max(20, 6 + 15)


def test_calls_of_a_stage_run_side_by_side_where_their_blocks_are_apart():
    stage = ("policy_inference", "reference_inference", "critic_inference")
    apart = {
        call: Option(Placement(first, 1), first, 1, seconds)
        for call, first, seconds in zip(stage, (0, 1, 0), (3.0, 4.0, 2.0), strict=True)
    }
    problem = Problem({call: [option] for call, option in apart.items()}, blocks=2, memory=1.0)
    assert stage_seconds(problem, stage, apart) == 5.0


def test_what_is_known_is_not_found_again_and_the_gap_is_told_when_time_runs_out():
    problem = random_problem(3, blocks=16, calls=7, shapes=2)
    below = step_seconds(problem, random_choices(problem, 0)[0])
    found = search(problem, below, limit=0.0)
    assert found and not found.placed and found.seconds == below
    assert 0.0 < found.gap < 1.0
    better = search(problem, below, limit=20.0)
    assert better and better.placed and better.seconds < below and better.gap == 0.0
    assert search(problem, better.seconds, limit=20.0) is None


def test_a_choice_that_no_memory_holds_is_not_found():
    option = Option(Placement(0, 1), 0, 1, seconds=1.0, always=2.0)
    assert search(Problem({"generation": [option]}, blocks=1, memory=1.0)) is None


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_sixteen_blocks_and_seven_calls_are_searched_within_a_minute(seed, lag):
    problem = random_problem(seed, blocks=16, calls=7, shapes=2, lag=lag)
    began = time.process_time()
    found = search(problem, limit=60.0)
    assert found is None or found.gap == 0.0
    assert time.process_time() - began < 60.0
