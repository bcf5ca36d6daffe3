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

from rlhf_jax.generation.requests import Request, StopStrings, as_sequences
from rlhf_jax.generation.speculative.sampling import Sampling
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
    *(pytest.param(name, GREEDY, marks=pytest.mark.long) for name in CHAINS),
]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_k=20), Sampling(1.0, top_p=0.8)], ids=["top_k", "top_p"]
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


@pytest.mark.slow
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
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("model-tree-3x2", "model-chain-2", "lookup-chain-2")
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
