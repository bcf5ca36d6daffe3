"""Slices of a mesh decode each on its own: the texts are those of one, wherever samples run and
however they move.
"""

import dataclasses
import json

import numpy as np
import pytest
from places import GOLDEN
from sliced import over, roll_out, slices, texts
from tiny_stage import Shuffled

from rlhf_jax.generation import assignment
from rlhf_jax.generation.assignment import AssignmentPolicy
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.reallocation import planner
from rlhf_jax.generation.requests import GenerationConfig, Request, as_sequences
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.inference.overlap import Scoring, ScoringQueue
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.models.files.source import open_source
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.models import RewardModel, model_scorer

STOP = 7
JUDGE = GOLDEN / "llama_reward"


def decoding(*strategies: str, **changes) -> GenerationConfig:
    chosen = tuple(map(trees.parse, strategies or ("plain",)))
    base = GenerationConfig(
        Sampling(1.0), chosen, (STOP,), max_rows=6, max_length=64, seed=3, history=64
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def alone(target):
    return texts(roll_out(target, None, decoding(max_rows=24)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["plain", "model-chain-3"])
def test_two_slices_write_what_one_writes(target, drafter, alone, strategy):
    reports = []
    found = roll_out(target, drafter, decoding(strategy), slices(2), observe=reports.append)
    assert texts(found) == alone
    assert {report.slice for report in reports} == {0, 1}


@pytest.mark.parametrize(
    ("count", "fsdp", "strategies", "in_turn"),
    [
        pytest.param(2, 1, ("model-tree-2x2",), False, marks=pytest.mark.slow),
        pytest.param(2, 2, ("lookup-chain-4",), True, marks=pytest.mark.long),
        pytest.param(4, 2, ("model-chain-3",), True, marks=pytest.mark.long),
    ],
)
def test_samples_that_move_at_random_are_those_that_stayed(
    target, drafter, alone, count, fsdp, strategies, in_turn
):
    shuffled = Shuffled(seed=count)
    how = AssignmentPolicy(shuffled, in_turn=in_turn)
    found = roll_out(
        target, drafter, decoding(*strategies), slices(count, fsdp), assignment_policy=how
    )
    assert shuffled.moves > 10
    assert texts(found) == alone


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [True, False])
def test_samples_may_move_on_while_their_rounds_are_in_flight(target, monkeypatch, in_turn):
    """Caches longer than a narrow packet, and a move of half of all rows after every round."""
    monkeypatch.setattr(assignment, "REASSIGNED_EVERY", 1)
    random = np.random.default_rng(5)
    how = decoding("plain", max_length=128, stop_tokens=())
    wanted = [
        Request(
            random.integers(0, 300, 9).astype(np.int32),
            (2 * i, 2 * i + 1),
            int(random.integers(50, 110)),
        )
        for i in range(4)
    ]
    alone = texts(roll_out(target, None, how, wanted=wanted))
    shuffled = Shuffled(seed=1)
    how_placed = AssignmentPolicy(shuffled, in_turn=in_turn)
    assert (
        texts(roll_out(target, None, how, slices(3), wanted, assignment_policy=how_placed)) == alone
    )
    assert shuffled.moves > 100


@pytest.mark.slow
def test_a_slice_that_decodes_nothing_more_scores_what_is_finished(target):
    layout = slices(2)
    policy = over(layout, target)
    wanted = [Request(np.arange(4, dtype=np.int32), (i,), 4 if i < 20 else 50) for i in range(21)]
    how = decoding("plain", stop_tokens=())
    source = open_source(JUDGE)
    reward_model = RewardModel(source, source.load(np.float32), rows=4)
    on_slices = dataclasses.replace(reward_model, model=over(layout, reward_model.model))
    scoring_queue = ScoringQueue(
        Scoring(
            {"policy": policy, "reference": policy},
            temperature=1.0,
            rows=4,
            max_length=64,
            rewards={"judge": on_slices},
        )
    )
    chat = json.loads((JUDGE / "scores.json").read_text())[0]["messages"]
    answer = Response("", chat[:-1], {}, chat[-1]["content"])
    samples = []
    for sample in generate(policy, None, wanted, how, layout, idle_work=scoring_queue):
        samples.append(sample)
        scoring_queue.add(sample, answer)
    scored = scoring_queue.scored()
    assert len(scored) >= 8
    texts = as_sequences([sample for sample in samples if sample.sample_id in scored], 64)
    alone = score_sequences(target, texts, rows=len(texts.tokens))
    ids = texts.columns["sample_ids"].tolist()
    found = np.stack([scored[number].columns["logprobs"] for number in ids])
    np.testing.assert_allclose(found, alone, atol=1e-4, rtol=0)
    for number, row in zip(ids, found, strict=True):
        np.testing.assert_array_equal(row, scored[number].columns["reference_logprobs"])
    (wanted,) = model_scorer(reward_model)([answer]).values
    assert [one.rewards for one in scored.values()] == [
        {"judge": pytest.approx(wanted, abs=1e-4)}
    ] * len(scored)


@pytest.mark.slow
def test_the_plan_ends_a_long_tailed_stage_sooner(target):
    """Known lengths: long samples begin at once, and no slice is left with more than its share."""
    random = np.random.default_rng(1)
    layout = slices(2)
    ends = np.clip(random.lognormal(2.0, 0.8, 24).astype(int), 2, 50)
    wanted = [Request(np.arange(4, dtype=np.int32), (i,), int(end)) for i, end in enumerate(ends)]
    how = decoding("plain", stop_tokens=(), max_rows=4, min_rows=4)
    last = {}
    texts_of = {}
    for name, placed in (
        ("static", AssignmentPolicy(in_turn=True)),
        ("plan", AssignmentPolicy(planner.plan_reallocation, in_turn=True)),
    ):
        reports = []
        texts_of[name] = texts(
            roll_out(
                target, None, how, layout, wanted, observe=reports.append, assignment_policy=placed
            )
        )
        rounds = [
            sum(report.slice == number and report.live > 0 for report in reports)
            for number in range(2)
        ]
        last[name] = max(rounds)
    assert texts_of["plan"] == texts_of["static"]
    assert last["plan"] < 0.9 * last["static"]
