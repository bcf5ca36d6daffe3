"""The roll-out benchmark, from a tiny model to its JSON: equal texts, nothing compiled late, prices
of the table.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_run

from benchmarks import pricing, rollout
from benchmarks.pricing import Call
from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy.acceptance import DEPTHS, Observations
from rlhf_jax.generation.strategy.predict import Situation

SMALL = "--lengths 2 --new-tokens 12 --repeats 2 --student-layers 1 --prompts 1 --halvings 0"
FIGURES = {
    "seconds",
    "priced",
    "best",
    "ratio",
    "speedup",
    "tokens_per_round",
    "acceptance_by_depth",
    "strategies",
}
FIGURES |= {"ceiling", "table", "differing_samples", "compilations"}
PLAIN, CHAIN, BY_MODEL = (
    trees.parse(name) for name in ("plain", "lookup-chain-2", "model-chain-2")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.make_model(
        tmp_path_factory.mktemp("model"), width=128, ffn_width=1024, max_context=256
    )


def measured(model, part: str, *more: str) -> list[dict]:
    asked = rollout.arguments(["--model", str(model), "--part", part, *SMALL.split(), *more])
    return json.loads(json.dumps(list(rollout.measure(rollout.open_world(asked)))))


def check(case: dict, contenders: set[str]) -> None:
    assert case.keys() >= FIGURES
    assert (
        case["seconds"].keys()
        == case["priced"].keys()
        == case["tokens_per_round"].keys()
        == contenders
    )
    assert case["differing_samples"] == case["compilations"] == 0
    assert case["tokens_per_round"]["plain"] == 1.0


def a_tenth_a_node(table, speculative_round, strategies, rows) -> None:
    """In place of a measurement."""
    for strategy in strategies:
        call = Call(rows, *pricing.figures(strategy), 0)
        table[call] = [0.1 * call.nodes]


@pytest.mark.slow
def test_replayed_noise_is_drafted_well_after_a_real_step(model, monkeypatch):
    monkeypatch.setattr(pricing, "measure", a_tenth_a_node)
    (case,) = measured(model, "replay", "--batches", "4", "--replay-learning-rates", "1e-5")
    check(case, {"plain", "replay-chain-2", "adaptive"})
    assert 0 < case["kl"] < 0.01 and case["changed_tokens"] < 0.5
    assert (
        case["tokens_per_round"]["replay-chain-2"] > 1.5
        and case["acceptance_by_depth"]["replay"][0] > 0.7
    )
    told = rollout.summary([case])
    assert told["replay"][0]["kl"] == case["kl"] and told["unpriced"] == 0

    priced = case["priced"]
    nodes = {"plain": 1, "replay-chain-1": 2, "replay-chain-2": 3}
    rounds = {name: count / 2 for name, count in case["strategies"].items()}
    assert priced["adaptive"] == pytest.approx(
        0.1 * sum(count * nodes[name] for name, count in rounds.items())
    )
    assert 1.0 <= priced["plain"] <= 1.3
    assert case["ratio"]["priced"] == pytest.approx(
        priced["adaptive"] / min(priced["plain"], priced["replay-chain-2"])
    )
    assert case["ceiling"] == {"all_right": 1.0, "as_accepted": 1.0}


@pytest.mark.long
def test_epochs_show_the_student_that_learns_beside_the_one_that_does_not(model):
    cases = measured(
        model,
        "epochs",
        "--drafters",
        "model",
        "--epochs",
        "2",
        "--online",
        "--student-learning-rate=1e-2",
    )
    for case in cases:
        check(case, {"plain", "model-chain-2", "adaptive"})
        assert case["training"]["gradient/norm"] > 0
    before, after = (case["teacher_forced"] for case in cases)
    assert before["online"] == before["frozen"] and after["online"] != after["frozen"]
    assert len(rollout.summary(cases)["epochs"]) == 2


def report(
    strategy=PLAIN, rows: int = 4, lag: int = 0, seconds: float | None = None, **more
) -> RoundReport:
    return RoundReport(
        strategy,
        rows,
        live=rows,
        tokens=rows,
        accepted=0,
        drafted=0,
        draft_lag=lag,
        seconds=seconds,
        **more,
    )


def test_a_price_is_the_sum_of_medians_and_catching_up_is_paid_for():
    table = {
        Call(4, 1, 0, 0, 1, 0): [1.0, 9.0, 1.0],
        Call(4, 3, 2, 2, 3, 0): [3.0],
        Call(4, 3, 2, 2, 3, 1): [3.5],
    }
    assert (
        pricing.price(table, [report(), report(), report(BY_MODEL), report(BY_MODEL, lag=2)]) == 8.0
    )
    assert pricing.price(table, [report(BY_MODEL, lag=3)]) == 3.5
    assert pricing.price(table, [report(BY_MODEL, lag=17)]) == 3.0 + 3 * 0.5
    assert pricing.price(table, [report(), report(CHAIN)]) is None
    assert pricing.price(table, [report(rows=2)]) is None


def test_what_the_machine_allows():
    table = {Call(4, 1, 0, 0, 1, 0): [1.0], Call(4, 3, 0, 0, 3, 0): [1.5]}
    assert pricing.ceilings(table, 4, [CHAIN], {"lookup-chain-2": 1.2}) == {
        "all_right": 2.0,
        "as_accepted": 1.0,
    }
    assert pricing.ceilings(table, 4, [CHAIN], {"lookup-chain-2": 1.8})[
        "as_accepted"
    ] == pytest.approx(1.2)


def test_every_turn_is_played_and_what_was_not_timed_is_played_again():
    situation = Situation(4, 4, 0.0, 0, {}, ready=lambda strategy: True)
    forced = pricing.Forced([CHAIN, BY_MODEL], rows=4, spare=1)
    played = [forced.choose(situation).strategy]
    forced.observe_round(report(CHAIN))
    forced.observe_round(report(rows=2))
    played += [forced.choose(situation).strategy for _ in range(3)]
    forced.observe_round(report(CHAIN))
    assert (
        played == [CHAIN, BY_MODEL, CHAIN, PLAIN] and not forced.turns and len(forced.reports) == 3
    )


def test_acceptance_by_depth_counts_what_was_observed():
    offered = np.zeros((2, DEPTHS), int)
    ranks = np.full((2, DEPTHS), -1)
    offered[:, 0] = 4
    offered[0, 1] = 4
    ranks[0, 0] = 0
    ranks[1, 0] = 1
    none = np.zeros(2, int)
    seen = Observations(none.astype(bool), none, ranks, offered, band=none)
    assert pricing.accepted([seen, seen]) == [0.5, 0.0, *[None] * (DEPTHS - 2)]
