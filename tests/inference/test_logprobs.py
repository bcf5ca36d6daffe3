"""Training attention and token log-probabilities against their naive definitions."""

import dataclasses
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from learning import sequences_of

from rlhf_jax.inference.logprobs import logprobs_and_entropy, mismatch, token_logprobs
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.mesh import AXES, Layout, abstract_mesh, make_mesh
from rlhf_jax.models import attention
from rlhf_jax.models.transformer import forward, init, logits
from rlhf_jax.runtime import jax_internals
from rlhf_jax.sequences.batch import Sequences


def naive_attention(query, key, value):
    """Full [Q, Q] weights, heads repeated."""
    repeats = query.shape[2] // key.shape[2]
    key = jnp.repeat(key, repeats, axis=2)
    value = jnp.repeat(value, repeats, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)


def random_attention_inputs(count, dtype=jnp.float32, groups=2):
    shapes = [(2, count, 4, 16), (2, count, groups, 16), (2, count, groups, 16)]
    keys = jax.random.split(jax.random.key(count), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("count", [1, 7, 512, pytest.param(700, marks=pytest.mark.slow)])
def test_blockwise_attention_is_naive_attention(count):
    inputs = random_attention_inputs(count)

    def both(attend):
        weigh = jnp.cos(jnp.arange(count, dtype=jnp.float32))[None, :, None, None]
        value_and_grad = jax.value_and_grad(
            lambda *args: (attend(*args) * weigh).sum(), argnums=(0, 1, 2)
        )
        return attend(*inputs), value_and_grad(*inputs)[1]

    got = both(lambda *args: attention.causal(*args)[0])
    want = both(naive_attention)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def test_long_attention_never_holds_all_weights():
    inputs = random_attention_inputs(1536)
    gradient = jax.jit(jax.grad(lambda *args: attention.causal(*args)[0].sum(), argnums=(0, 1, 2)))
    assert largest_intermediate(gradient, *inputs) < 2 * 4 * 1536 * 1536


def test_attention_partitions_over_a_mesh_without_communication():
    mesh = make_mesh(2, 1, 2, jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "tensor", None))
    inputs = random_attention_inputs(600)
    split = [jax.device_put(part, sharding) for part in inputs]
    attend = jax.jit(attention.causal_on(Layout(mesh)))
    text = str(attend.lower(*split).compile().as_text())
    assert not any(
        word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )
    np.testing.assert_allclose(attend(*split)[0], naive_attention(*inputs), atol=2e-5)


@pytest.mark.parametrize("count", [48, 700])
@pytest.mark.parametrize(
    "platform, marker", [("tpu", "tpu_custom_call"), ("cuda", "cudnn"), ("cpu", "dot_general")]
)
def test_half_precision_attention_lowers_to_the_platforms_kernel(
    count, platform, marker, monkeypatch
):
    # the primitive asks for the library, and nothing else, when it is traced
    library = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr(jax_internals.cudnn, "cuda_versions", library)
    named = "gpu" if platform == "cuda" else platform
    layout = Layout(abstract_mesh(dict.fromkeys(AXES, 1), named))
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in random_attention_inputs(count)]

    def total(*args):
        return attention.causal_on(layout)(*args)[0].astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    text = gradient.trace(*inputs).lower(lowering_platforms=(platform,)).as_text()
    assert marker in text
    assert (platform == "cpu") == ("stablehlo.exponential" in text)


