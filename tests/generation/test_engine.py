"""The engine of generation: rows that come and go, what drafts read, and programs made once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import STOP, decoding, run

from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import scheduler
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.history import keep_latest, known_texts
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.drafters.lookup import LOOKUP
from rlhf_jax.generation.speculative.drafters.search import propose
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED, Sampling


@pytest.mark.parametrize("rule", ["replayable", "rejection"])
def test_lookup_reads_the_latest_answers_to_other_prompts(target, rule):
    """A text that others are given is drafted from, but after what its own prompt was answered."""
    how = decoding("lookup-chain-4", sampling=Sampling(0.0), acceptance=rule)
    prompt = np.array([9, 4, 11, 3], np.int32)

    def rounds(**texts) -> Sample:
        (sample,) = generate(target, None, [Request(prompt, (50,), 40, **texts)], how)
        return sample

    alone = rounds()
    text = np.array(alone.tokens, np.int32)
    other = rounds(others=(text[:0], text))
    assert other.tokens == alone.tokens
    assert other.rounds < alone.rounds and other.accepted > alone.accepted
    assert not other.seen_prompt

    ended = {1: np.array([6]), 50: np.array([7])}
    own = Sample(50, Request(prompt, (50,), 40, others=(np.array([5]),)), [np.array([8, 8])])
    for size, wanted in ((8, [5, -1, 6, -1, 8, 8, -1, -1]), (4, [-1, 8, 8, -1]), (2, [8, -1])):
        assert known_texts(own, ended, size).tolist() == wanted


def test_samples_that_begin_later_read_what_has_ended_here(target):
    """Of each prompt the latest text, and as many tokens as lookup keeps."""
    kept: dict[int, np.ndarray] = {}
    for request, tokens in ((1, 3), (2, 4), (1, 5), (3, 2), (4, 9)):
        keep_latest(kept, request, np.full(tokens, request), size=11)
    assert {name: len(text) for name, text in kept.items()} == {3: 2, 4: 9}
    how = decoding("lookup-chain-4", sampling=Sampling(0.0), max_rows=1)
    wanted = [Request(np.array([9, 4, 11, 3], np.int32), (i,), 40) for i in range(2)]
    earlier, later = generate(target, None, wanted, how)
    assert later.tokens == earlier.tokens and later.rounds < earlier.rounds


def test_a_slice_reads_what_has_ended_on_it_and_not_on_others():
    """So processes that share it read the same, whatever other slices they have."""
    how = decoding("lookup-chain-4")
    ended = Sample(0, Request(np.array([9], np.int32), (0,), 4), [], tokens=[3, 5], done=True)
    slices = [
        scheduler.SliceBatch(number, (None, None), None, state=None, rows=rows)  # pyright: ignore
        for number, rows in enumerate(([None, ended], [None]))
    ]
    scheduler.release_finished(slices, [ended], {0: ended}, how)
    assert [batch.rows for batch in slices] == [[None, None], [None]]
    assert [[*map(list, batch.ended_texts.values())] for batch in slices] == [[[3, 5]], []]


@pytest.mark.parametrize("temperature", [-0.5, float("inf"), float("nan")])
def test_a_request_refuses_a_temperature_that_is_none(temperature):
    with pytest.raises(ValueError, match=f"temperature is {temperature}; give 0"):
        Request(np.arange(3, dtype=np.int32), (0,), 4, temperature=temperature)


@pytest.mark.slow
def test_a_perfect_drafter_is_always_accepted(target):
    reports = []
    how = decoding("model-chain-4", stop_tokens=())
    wanted = [Request(np.arange(5, dtype=np.int32), (0, 1, 2), 50)]
    samples = run(target, target, how, wanted, observe=reports.append)
    assert sum(report.live > 0 for report in reports) == 10
    assert all(s.rounds == 10 and s.accepted == 40 for s in samples.values())


def test_drafts_save_rounds(target, drafter):
    rounds = {}
    for strategy in ("plain", "model-chain-3", "model-tree-2x2x1"):
        reports = []
        run(target, drafter, decoding(strategy), observe=reports.append)
        rounds[strategy] = len(reports)
    assert rounds["model-tree-2x2x1"] < rounds["model-chain-3"] < 0.75 * rounds["plain"]


def test_text_ends_at_its_limit_its_stop_token_and_the_last_slot(target, drafter):
    wanted = [Request(np.arange(5, dtype=np.int32), tuple(range(40)), 59)]
    for strategy in ("plain", "model-chain-5", "model-tree-2x2"):
        for sample in run(target, drafter, decoding(strategy), wanted).values():
            stops = [i for i, token in enumerate(sample.tokens) if token == STOP]
            assert stops in ([], [len(sample.tokens) - 1])
            assert len(sample.tokens) == 59 or stops, "neither a stop token nor the last slot"


def test_a_prompt_that_does_not_fit_is_refused_in_one_sentence(target):
    with pytest.raises(
        ValueError, match=r"60 tokens with up to 10 new ones does not fit the cache of 64 slots"
    ):
        list(generate(target, None, [Request(np.zeros(60, np.int32), (0,), 10)], decoding()))


@pytest.mark.slow
def test_rows_shrink_in_the_tail_and_are_refilled_before(target):
    reports = []
    wanted = [Request(np.arange(4, dtype=np.int32), (i,), 3 + 4 * i) for i in range(12)]
    run(target, None, decoding(max_rows=8, stop_tokens=()), wanted, observe=reports.append)
    rows = [report.rows for report in reports]
    assert rows == sorted(rows, reverse=True) and set(rows) == {8, 4, 2, 1}
    assert sum(r.live for r in reports) == sum(r.max_new_tokens for r in wanted)


def test_samples_of_a_prompt_prefill_it_once(target, monkeypatch):
    calls = []
    real = row_verbs.prefill
    monkeypatch.setattr(
        row_verbs, "prefill", lambda *a, **k: calls.append(a[2].shape) or real(*a, **k)
    )
    run(
        target,
        None,
        decoding(max_rows=4),
        [Request(np.arange(6, dtype=np.int32), tuple(range(12)), 8)],
    )
    assert calls == [(1, 32)]


@pytest.mark.slow
def test_a_finished_row_is_a_no_op(target, drafter):
    """However long a done row stays in the batch, its tokens and length stand still."""
    state = _state(target, drafter, rows=3)
    state = dataclasses.replace(state, done=jnp.array([False, True, False]))
    before = jax.tree.map(np.asarray, (state.tokens, state.length))
    for _ in range(3):
        state, emission = _round(target, drafter, state, trees.parse("model-chain-2"))
        assert int(emission.count[1]) == 0 and int(emission.accepted[1]) == 0
    assert int(state.length[1]) == before[1][1] and int(state.length[0]) > before[1][0]
    np.testing.assert_array_equal(state.tokens[1], before[0][1])


def test_a_moved_sample_is_the_unmoved_sample(target, drafter):
    """Every leaf of a row goes along: the rest of its text is the same elsewhere."""
    strategy = trees.parse("model-tree-2x2")
    state = _state(target, drafter, rows=4)
    state, _ = _round(target, drafter, state, strategy)
    packet = row_transfer.pack_rows(state, np.array([2, 0], np.int32), 64)
    moved = row_transfer.unpack_rows(
        _state(target, drafter, rows=6), packet, np.array([5, 1], np.int32)
    )
    for _ in range(4):
        state, _ = _round(target, drafter, state, strategy)
        moved, _ = _round(target, drafter, moved, strategy)
    for old, new in ((2, 5), (0, 1)):
        np.testing.assert_array_equal(state.tokens[old], moved.tokens[new])


@pytest.mark.slow
def test_a_draft_model_catches_up_after_rounds_without_it(target):
    """Switching at random loses no acceptance: a perfect drafter is accepted whole whenever it is
    asked.
    """
    state = _state(target, target, rows=3)
    chain = trees.parse("model-chain-3")
    plain = trees.parse("plain")
    rng = np.random.default_rng(1)
    for _ in range(12):
        strategy = chain if rng.random() < 0.4 else plain
        if strategy is chain:
            state = model_drafter.catch_up(target, state)
        state, emission = _round(target, target, state, strategy)
        assert emission.count.tolist() == [len(strategy.parents) + 1] * 3


def test_lookup_follows_the_longest_match_and_then_others(target):
    """History '5 6 8' and own text '5 6 9 ... 5 6': the longest match wins, siblings differ, chains
    follow on.
    """
    state = _state(target, None, rows=1)
    text = jnp.array(
        [[4, 5, 6, 9, 2, 5, 6, 1, 4, 5, 6] + [0] * (state.tokens.shape[1] - 11)], jnp.int32
    )
    history = jnp.full_like(state.history, -1).at[0, :4].set(jnp.array([3, 5, 6, 8]))
    state = dataclasses.replace(state, tokens=text, length=jnp.array([11]), history=history)
    alone = jnp.zeros((1, 0), jnp.int32)
    for name, drafts in (("lookup-chain-4", [9, 2, 5, 6]), ("lookup-tree-3", [9, 1, 8, -1])):
        assert propose(LOOKUP, state, alone, trees.parse(name)).drafts[0].tolist() == drafts


@pytest.mark.slow
def test_the_donated_cache_is_not_copied(target):
    """The compiled round writes the cache in place: no copy of its shape, and every leaf of the
    state aliased.
    """
    state = _state(target, None, rows=3)
    for name in ("plain", "lookup-chain-3", "lookup-tree-2x2"):
        strategy = trees.parse(name)
        drafts = jnp.zeros((3, trees.bucket(strategy) - 1), jnp.int32)
        tree = trees.as_data(strategy, 3)
        lowered = run_round.lower(
            target, state, drafts, None, tree, truncation=UNTRUNCATED, stop_tokens=(STOP,)
        )
        text = str(lowered.compile().as_text())
        shapes = {
            "f32[" + ",".join(map(str, leaf.shape)) + "]" for leaf in jax.tree.leaves(state.cache)
        }
        copies = [
            line
            for line in text.splitlines()
            if " copy(" in line and any(s in line for s in shapes)
        ]
        assert not copies, (name, copies[:2])
        header = text.split("\n")[0]
        assert (
            header.count("may-alias") + header.count("must-alias") >= 2 * target.config.num_layers
        )


def test_no_compilation_after_warm_up(target, drafter, compilations):
    for strategy in ("plain", "lookup-chain-3", "model-tree-2x2"):
        run(target, drafter, decoding(strategy))
        with compilations() as seen:
            run(target, drafter, decoding(strategy, seed=11))
        assert not seen, strategy


def _state(target, drafter, rows: int):
    """Rows that have just been admitted, each with a prompt of its own."""
    config = None if drafter is None else drafter.config
    state = row_verbs.empty(target.config, config, rows, 96, 8, 0)
    tokens = jnp.arange(rows * 32, dtype=jnp.int32).reshape(rows, 32) % 300
    prefix = row_verbs.prefill(target, drafter, tokens, jnp.arange(rows, dtype=jnp.int32) + 4)
    places = jnp.arange(rows, dtype=jnp.int32)
    key = jnp.stack([jnp.full((rows,), 5, jnp.uint32), places.astype(jnp.uint32)], axis=1)
    temperature = jnp.asarray(np.resize(np.array([1.0, 0.0, 0.7], np.float32), rows))
    history = jnp.full((rows, 8), -1, jnp.int32)
    earlier = jnp.zeros((rows, 0), jnp.int32)
    admission = row_verbs.Admission(
        places, places, jnp.full((rows,), 80, jnp.int32), key, temperature, history, earlier
    )
    return row_verbs.admit(state, prefix, admission)


def _round(target, drafter, state, strategy):
    rows = len(state.done)
    window = None
    drafts = jnp.zeros((rows, 0), jnp.int32)
    if strategy.drafter == "model":
        drafts, _, window, _ = model_drafter.propose(drafter, state, strategy, UNTRUNCATED)
    tree = trees.as_data(strategy, rows)
    state, emission = run_round(
        target, state, drafts, None, tree, truncation=UNTRUNCATED, stop_tokens=()
    )
    if window is not None:
        state = model_drafter.commit(state, window, emission.path, emission.count, strategy)
    return state, emission
