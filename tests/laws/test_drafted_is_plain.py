"""Speculative text is plain text, whatever drafts it, however rows come, go and move."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import CORE, STOP, assert_equal, decoding, run
from places import GOLDEN
from scipy import stats
from tiny_stage import requests

from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import scheduler
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.history import keep_latest, known_texts
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.generation.requests import Request, Sample, StopStrings, as_sequences
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.drafters.lookup import LOOKUP
from rlhf_jax.generation.speculative.drafters.search import propose
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED, Sampling
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import forward, init, logits, unstack
from rlhf_jax.types import ModelConfig


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


TREES = ("tree-4", "tree-2x2", "tree-3x1x1", "parents:-1,-1,0,0,1,2")
BRANCHED = tuple(f"{drafter}-{shape}" for drafter in ("lookup", "model") for shape in TREES)
CHAINS = (
    *(f"lookup-chain-{k}" for k in (1, 2, 3, 5, 6, 7, 8)),
    *(f"model-chain-{k}" for k in (1, 2, 4, 5, 6, 7, 8)),
)
SAMPLED = Sampling(1.0)
GREEDY = Sampling(0.0)
CASES = [
    *((name, SAMPLED) for name in CORE),
    *(slow(name, SAMPLED) for name in (*BRANCHED, *CHAINS)),
    ("model-chain-3", GREEDY),
    *(slow(name, GREEDY) for name in (*CORE, *BRANCHED) if name != "model-chain-3"),
    *(pytest.param(name, GREEDY, marks=[pytest.mark.slow, pytest.mark.long]) for name in CHAINS),
]


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


@pytest.fixture(scope="module")
def plain_text(target):
    """Plain samples under a sampling law, each law once."""
    return functools.cache(
        lambda sampling: run(target, None, decoding(sampling=sampling, max_rows=24))
    )


@pytest.mark.parametrize(("strategy", "sampling"), CASES)
def test_speculative_text_is_plain_text(target, drafter, strategy, sampling, plain_text):
    plain = plain_text(sampling)
    how = decoding(strategy, sampling=sampling)
    assert_equal(target, run(target, drafter, how), plain, how)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_k=20), slow(Sampling(1.0, top_p=0.8))], ids=["top_k", "top_p"]
)
def test_truncated_sampling_is_replayable_too(target, drafter, sampling, plain_text):
    plain = plain_text(sampling)
    for strategy in ("model-tree-2x2", "lookup-chain-3"):
        how = decoding(strategy, sampling=sampling)
        assert_equal(target, run(target, drafter, how), plain, how)


TEMPERATURES = (0.0, 0.7, 1.3)


def at_temperatures() -> list[Request]:
    """The tiny stage's requests, whose temperatures take turns."""
    turns = zip(requests(), itertools.cycle(TEMPERATURES), strict=False)
    return [dataclasses.replace(one, temperature=heat) for one, heat in turns]


@pytest.mark.parametrize(
    ("strategy", "rule", "top_k"),
    [
        ("plain", "replayable", 0),
        ("model-tree-2x2", "replayable", 0),
        ("lookup-chain-4", "replayable", 20),
        slow("model-chain-3", "rejection", 0),
        slow("model-tree-2x2", "rejection", 20),
    ],
)
def test_samples_of_a_batch_are_those_of_a_batch_of_their_temperature(
    target, drafter, strategy, rule, top_k, plain_text
):
    """Token by token; under 'replayable' they are plain text, too."""
    how = decoding(strategy, acceptance=rule)
    how = dataclasses.replace(how, sampling=Sampling(0.4, top_k))
    mixed = run(target, drafter, how, at_temperatures())
    for temperature in TEMPERATURES:
        law = Sampling(temperature, top_k)
        uniform = (
            plain_text(law)
            if rule == "replayable"
            else run(target, drafter, dataclasses.replace(how, sampling=law))
        )
        own = [one for one in mixed.values() if one.request.temperature == temperature]
        assert len(own) == 8
        for sample in own:
            alone = uniform[sample.sample_id]
            assert sample.tokens == alone.tokens
            np.testing.assert_allclose(sample.logprobs, alone.logprobs, atol=1e-5)
            np.testing.assert_array_equal(sample.top_k_ids, alone.top_k_ids)