def random_batch(config, rows=4, slots=24, seed=0, top_k=None) -> Sequences:
    """Rows of several lengths, prompts of 3 to 6 tokens; supports hold the token itself."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (rows, slots)).astype(np.int32)
    prompt = rng.integers(3, 7, rows)
    length = rng.integers(10, slots + 1, rows)
    at = np.arange(slots)[None, :]
    mask = (at >= prompt[:, None]) & (at < length[:, None])
    top_k_ids = None
    if top_k is not None:
        top_k_ids = np.stack(
            [
                [rng.permutation(config.vocab_size)[:top_k] for _ in range(slots)]
                for _ in range(rows)
            ]
        )
        top_k_ids[..., -2:] = -1
        top_k_ids[..., 0] = tokens
        top_k_ids = np.where(mask[..., None], top_k_ids, -1).astype(np.int32)
    return jax.tree.map(jnp.asarray, sequences_of(tokens, mask, top_k_ids=top_k_ids))


def naive_logprobs(model, tokens, temperature, top_k_ids=None):
    """A whole softmax, token by token, in float64."""
    tokens = np.asarray(tokens)
    top_k_ids = None if top_k_ids is None else np.asarray(top_k_ids)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    scores = (
        np.asarray(logits(model, forward(model, jnp.asarray(tokens), positions)[0]), np.float64)
        / temperature
    )
    out = np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            row = scores[b, t - 1]
            ids = [i for i in top_k_ids[b, t] if i >= 0] if top_k_ids is not None else []
            allowed = row[ids] if ids else row
            out[b, t] = row[tokens[b, t]] - np.log(np.exp(allowed).sum())
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [None, 6])
@pytest.mark.parametrize("chunk", [1, 20, 512])
def test_logprobs_are_the_whole_softmax(tiny, temperature, top_k, chunk):
    model = init(jax.random.key(0), tiny)
    batch = random_batch(tiny, top_k=top_k)
    top_k_ids = batch.columns.get("top_k_ids")
    got = token_logprobs(
        model, batch.tokens, temperature=temperature, top_k_ids=top_k_ids, chunk=chunk
    )
    want = naive_logprobs(model, batch.tokens, temperature, top_k_ids)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_gradient_is_the_whole_softmaxs(tiny):
    model = init(jax.random.key(0), tiny)
    batch = random_batch(tiny, top_k=6)
    weigh = jnp.asarray(np.random.default_rng(1).normal(size=batch.tokens.shape), jnp.float32)

    def chunked(model):
        got = token_logprobs(
            model,
            batch.tokens,
            temperature=0.7,
            mask=batch.mask,
            top_k_ids=batch.columns.get("top_k_ids"),
            chunk=8,
            remat=True,
        )
        return (got * weigh).sum()

    def whole(model):
        positions = jnp.broadcast_to(jnp.arange(24), batch.tokens.shape)
        scores = logits(model, forward(model, batch.tokens, positions)[0])[:, :-1] / 0.7
        top_k_ids = jnp.asarray(batch.columns.get("top_k_ids"))[:, 1:]
        picked = jnp.take_along_axis(scores, jnp.maximum(top_k_ids, 0), axis=-1)
        picked = jnp.where(top_k_ids >= 0, picked, -1e9)
        law = picked[..., 0] - jax.nn.logsumexp(picked, axis=-1)
        return jnp.where(batch.mask[:, 1:], law * weigh[:, 1:], 0.0).sum()

    got = jax.grad(chunked)(model)
    want = jax.grad(whole)(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)


def test_unwanted_tokens_are_zero_and_change_nothing(tiny):
    model = init(jax.random.key(0), tiny)
    batch = random_batch(tiny)
    whole = token_logprobs(model, batch.tokens, temperature=1.0)
    wanted = token_logprobs(model, batch.tokens, temperature=1.0, mask=batch.mask, chunk=8)
    np.testing.assert_allclose(wanted, np.where(batch.mask, whole, 0.0), atol=1e-5)
    last = 23 - np.argmax(np.asarray(batch.mask)[:, ::-1], axis=1)[:, None]
    filled = np.where(np.arange(24)[None] <= last, batch.tokens, 7)
    padded = jnp.pad(filled, [(0, 1), (0, 8)])
    again = token_logprobs(model, padded, temperature=1.0)[:4, :24]
    np.testing.assert_allclose(np.where(batch.mask, again, 0.0), wanted, atol=1e-5)


@pytest.mark.parametrize("top_k", [None, 6])
def test_entropy_is_the_sampled_laws(tiny, top_k):
    """And asking for it leaves the log-probabilities as they are."""
    model = init(jax.random.key(0), tiny)
    batch = random_batch(tiny, top_k=top_k)
    tokens = batch.tokens
    mask = np.asarray(batch.mask)
    top_k_ids = batch.columns.get("top_k_ids")
    top_k_ids = None if top_k_ids is None else np.asarray(top_k_ids)
    options = {"temperature": 0.7, "mask": batch.mask, "top_k_ids": top_k_ids, "chunk": 20}
    logprobs, got = logprobs_and_entropy(model, tokens, entropy=True, **options)
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    scores = np.asarray(logits(model, forward(model, tokens, positions)[0]), np.float64) / 0.7
    want = np.zeros(tokens.shape)
    for b, t in zip(*np.nonzero(mask), strict=True):
        ids = range(tiny.vocab_size) if top_k_ids is None else top_k_ids[b, t][top_k_ids[b, t] >= 0]
        law = np.exp(scores[b, t - 1][list(ids)])
        law /= law.sum()
        want[b, t] = -sum(p * np.log(p) for p in law)
    assert got is not None
    np.testing.assert_allclose(got, want, atol=1e-4)
    same, nothing = logprobs_and_entropy(model, tokens, entropy=False, **options)
    assert nothing is None
    np.testing.assert_allclose(logprobs, same, atol=1e-6)


def largest_intermediate(function, *args) -> int:
    """The most elements of any value in the function's program, nested programs included."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (np.prod(out.aval.shape, dtype=int) for out in equation.outvars)
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*args).jaxpr))


