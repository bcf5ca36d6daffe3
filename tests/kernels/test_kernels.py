"""Kernels in generation: which implementation is chosen and why, and text that is the same with all
of them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import assert_equal, decoding, run
from jax.sharding import PartitionSpec

from benchmarks import kernels
from benchmarks.shapes import SHAPES
from pallas_kernels import dispatch, measured
from pallas_kernels.arrays import check_ranks
from pallas_kernels.dispatch import INTERPRETED, REFERENCE, Kernels, choose
from rlhf_jax import mesh as meshes
from rlhf_jax.cache.cache import Window
from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.speculative.sampling import Sampling, block_noise, draw, draw_inside
from rlhf_jax.inference.logprobs import logprobs_and_entropy
from rlhf_jax.mesh import Layout
from rlhf_jax.models import kernels as laid
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init, logits, stack, unstack
from rlhf_jax.types import ModelConfig

KERNELS = tuple(dispatch.FUNCTIONS)
MODELS = list(SHAPES.values())


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str | None = None


CPU = Device("cpu", "cpu")
V5P = Device("tpu", "TPU v5p")
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0")
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0")


def test_the_package_imports_jax_and_the_standard_library_only():
    package = pathlib.Path(dispatch.__file__).parent
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    files = sorted(package.rglob("*.py"))
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= allowed, file


def test_ranks_are_checked_at_every_door():
    with pytest.raises(AssertionError, match=r"Input 1 has rank 1 \(shape \(3,\)\), but rank 2"):
        check_ranks([np.zeros((2, 2)), np.zeros(3)], [2, 2])


def asked(how: str) -> dict[str, str]:
    return dict.fromkeys(KERNELS, how)


def test_without_a_measurement_the_reference_runs_and_says_so():
    chosen, why = choose(asked("auto"), CPU, 4, MODELS)
    assert chosen == Kernels(tree_attention="cpu") and not chosen.tiled
    assert why["tree_attention"].startswith("cpu: of a long cache")
    for device in (H100, V5P):
        chosen, why = choose(asked("auto"), device, 2, MODELS)
        assert chosen == REFERENCE
        assert why.keys() == set(KERNELS) and all(
            line.startswith("plain JAX: ") for line in why.values()
        )
    assert "has not been timed on TPU v5p" in why["verify_head"]


def test_what_was_measured_faster_is_the_default_there(monkeypatch):
    """In three cases of four: a kernel whose median alone is above 1 is left out."""
    rows = [
        measured.summarise(kernel, "TPU v5p", ratios, jax="0.11.2", date="2026-11-26")
        for kernel, ratios in (("tree_attention", [1.6] * 8), ("commit", [0.9] * 3 + [1.2] * 5))
    ]
    assert rows[1] and rows[1].median == 1.2 and rows[1].least == rows[1].ratio == 0.9
    table = {(row.kernel, row.device_kind): row for row in rows if row}
    monkeypatch.setattr(measured, "table", lambda: table)
    chosen, why = choose(asked("auto"), V5P, 2, MODELS)
    assert (chosen.tree_attention, chosen.verify_head, chosen.commit) == (
        "tpu",
        "reference",
        "reference",
    )
    assert "1.60 times" in why["tree_attention"]


def test_measurements_are_read_as_they_were_written(tmp_path):
    assert (
        measured.summarise("commit", "TPU v5p", [2.0] * 7, jax="0.11.2", date="2026-11-26") is None
    )
    row = measured.summarise("commit", "TPU v5p", [2.0] * 8, jax="0.11.2", date="2026-11-26")
    assert row is not None
    path = tmp_path / "measured.json"
    path.write_text(measured.as_text({("commit", "TPU v5p"): row}))
    assert measured.read(path) == {("commit", "TPU v5p"): row}
    assert measured.table() == measured.read(measured.PATH)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"ratio": 0.0}, "above 0"),
        ({"ratio": "fast"}, "no float"),
        ({"cases": True}, "no int"),
        ({"kernel": 1}, "no str"),
        ({"speed": 1.0}, "its keys are kernel"),
        (None, "two measurements"),
    ],
)
def test_a_broken_measurement_is_named(tmp_path, change, said):
    row = measured.summarise("commit", "TPU v5p", [2.0] * 8, jax="0.11.2", date="2026-11-26")
    assert row is not None
    rows = [dataclasses.asdict(row)] * 2 if change is None else [dataclasses.asdict(row) | change]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=said):
        measured.read(path)


def test_what_is_asked_for_runs_or_is_refused():
    assert choose(asked("pallas"), V5P, 4, MODELS)[0].commit == "tpu"
    some = dict(tree_attention="pallas", verify_head="pallas", logprobs="pallas", commit="auto")
    assert choose(some, H100, 2, MODELS)[0] == dataclasses.replace(
        Kernels(*["gpu"] * 4), commit="reference"
    )
    assert choose({"commit": "pallas"}, H100, 4, MODELS)[0].commit == "gpu"
    assert choose(asked("interpret"), CPU, 4, MODELS)[0] == INTERPRETED
    for device, size, kernel in (
        (CPU, 4, "tree_attention"),
        (H100, 4, "tree_attention"),
        (H100, 4, "logprobs"),
        (A100, 2, "commit"),
    ):
        with pytest.raises(ValueError, match=f"kernels.{kernel} is 'pallas', but"):
            choose({kernel: "pallas"}, device, size, MODELS)


@pytest.mark.parametrize(
    "kernel, change",
    [
        ("tree_attention", {"dim": 80}),
        ("commit", {"dim": 80}),
        ("verify_head", {"vocab": 128257}),
        ("verify_head", {"width": 96}),
    ],
)
def test_a_model_that_fits_no_tile_of_a_gpu_is_told(kernel, change):
    odd = dataclasses.replace(SHAPES["llama3_8b"], **change)
    chosen, why = choose({kernel: "auto"}, H100, 2, [odd])
    assert chosen == REFERENCE and str(*change.values()) in why[kernel]


@pytest.fixture(scope="module")
def plain(target):
    return run(target, None, decoding("plain", max_rows=24), layout=Layout(kernels=REFERENCE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [pytest.param("plain", marks=pytest.mark.long), "lookup-chain-4", "model-tree-2x2x1"],
)
def test_text_is_the_same_with_the_kernels(target, drafter, plain, strategy):
    how = decoding(strategy)
    found = run(target, drafter, how, layout=Layout(kernels=INTERPRETED))
    assert_equal(target, found, plain, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        *(
            pytest.param(law, marks=pytest.mark.long)
            for law in (Sampling(0.0), Sampling(0.7, top_k=20))
        ),
    ],
    ids=str,
)
def test_text_is_the_same_with_the_kernels_on_a_mesh(target, drafter, sampling):
    """Rows over four devices, heads and vocabulary over two: 300 tokens are filled up to two shares
    of whole blocks.
    """
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    layout = Layout(mesh, "generation", INTERPRETED)
    how = decoding("model-chain-3", max_rows=8, sampling=sampling)
    alone = Layout(kernels=REFERENCE)
    plain = run(target, None, decoding("plain", max_rows=24, sampling=sampling), layout=alone)
    policy, student = (decoding_weights(stack(model), layout) for model in (target, drafter))
    assert policy.embed.shape[0] == 512
    assert_equal(target, run(policy, student, how, layout=layout), plain, how)


@pytest.mark.long
def test_the_benchmark_times_what_there_is_and_says_what_is_not():
    asked = "--shapes smollm2_135m --rows 1 --nodes 3 --slots 128 --dtype float32 --repeats 1"
    cases = list(kernels.measure(kernels.arguments(asked.split())))
    assert [case["kernel"] for case in cases] == list(kernels.PROBLEMS)
    for case in cases:
        assert case["seconds"].keys() == {"reference"} and case["seconds"]["reference"] > 0
        assert case["ratio"] is case["floor_seconds"] is case["of_floor"] is None
        assert "no kernel of its own for a cpu" in case["why"]


def test_the_floor_is_the_longer_of_reading_and_multiplying():
    problem = kernels.Problem((), {}, bytes=3350e9, flops=2 * 989e12)
    assert kernels.floor(problem, "NVIDIA H100 80GB HBM3") == 2.0
    assert kernels.floor(problem._replace(flops=0.0), "NVIDIA H100 80GB HBM3") == 1.0
    assert kernels.floor(problem, "cpu") is None


@pytest.mark.slow
def test_a_vocabulary_that_is_filled_up_by_a_block_gives_the_same_draws():
    """600 tokens are three blocks, and two shares of whole blocks are four."""
    mesh = meshes.make_mesh(2, 1, 2, jax.devices()[:4])
    model = unstack(init(jax.random.key(0), ModelConfig("llama", 600, 32, 48, 1, 4, 2, 8, 128)))
    hidden = jax.random.normal(jax.random.key(1), (4, 3, 32))
    key = jnp.arange(24, dtype=jnp.uint32).reshape(4, 3, 2)
    position = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    layout = Layout(mesh, "generation", REFERENCE)
    padded = decoding_weights(stack(model), layout)
    noise = block_noise(key, position, len(padded.embed))
    assert noise.shape[-1] == 4
    temperature = jnp.array([0.8, 1.0, 0.0, 1.3])[:, None] * jnp.ones((4, 3))
    found = jax.jit(laid.verify_head(layout))(padded, hidden, noise, temperature)
    ours = draw_inside(found, key, position, temperature)
    theirs = draw(logits(model, hidden), key, position, temperature)
    np.testing.assert_array_equal(ours.token, theirs.token)
    np.testing.assert_allclose(ours.logprob, theirs.logprob, atol=1e-5)


def test_each_device_commits_its_own_rows_and_heads():
    layout = Layout(meshes.make_mesh(2, 1, 2, jax.devices()[:4]), kernels=INTERPRETED)
    random = np.random.default_rng(0)

    def leaves(slots: int) -> Any:
        sizes = (4, 2, 16, slots), (4, 2, slots, 16)
        return tuple(
            tuple(random.normal(size=size).astype(np.float32) for size in sizes) for _ in range(2)
        )

    cache = ContiguousCache(leaves(128))
    window = Window(leaves(3))
    path = random.integers(0, 3, (4, 3)).astype(np.int32)
    start = np.array([0, 7, 100, 125], np.int32)
    given = meshes.place_rows((cache, window, path, start), layout)
    written = jax.jit(functools.partial(ContiguousCache.commit, layout=layout))(*given)
    spec = written.layers[0][0].sharding.spec
    assert spec == PartitionSpec(meshes.ROW_AXES, "tensor", None, None)
    jax.tree.map(
        np.testing.assert_array_equal,
        written,
        ContiguousCache.commit(*given, layout=Layout(kernels=REFERENCE)),
    )


@pytest.mark.parametrize(
    "sizes, vocabulary, tied",
    [
        (None, 300, False),
        pytest.param((1, 1, 8), 304, False, marks=pytest.mark.slow),  # 38 tokens a device
        # which eight do not divide: it stays whole
        pytest.param((1, 1, 8), 300, False, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 300, False, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 300, True, marks=pytest.mark.slow),
    ],
)
def test_log_probs_and_their_gradients_are_the_same_with_the_kernel(sizes, vocabulary, tied):
    """By autodiff of the plain path on one device, with rows and vocabulary over the devices of a
    mesh.
    """
    mesh = meshes.make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]) if sizes else None
    layout = Layout(mesh, kernels=INTERPRETED)
    alone = Layout(kernels=REFERENCE)
    assert laid.token_logprobs(layout) and laid.token_logprobs(alone) is None
    model = init(
        jax.random.key(0), ModelConfig("llama", vocabulary, 64, 96, 1, 4, 2, 16, 128, tied=tied)
    )
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocabulary, (4, 33)).astype(np.int32)
    mask = random.random((4, 33)) < 0.6
    weights = random.normal(size=(2, 4, 33)).astype(np.float32)

    def weighed(model, layout):
        said = logprobs_and_entropy(
            model, tokens, temperature=0.7, entropy=True, mask=mask, layout=layout
        )
        return sum((part * weight).sum() for part, weight in zip(said, weights, strict=True)), said

    given = jax.jit(jax.value_and_grad(weighed, has_aux=True), static_argnums=1)
    placed = jax.device_put(model, model_shardings(model, layout)) if mesh else model
    (_, said), gradient = given(placed, layout)
    (_, wanted), theirs = given(model, alone)
    for ours, other in zip(
        jax.tree.leaves((said, gradient)), jax.tree.leaves((wanted, theirs)), strict=True
    ):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-4)