def test_samples_of_a_request_have_temperatures_of_their_own(target, drafter, plain_text):
    asked = [
        dataclasses.replace(
            one,
            temperatures=tuple(
                itertools.islice(itertools.cycle(TEMPERATURES), len(one.sample_ids))
            ),
        )
        for one in requests()
    ]
    mixed = run(target, drafter, decoding("lookup-chain-4"), asked)
    for request in asked:
        for sample_id, temperature in zip(request.sample_ids, request.temperatures, strict=True):
            alone = plain_text(Sampling(temperature, 0))[sample_id]
            assert mixed[sample_id].tokens == alone.tokens
    assert len({len(request.sample_ids) for request in asked} - {1}) >= 1


def test_other_temperatures_need_no_other_program(target, drafter, compilations):
    for strategy, rule in (("plain", "replayable"), ("model-tree-2x2", "rejection")):
        run(target, drafter, decoding(strategy, acceptance=rule))
        with compilations() as seen:
            run(target, drafter, decoding(strategy, acceptance=rule), at_temperatures())
            run(target, drafter, decoding(strategy, acceptance=rule, sampling=GREEDY))
        assert not seen, strategy
    hot = decoding(sampling=Sampling(1.5), seed=4)
    assert hot.of_programs == decoding().of_programs
    assert hot.of_programs != decoding(sampling=Sampling(1.5, top_k=2)).of_programs


@pytest.mark.parametrize("temperature", [-0.5, float("inf"), float("nan")])
def test_a_request_refuses_a_temperature_that_is_none(temperature):
    with pytest.raises(ValueError, match=f"temperature is {temperature}; give 0"):
        Request(np.arange(3, dtype=np.int32), (0,), 4, temperature=temperature)


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


@pytest.mark.parametrize("rule", ["replayable", "rejection"])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=20)], ids=["temperature", "top_k"]
)
def test_logprobs_are_those_of_the_sampled_law(target, drafter, rule, sampling):
    """At most 1e-4 from a teacher-forced pass, whichever strategy and acceptance rule sampled."""
    how = decoding("model-tree-2x2", acceptance=rule, sampling=sampling)
    drawn = as_sequences(list(run(target, drafter, how).values()), slots=64)
    again = score_sequences(target, drawn, temperature=sampling.temperature, rows=len(drawn.tokens))
    apart = np.abs(again - drawn.columns["sampled_logprobs"])
    assert drawn.mask.sum() > 200 and apart[drawn.mask].max() < 1e-4


@pytest.mark.parametrize("rule", ["replayable", "rejection"])
@pytest.mark.parametrize(
    "strategy",
    [
        "plain",
        "model-tree-3x2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("model-chain-2", "lookup-chain-2")
        ),
    ],
)
def test_sampled_pairs_follow_the_models_law(rule, strategy, kernels_are_interpreted):
    """Chi-square of the first two tokens of 6,000 samples against the exact joint law; interpreted,
    of 1,000.
    """
    # an interpreted kernel takes time by rows squared
    count = 1_000 if kernels_are_interpreted else 6_000
    config = ModelConfig("llama", 12, 16, 24, 2, 2, 1, 8, 32)
    model = unstack(init(jax.random.key(4), config))
    model = dataclasses.replace(model, embed=model.embed * 2)
    assert isinstance(model.layers, tuple)
    small = dataclasses.replace(
        model, layers=model.layers[:1], config=dataclasses.replace(config, num_layers=1)
    )
    prompt = np.array([1, 2, 3, 1, 2], np.int32)
    wanted = [Request(prompt, tuple(range(count)), 2)]
    how = decoding(
        strategy, acceptance=rule, max_rows=count, max_length=8, stop_tokens=(), history=0
    )
    drawn = [tuple(sample.tokens) for sample in run(model, small, how, wanted).values()]
    counts = np.zeros((12, 12))
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    assert _pooled_chi_square(counts.ravel(), _joint(model, prompt).ravel() * count) > 1e-4


def _joint(model, prompt) -> np.ndarray:
    texts = np.array([[*prompt, token] for token in range(12)], np.int32)
    places = np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape)
    laws = jax.nn.softmax(logits(model, forward(model, texts, places)[0]))
    return np.asarray(laws[0, -2][:, None] * laws[:, -1], np.float64)