def test_no_program_holds_the_logits_of_all_tokens(tiny):
    model = init(jax.random.key(0), dataclasses.replace(tiny, vocab_size=1000))
    tokens = jnp.zeros((4, 24), jnp.int32)

    def total(model):
        return token_logprobs(model, tokens, temperature=1.0, chunk=16).sum()

    def with_entropy(model):
        logprobs, entropy = logprobs_and_entropy(
            model, tokens, temperature=1.0, entropy=True, chunk=16
        )
        return jnp.sum(logprobs) + jnp.sum(jnp.asarray(entropy))

    for function in (total, jax.grad(total), jax.grad(with_entropy)):
        assert largest_intermediate(function, model) < 4 * 23 * 1000 / 2
        text = str(jax.jit(function).lower(model).compile().as_text())
        assert "1000,92]" not in text and "92,1000]" not in text


def test_scores_do_not_depend_on_how_many_rows_go_together(tiny):
    model = init(jax.random.key(0), tiny)
    batch = random_batch(tiny, rows=6, top_k=6)
    top_k_ids = batch.columns["top_k_ids"]
    want = token_logprobs(
        model, batch.tokens, temperature=0.7, mask=batch.mask, top_k_ids=top_k_ids
    )
    for rows in (1, 2, 6):
        got = score_sequences(model, batch, temperature=0.7, rows=rows)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bad_scoring_requests_are_refused(tiny):
    model = init(jax.random.key(0), tiny)
    with pytest.raises(ValueError, match="temperature above 0"):
        token_logprobs(model, jnp.zeros((1, 4), jnp.int32), temperature=0.0)


def test_mismatch_is_zero_for_equal_laws_and_positive_otherwise(tiny):
    rng = np.random.default_rng(0)
    sampled = rng.normal(size=(2, 5)).astype(np.float32)
    mask = np.array([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]], bool)
    assert mismatch(sampled, sampled, mask) == {
        "mismatch/kl": 0.0,
        "mismatch/mean": 0.0,
        "mismatch/max": 0.0,
    }
    got = mismatch(sampled, sampled + np.float32(0.1), mask)
    assert got["mismatch/mean"] == pytest.approx(0.1, rel=1e-5) == got["mismatch/max"]
    assert got["mismatch/kl"] == pytest.approx(np.exp(0.1) - 1.1, rel=1e-4)
    assert mismatch(sampled, sampled, np.zeros_like(mask))["mismatch/kl"] == 0.0
