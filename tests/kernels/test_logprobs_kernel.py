"""Streamed log-probabilities, entropies and their gradients against the plain formula in float64,
and on TPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_libtpu, one
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import each, each_by_type, few, on_gpu, reduced
from scipy.special import log_softmax, logsumexp

from benchmarks.shapes import SHAPES
from pallas_kernels.dispatch import INTERPRETED
from pallas_kernels.logprobs import gpu, reference, tpu
from pallas_kernels.logprobs.streaming import Sums, combine
from rlhf_jax import mesh as meshes
from rlhf_jax.mesh import Layout
from rlhf_jax.models import kernels as laid

TEMPERATURE = 0.7
IMPLEMENTATIONS = {
    "reference": reference.token_logprobs,
    "tpu": functools.partial(tpu.token_logprobs, interpret=pltpu.InterpretParams()),
    "gpu": on_gpu(gpu.token_logprobs),
}
LIMITS = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 1e-2}  # of the largest value


def problem(rows, width, vocab, tied, dtype, head_dtype=None):
    """Hidden, head, targets (the first and the last token among them) and weights of both
    outputs.
    """
    random = np.random.default_rng(rows)
    hidden = jnp.asarray(random.normal(size=(rows, width)), dtype)
    head = jnp.asarray(
        3 * width**-0.5 * random.normal(size=(vocab, width) if tied else (width, vocab)), dtype
    )
    targets = random.integers(0, vocab, rows)
    targets[:2] = vocab - 1, 0
    weights = random.normal(size=(2, rows))
    weights[:, rows // 2] = 0  # a row that no loss counts
    return hidden, head.astype(head_dtype or dtype), jnp.asarray(targets, jnp.int32), weights


def value_and_gradients(law, hidden, head, targets, weights, tied):
    """Both outputs, and the gradients of their weighted sum."""
    weights = jnp.asarray(weights, jnp.float32)

    def loss(hidden, head):
        out = law(hidden, head, targets, temperature=TEMPERATURE, tied=tied)
        return sum((weight * part).sum() for weight, part in zip(weights, out, strict=True)), out

    with jax.default_matmul_precision("highest"):
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
            hidden, head
        )
    return (*out, *gradients)


def plain(hidden, head, targets, weights, tied):
    """The same by the formula, in numpy's float64: p = softmax, d log p = onehot - p, dH = -p (log
    p + H).
    """
    hidden = np.asarray(hidden, np.float64)
    head = np.asarray(head, np.float64)
    head = head.T if tied else head
    scores = hidden @ head / TEMPERATURE
    log_p = scores - scores.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    onehot = np.eye(head.shape[1])[np.asarray(targets)]
    entropy = -(p * log_p).sum(axis=1)
    d_scores = weights[0][:, None] * (onehot - p) - weights[1][:, None] * p * (
        log_p + entropy[:, None]
    )
    d_hidden = d_scores @ head.T / TEMPERATURE
    d_head = hidden.T @ d_scores / TEMPERATURE
    return (log_p * onehot).sum(axis=1), entropy, d_hidden, d_head.T if tied else d_head


def assert_is_plain(law, hidden, head, targets, weights, tied):
    got = value_and_gradients(law, hidden, head, targets, weights, tied)
    for part, want in zip(got, plain(hidden, head, targets, weights, tied), strict=True):
        error = np.abs(np.asarray(part, np.float64) - want).max() / np.abs(want).max()
        assert error <= LIMITS[hidden.dtype], error
    assert not np.any(np.asarray(got[2][len(targets) // 2], np.float32))
    assert (got[2].dtype, got[3].dtype) == (hidden.dtype, head.dtype)


# Shapes that differ in layers or heads only are the same here.
HEADS = sorted({(of.width, of.vocab, of.tied) for of in map(reduced, SHAPES.values())})


@pytest.mark.parametrize(
    "law, dtype", each_by_type(IMPLEMENTATIONS, float32_marks=pytest.mark.slow)
)
@pytest.mark.parametrize("width, vocab, tied", HEADS)
def test_is_the_plain_formula_at_every_shape(law, width, vocab, tied, dtype):
    assert_is_plain(law, *problem(20, width, vocab, tied, dtype), tied)


@pytest.mark.parametrize("law, dtype", each_by_type(IMPLEMENTATIONS))
@pytest.mark.parametrize("rows, width, vocab, tied", [(2, 128, 1000, False), (37, 100, 100, True)])
def test_sizes_that_are_no_multiple(law, rows, width, vocab, tied, dtype):
    """Of a tile, of lanes, of a block; the last token is a target."""
    assert_is_plain(law, *problem(rows, width, vocab, tied, dtype), tied)


@pytest.mark.parametrize("law", each({name: IMPLEMENTATIONS[name] for name in ("tpu", "gpu")}))
@pytest.mark.parametrize("tied", [False, True])
def test_many_passes_and_a_float32_head(law, tied, monkeypatch):
    """Blocks of rows, slices of the vocabulary and what they leave: the head's gradient stays
    float32, over all.
    """
    monkeypatch.setattr(tpu, "ROW_BLOCK_BYTES", 4 * 128 * 16)
    monkeypatch.setattr(gpu, "SLICE_BYTES", 2 * 20 * 256)
    inputs = problem(20, 128, 600, tied, jnp.bfloat16, head_dtype=jnp.float32)
    assert_is_plain(law, *inputs, tied)


# Parts of the vocabulary


@pytest.mark.parametrize(
    "vocab, tied",
    [
        (1032, False),
        pytest.param(1032, True, marks=pytest.mark.slow),
        pytest.param(99, True, marks=pytest.mark.slow),
    ],
)
def test_a_vocabulary_over_devices_changes_nothing(vocab, tied):
    """Of four devices in a row each has 258 tokens, more than two tiles' lanes, or all 99; rows lie
    over two.
    """
    layout = Layout(meshes.make_mesh(2, 1, 4, jax.devices()[:8]), kernels=INTERPRETED)
    inputs = problem(12, 128, vocab, tied, jnp.float32)
    got = value_and_gradients(laid.token_logprobs(layout), *inputs, tied)
    alone = value_and_gradients(IMPLEMENTATIONS["tpu"], *inputs, tied)
    for part, whole, want in zip(got, alone, plain(*inputs, tied), strict=True):
        bound = LIMITS[jnp.dtype(jnp.float32)] * np.abs(want).max()
        np.testing.assert_allclose(part, want, rtol=0, atol=bound)
        np.testing.assert_allclose(part, whole, rtol=0, atol=bound)


def test_sums_of_parts_are_those_of_the_whole():
    """Three parts of scores, of which one has all but nothing of the probability."""
    scores = np.random.default_rng(0).normal(size=(3, 7, 50)) * 3
    targets = np.arange(7) * 20
    scores[1] -= 1e4

    def sums(scores, target):
        mine = (target >= 0) & (target < scores.shape[1])
        chosen = np.where(mine, scores[np.arange(7), np.clip(target, 0, scores.shape[1] - 1)], 0)
        log_p = log_softmax(scores, axis=1)
        entropy = -(np.exp(log_p) * log_p).sum(axis=1)
        return chosen, np.asarray(logsumexp(scores, axis=1)), entropy

    parts = [sums(part, targets - 50 * at) for at, part in enumerate(scores)]
    stacked = Sums(*(jnp.asarray(np.stack(leaf), jnp.float32) for leaf in zip(*parts, strict=True)))
    whole = jax.vmap(functools.partial(combine, axis_name="part"), out_axes=None, axis_name="part")(
        stacked
    )
    for ours, want in zip(whole, sums(np.concatenate(scores, axis=1), targets), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


# Compiled for TPUs

ROWS = 4096


def temporary_bytes(law, chip, shape, gradients):
    """What the compiler allocates beside arguments and results, for bfloat16 hidden and a float32
    head.
    """
    head = (shape.vocab, shape.width) if shape.tied else (shape.width, shape.vocab)
    kinds = (((ROWS, shape.width), jnp.bfloat16), (head, jnp.float32), ((ROWS,), jnp.int32))
    inputs = [jax.ShapeDtypeStruct(*kind, sharding=one(chip)) for kind in kinds]
    of = functools.partial(law, temperature=TEMPERATURE, tied=shape.tied)
    run = (
        jax.grad(lambda *args: sum(part.sum() for part in of(*args)), argnums=(0, 1))
        if gradients
        else of
    )
    memory = jax.jit(run).lower(*inputs).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


OTHER_CHIPS = [(chip, name) for chip in ("v5p", "v6e") for name in SHAPES]


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("chip, name", [*(("v5e", name) for name in SHAPES), *few(OTHER_CHIPS, 1)])
def test_a_tpu_holds_no_logits(chip, name, gradients, uncached):
    shape = SHAPES[name]
    size = temporary_bytes(tpu.token_logprobs, chip, shape, gradients)
    logits = 4 * ROWS * shape.vocab
    print(
        f"{name} on {chip}, gradients {gradients}: {size / 1e6:.1f} MB temporary; logits are"
        f" {logits / 1e6:.1f} MB"
    )
    assert size < logits / 8


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_the_reference_needs_more_memory(gradients, uncached):
    kernel, plain = (
        temporary_bytes(law, "v5p", SHAPES["llama3_8b"], gradients)
        for law in (tpu.token_logprobs, reference.token_logprobs)
    )
    print(
        f"gradients {gradients}: {kernel / 1e6:.1f} MB with the kernel, {plain / 1e6:.1f} MB with"
        " the reference"
    )
    assert plain - kernel > 4 * reference.CHUNK * SHAPES["llama3_8b"].vocab