def _pooled_chi_square(counts, expected) -> float:
    """p-value, with cells of fewer than 5 expected counts as one."""
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


def test_text_ends_at_its_limit_its_stop_token_and_the_last_slot(target, drafter):
    wanted = [Request(np.arange(5, dtype=np.int32), tuple(range(40)), 59)]
    for strategy in ("plain", "model-chain-5", "model-tree-2x2"):
        for sample in run(target, drafter, decoding(strategy), wanted).values():
            stops = [i for i, token in enumerate(sample.tokens) if token == STOP]
            assert stops in ([], [len(sample.tokens) - 1])
            assert len(sample.tokens) == 59 or stops, "neither a stop token nor the last slot"


@pytest.mark.parametrize("strategy", ["plain", "lookup-chain-4", "model-tree-2x2x1"])
def test_a_stop_string_cuts_the_text_that_there_would_be(target, drafter, strategy, plain_text):
    def decode(tokens):
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    plain = plain_text(SAMPLED)
    stops = StopStrings(("ab", "q"), decode)
    how = decoding(strategy, stop_strings=stops)
    cut = run(target, drafter, how)
    wanted = {}
    for name, sample in plain.items():
        ends = [n for n in range(1, len(sample.tokens) + 1) if stops.end(sample.tokens[:n], n)]
        tokens = sample.tokens[: ends[0]] if ends else sample.tokens
        wanted[name] = dataclasses.replace(sample, tokens=tokens)
        assert how.ended_itself(tokens) == bool(ends or tokens[-1] == STOP)
        assert len(cut[name].logprobs) == len(cut[name].tokens)
    shorter = sum(len(wanted[name].tokens) < len(plain[name].tokens) for name in plain)
    assert 3 < shorter < len(plain), "some end early, and not all"
    assert_equal(target, cut, wanted, how)


def test_a_prompt_that_does_not_fit_is_refused_in_one_sentence(target):
    with pytest.raises(
        ValueError, match=r"60 tokens with up to 10 new ones does not fit the cache of 64 slots"
    ):
        list(generate(target, None, [Request(np.zeros(60, np.int32), (0,), 10)], decoding()))


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


GREEDY_TEXTS = GOLDEN / "greedy.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "plain",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("lookup-chain-3", "model-tree-2x2")
        ),
    ],
)
def test_a_real_models_greedy_text_is_that_of_transformers(smollm2, strategy):
    """SmolLM2-135M through the whole engine, 20 prompts; it drafts for itself with its first 24
    layers.
    """
    target, drafter = _real(smollm2)
    golden = json.loads(GREEDY_TEXTS.read_text())
    wanted = [
        Request(np.array(g["prompt"], np.int32), (i,), len(g["text"])) for i, g in enumerate(golden)
    ]
    how = decoding(strategy, sampling=GREEDY, max_rows=16, max_length=128, stop_tokens=())
    samples = run(target, drafter, how, wanted)
    theirs = {i: dataclasses.replace(samples[i], tokens=g["text"]) for i, g in enumerate(golden)}
    assert_equal(target, samples, theirs, how)


@pytest.mark.slow
@pytest.mark.long
def test_a_real_models_sampled_text_is_plain_text(smollm2):
    target, drafter = _real(smollm2)
    prompts = [json.loads(GREEDY_TEXTS.read_text())[i]["prompt"] for i in range(6)]
    wanted = [Request(np.array(p, np.int32), (2 * i, 2 * i + 1), 24) for i, p in enumerate(prompts)]
    plain = run(target, None, decoding(max_rows=8, max_length=128, stop_tokens=(2,)), wanted)
    for strategy in ("lookup-tree-2x2", "model-chain-3"):
        how = decoding(strategy, max_rows=4, max_length=128, stop_tokens=(2,))
        assert_equal(target, run(target, drafter, how, wanted), plain, how)


def _real(path):
    target = open_source(path).load(jnp.float32)
    layers = jax.tree.map(lambda leaf: leaf[:24], target.layers)
    config = dataclasses.replace(target.config, num_layers=24)
    return unstack(target), unstack(dataclasses.replace(target, layers=layers, config=config))
