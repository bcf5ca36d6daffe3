"""The cost model: what it computes, what it learns from measured rounds, what cannot mislead it."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import pytest

from rlhf_jax.generation.strategy import cost, roofline
from rlhf_jax.generation.strategy.roofline import ModelWork, Roofline
from rlhf_jax.generation.strategy.settings import COST_SETTINGS

TARGET = ModelWork(weight_bytes=1.6e10, context_bytes=1.3e5, token_flops=1.5e10, context_flops=5e5)
DRAFTER = ModelWork(weight_bytes=2e9, context_bytes=2e4, token_flops=2e9, context_flops=1e5)
TARGET_LINE = Roofline(
    read=9e-3, read_context=3e-8, compute=5e-5, compute_context=5e-9, row=3e-5, call=1e-3
)
DRAFT_LINE = Roofline(
    read=2e-3, read_context=1e-8, compute=1e-5, compute_context=1e-9, row=1e-5, call=5e-4
)
TRUE = roofline.Machine(TARGET_LINE, DRAFT_LINE, look=3e-4)
# Plain, chains by a model, chains by lookup, and a tree by a model that three calls draft.
# The last one is packed.
SHAPES = ((1, 0, 0), (2, 1, 1), (5, 4, 4), (9, 8, 8), (2, 0, 0), (5, 0, 0), (17, 0, 0), (17, 3, 9))
CALLS = (
    *(roofline.Call(nodes, steps, fed, nodes) for nodes, steps, fed in SHAPES),
    roofline.Call(3, 0, 0, 17),
)
ALL_CALLS = roofline.Calls(*np.array(CALLS).T)
PLAIN = 0
CHAIN_4 = 2
LOOKUP_4 = 5
SIZES = (1, 4, 8, 16, 64)


def priced(costs: cost.Costs, rows: int, context: float, lag: int = 0) -> np.ndarray:
    """[S] seconds of all calls."""
    return cost.seconds(costs, ALL_CALLS, rows, context, lag)


def truly(rows: int, context: float, lag: int = 0) -> np.ndarray:
    return priced(cost.Costs(TRUE, TRUE), rows, context, lag)


def measured(rounds: int, noise: float, outliers: float = 0.0, sizes=SIZES) -> cost.Costs:
    """Costs after this many rounds of random strategies; the platform's prior is wrong by a factor
    of 2 to 4.
    """
    luck = np.random.default_rng(0)
    costs = cost.prior("gpu", TARGET, DRAFTER)
    for _ in range(rounds):
        strategy = int(luck.integers(len(CALLS)))
        rows = int(luck.choice(sizes))
        context = rows * float(luck.integers(100, 3000))
        lag = int(luck.choice([0, 0, 0, 20]))
        slow = 10.0 if luck.random() < outliers else 1.0
        took = truly(rows, context, lag)[strategy] * np.exp(luck.normal(0, noise)) * slow
        cost.observe(costs, CALLS[strategy], rows, context, lag, took)
    return costs


def worst_error(costs: cost.Costs, sizes=SIZES, lags=(0,)) -> float:
    """The largest relative error of all calls, at contexts between those measured."""
    errors = [
        priced(costs, rows, rows * each, lag) / truly(rows, rows * each, lag)
        for rows in sizes
        for each in (200, 1000, 2500)
        for lag in lags
    ]
    return float(np.abs(np.array(errors) - 1).max())


def test_seconds_are_the_roofline_by_hand():
    line = TARGET_LINE
    draft = DRAFT_LINE
    rows = 8
    context = 8 * 500.0
    read = line.read + line.read_context * context + line.row * rows + line.call
    assert truly(rows, context)[PLAIN] == pytest.approx(read)
    busy = (line.compute * rows + line.compute_context * context) * 17 + line.row * rows + line.call
    assert busy < read
    assert truly(64, 64 * 500.0)[6] == pytest.approx(
        (line.compute * 64 + line.compute_context * 64 * 500) * 17
        + line.row * 64
        + line.call
        + TRUE.look
    )
    step = draft.read + draft.read_context * context + draft.row * rows + draft.call
    assert truly(rows, context)[CHAIN_4] == pytest.approx(read + 4 * step)
    assert truly(rows, context)[LOOKUP_4] == pytest.approx(read + TRUE.look)


@pytest.mark.parametrize(("lag", "calls"), [(0, 0), (2, 0), (3, 1), (8, 1), (9, 2), (40, 5)])
def test_a_draft_cache_that_lags_costs_calls_that_catch_up(lag, calls):
    without, behind = (truly(4, 400.0, each) for each in (0, lag))
    step = (without[CHAIN_4] - without[PLAIN]) / 4
    np.testing.assert_allclose(behind - without, calls * step * (ALL_CALLS.steps > 0), rtol=1e-9)


def test_fit_recovers_the_machine_from_noisy_rounds_with_outliers():
    costs = measured(3000, noise=0.05, outliers=0.05)
    assert worst_error(cost.prior("gpu", TARGET, DRAFTER)) > 0.3
    cost.fit(costs)
    assert worst_error(costs) < 0.06
    # rarer, and up to three calls that are seen in sums alone
    assert worst_error(costs, lags=(20,)) < 0.12
    costs.corrections.clear()
    costs.trends.clear()
    assert worst_error(costs) < 0.06  # the roofline alone, which prices what nobody tried
    assert costs.machine.target.compute == pytest.approx(TRUE.target.compute, rel=0.1)
    assert costs.machine.target.read + costs.machine.target.call == pytest.approx(1e-2, rel=0.05)


def test_fit_prices_batch_sizes_that_were_never_measured():
    costs = measured(1500, noise=0.03, sizes=(4, 16, 64))
    cost.fit(costs)
    assert worst_error(costs, sizes=(1, 8, 32)) < 0.1


def test_rounds_that_a_price_rests_on_are_counted_by_call_and_size():
    costs = cost.Costs(TRUE, TRUE)
    for rows in (8, 8, 9, 64):  # 8 and 9 are of one half octave
        cost.observe(costs, CALLS[CHAIN_4], rows, 4000.0, 0, 0.02)
    for rows, rounds in ((8, 3), (64, 1), (1, 0)):
        counted = cost.rounds_timed(costs, ALL_CALLS, rows)
        assert counted[CHAIN_4] == counted.sum() == rounds


def test_corrections_learn_what_no_roofline_can_say():
    """One program is 40 % slower than the form allows: its price is learned and its neighbours'
    hardly move.
    """
    costs = cost.Costs(TRUE, TRUE)
    for _ in range(40):
        cost.observe(costs, CALLS[CHAIN_4], 8, 4000.0, 0, 1.4 * truly(8, 4000.0)[CHAIN_4])
    ratio = priced(costs, 8, 4400.0, 0) / truly(8, 4400.0)
    assert ratio[CHAIN_4] == pytest.approx(1.4, rel=0.02)
    np.testing.assert_allclose(ratio[ALL_CALLS.steps == 0], 1.0)
    np.testing.assert_allclose(priced(costs, 32, 4400.0, 0)[PLAIN], truly(32, 4400.0)[PLAIN])


@pytest.mark.parametrize("earlier", [0, 1, 2, 10])
def test_one_round_ten_times_too_long_moves_nothing(earlier):
    costs = cost.Costs(TRUE, TRUE)
    right = truly(8, 4000.0)[CHAIN_4]
    for _ in range(earlier):
        cost.observe(costs, CALLS[CHAIN_4], 8, 4000.0, 0, right)
    cost.observe(costs, CALLS[CHAIN_4], 8, 4000.0, 0, 10 * right)
    assert priced(costs, 8, 4000.0, 0)[CHAIN_4] == pytest.approx(right, rel=1e-6)


def test_a_machine_that_changes_is_learned_anew():
    costs = cost.Costs(TRUE, TRUE)
    for factor in (1.0, 2.0):
        for _ in range(COST_SETTINGS.window):
            cost.observe(costs, CALLS[PLAIN], 8, 4000.0, 0, factor * truly(8, 4000.0)[PLAIN])
    assert priced(costs, 8, 4000.0, 0)[PLAIN] == pytest.approx(
        2 * truly(8, 4000.0)[PLAIN], rel=0.01
    )


def test_fit_without_rounds_keeps_the_prior():
    costs = cost.prior("cpu", TARGET)
    cost.fit(costs)
    assert costs.machine == costs.prior


def test_prior_follows_the_work_and_refuses_an_unknown_platform():
    one, double = (
        cost.prior("tpu", ModelWork(k * 1e9, k * 1e4, k * 1e9, k * 1e4)).machine.target
        for k in (1, 2)
    )
    assert (
        double.read == 2 * one.read
        and double.compute == 2 * one.compute
        and double.call == one.call
    )
    with pytest.raises(ValueError, match=r"'npu'.*cpu, gpu, tpu"):
        cost.prior("npu", TARGET)


def test_costs_survive_a_checkpoint():
    costs = measured(200, noise=0.05)
    cost.fit(costs)
    again = cost.restore(json.loads(json.dumps(cost.state(costs))))
    np.testing.assert_array_equal(priced(again, 8, 999.0, 5), priced(costs, 8, 999.0, 5))
    for each in (costs, again):
        cost.observe(each, CALLS[CHAIN_4], 8, 999.0, 0, 0.05)
        cost.fit(each)
    assert cost.state(again) == cost.state(costs)


def test_costs_that_were_saved_before_rounds_were_packed_are_restored():
    saved = {
        "prior": [1.0] * 7,
        "machine": [1.0] * 7,
        "cells": [[6, 5, 0, 0, [[8, 999.0, 0, -3.0]]]],
    }
    assert cost.restore(saved).cells[6].keys() == {roofline.Call(5, 0, 0, 5)}


@pytest.mark.parametrize("drafter", [None, DRAFTER])
def test_costs_that_measured_nothing_survive_a_checkpoint_exactly(drafter):
    costs = cost.prior("cpu", TARGET, drafter)
    assert cost.restore(json.loads(json.dumps(cost.state(costs)))) == costs


def test_pricing_and_learning_are_quick():
    """Well over the 25 and 32 microseconds and 19 milliseconds measured: two busy cores run the
    suite.
    """
    costs = measured(3000, noise=0.05)
    sixty = roofline.Calls(*np.array((CALLS * 8)[:60]).T)
    assert median_seconds(lambda: cost.seconds(costs, sixty, 16, 16000.0, 0), 200) < 2e-4
    assert (
        median_seconds(lambda: cost.observe(costs, CALLS[CHAIN_4], 16, 16000.0, 0, 0.02), 200)
        < 2e-4
    )
    assert median_seconds(lambda: cost.fit(costs), 3) < 0.2


def median_seconds(action, repeats: int) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def test_a_call_timed_at_other_contexts_is_priced_at_those_of_now():
    """Seconds of one row grow with its context as no roofline that fits large batches has it."""

    def took(call: int, rows: int, context: float) -> float:
        return float(truly(rows, rows * context)[call]) * (context / 1000) ** (
            0.1 if rows == 1 else 0.0
        )

    luck = np.random.default_rng(2)
    costs = cost.prior("gpu", TARGET, DRAFTER)
    for rows, begin, calls in (
        (64, 200, range(len(CALLS))),
        (1, 2000, (PLAIN, CHAIN_4)),
        (1, 500, (PLAIN,)),
    ):
        for context, call in [(begin + 20 * i, call) for i in range(25) for call in calls]:
            cost.observe(
                costs,
                CALLS[call],
                rows,
                rows * context,
                0,
                took(call, rows, context) * luck.lognormal(0, 0.01),
            )
    cost.fit(costs)
    now = priced(costs, 1, 700)
    assert [now[call] / took(call, 1, 700) for call in (PLAIN, CHAIN_4)] == pytest.approx(
        [1, 1], abs=0.08
    )
