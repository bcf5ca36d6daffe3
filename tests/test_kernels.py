"""Kernels in generation: which implementation is chosen and why, and text that is the same with all of them."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from test_generation import assert_equal, decoding, run

from pallas_kernels import dispatch
from pallas_kernels.dispatch import INTERPRETED, REFERENCE, choose
from rlhf_jax import mesh as meshes
from rlhf_jax.collect import decoding_weights
from rlhf_jax.generation.sampling import Sampling
from rlhf_jax.model.transformer import stack

KERNELS = ("tree_attention", "verify_head", "commit")


def asked(how: str) -> dict[str, str]:
    return dict.fromkeys(KERNELS, how)


def test_without_a_measurement_the_reference_runs_and_says_so():
    for platform, device in (("cpu", "cpu"), ("gpu", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v5p")):
        chosen, why = choose(asked("auto"), platform, device, 2)
        assert chosen == REFERENCE
        assert why.keys() == set(KERNELS) and all(line.startswith("reference: ") for line in why.values())
    assert "has not been timed on TPU v5p" in why["verify_head"]


def test_what_was_measured_faster_is_the_default_there(monkeypatch):
    monkeypatch.setitem(dispatch.MEASURED, ("tree_attention", "TPU v5p"), 1.6)
    monkeypatch.setitem(dispatch.MEASURED, ("commit", "TPU v5p"), 0.9)
    chosen, why = choose(asked("auto"), "tpu", "TPU v5p", 2)
    assert (chosen.tree_attention, chosen.verify_head, chosen.commit) == ("tpu", "reference", "reference")
    assert "1.60 times" in why["tree_attention"]


def test_what_is_asked_for_runs_or_is_refused():
    assert choose(asked("pallas"), "tpu", "TPU v6e", 4)[0].commit == "tpu"
    half = dict(tree_attention="pallas", verify_head="pallas", commit="auto")
    assert choose(half, "gpu", "NVIDIA H100 80GB HBM3", 2)[0] == dataclasses.replace(
        REFERENCE, tree_attention="gpu", verify_head="gpu"
    )
    assert choose(asked("interpret"), "cpu", "cpu", 4)[0] == dataclasses.replace(INTERPRETED, logprobs="reference")
    for platform, size, kernel in (("cpu", 4, "tree_attention"), ("gpu", 4, "tree_attention"), ("gpu", 2, "commit")):
        with pytest.raises(ValueError, match=f"kernels.{kernel} is 'pallas', but"):
            choose({kernel: "pallas"}, platform, "", size)


@pytest.fixture(scope="module")
def plain(target):
    return run(target, None, decoding("plain", rows=24, kernels=REFERENCE))


@pytest.mark.parametrize(
    "strategy",
    ["model-tree-2x2x1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "lookup-chain-4"))],
)
def test_text_is_the_same_with_the_kernels(target, drafter, plain, strategy):
    how = decoding(strategy, kernels=INTERPRETED)
    assert_equal(target, run(target, drafter, how), plain, how)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.0), Sampling(0.7, top_k=20)], ids=str)
def test_text_is_the_same_with_the_kernels_on_a_mesh(target, drafter, sampling):
    """Rows over four devices, heads and vocabulary over two: 300 tokens are filled up to two shares of whole blocks."""
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    how = decoding("model-chain-3", rows=8, sampling=sampling, kernels=INTERPRETED)
    plain = run(target, None, decoding("plain", rows=24, sampling=sampling, kernels=REFERENCE))
    policy, student = (decoding_weights(stack(model), jax.numpy.float32, mesh) for model in (target, drafter))
    assert policy.embed.shape[0] == 512
    assert_equal(target, run(policy, student, how, mesh=mesh), plain, how)
