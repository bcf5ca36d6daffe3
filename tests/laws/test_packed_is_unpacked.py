"""Packed samples: each token is there once, and what is computed of it is that of its sample alone,
whatever else is in the line.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import SLOTS, grouped

from rlhf_jax.algorithms.grpo import POLICY_LOSS, GRPOOptions
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.inference.logprobs import CHUNK, head_logprobs, token_logprobs
from rlhf_jax.inference.scoring import ScoringSettings, score, score_packed, score_sequences
from rlhf_jax.losses.aggregate import token_mean_weights
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh, place_rows
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training.settings import TrainingSettings


@pytest.mark.parametrize("top_k", [False, True])
def test_scores_are_those_of_each_sample_by_itself(tiny, top_k):
    model = init(jax.random.key(0), tiny)
    batch = grouped(tiny.vocab_size, top_k=top_k)
    found = score_sequences(model, batch, temperature=0.7, rows=12)
    top_k_ids = batch.columns.get("top_k_ids")
    alone = token_logprobs(
        model, batch.tokens, temperature=0.7, mask=batch.mask, top_k_ids=top_k_ids
    )
    np.testing.assert_allclose(found, alone, atol=1e-4, rtol=0)


def test_what_others_say_between_answers_is_read(tiny):
    """Masks with holes, as of chats of several turns."""
    model = init(jax.random.key(0), tiny)
    batch = grouped(tiny.vocab_size)
    mask = batch.mask & (np.arange(SLOTS) % 3 > 0)
    assert (np.diff(mask.astype(int), axis=1) == 1).sum(axis=1).max() > 2
    holed = dataclasses.replace(batch, mask=mask)
    found = score_sequences(model, holed, temperature=1.0, rows=12)
    alone = token_logprobs(model, batch.tokens, temperature=1.0, mask=mask)
    np.testing.assert_allclose(found, alone, atol=1e-4, rtol=0)


def experience_of(model, batch: Sequences) -> Sequences:
    """Old and reference log-probs near the model's, and an advantage for each sample."""
    random = np.random.default_rng(1)
    mask = np.array(batch.mask)
    mask[2] = False  # dropped
    said = np.asarray(token_logprobs(model, batch.tokens, temperature=1.0, mask=batch.mask))
    old, reference = (
        np.where(mask, said + random.normal(scale=0.1, size=mask.shape), np.nan) for _ in range(2)
    )
    advantages, values, returns = (
        np.where(mask, random.normal(size=mask.shape), np.nan).astype(np.float32) for _ in range(3)
    )
    return dataclasses.replace(batch, mask=mask).with_columns(
        logprobs=old.astype(np.float32),
        reference_logprobs=reference.astype(np.float32),
        rewards=np.zeros(len(mask), np.float32),
        advantages=advantages,
        values=values,
        returns=returns,
    )


def add(one, other):
    """The sum of two trees."""
    return jax.tree.map(np.add, one, other)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (None, "policy"),
        ((2, 2, 2), "top_k"),
        (None, "gspo"),
        pytest.param((2, 2, 2), "gspo", marks=pytest.mark.slow),
        pytest.param((1, 4, 1), "policy", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "critic", marks=pytest.mark.slow),
        *(
            pytest.param(shape, kind, marks=pytest.mark.long)
            for shape, kind in (
                (None, "top_k"),
                (None, "critic"),
                ((1, 4, 1), "top_k"),
                ((1, 4, 1), "critic"),
                ((2, 2, 2), "policy"),
            )
        ),
    ],
)
def test_loss_and_gradient_are_those_of_single_samples(tiny, shape, kind):
    """With NaN behind every padding, on one device and with rows, width and vocabulary split."""
    top_k = kind == "top_k"
    given = CRITIC_LOSS if kind == "critic" else POLICY_LOSS
    policy = init(jax.random.key(0), tiny)
    model = init(jax.random.key(0), dataclasses.replace(tiny, scalar_head=True, tied=False))
    model = model if kind == "critic" else policy
    experience = experience_of(policy, grouped(tiny.vocab_size, top_k=top_k))
    weights = token_mean_weights(np.asarray(experience.mask), 1)

    def share(model, batch, settings):
        hidden = read_packed(model, batch, settings.layout, settings.remat)
        return given(model, hidden, batch, settings)

    gradient = jax.jit(jax.value_and_grad(share, has_aux=True), static_argnums=2)

    def differentiate(experience, weights, layout, block):
        options = GRPOOptions(loss="gspo" if kind == "gspo" else "ppo")
        settings = TrainingSettings(layout=layout, remat=False, chunk=16, options=options)
        whole = model
        if layout.mesh is not None:
            whole = jax.device_put(model, model_shardings(model, layout))
        told = []
        known = with_shares(experience.with_columns(kl_weight=np.array(0.1, np.float32)), weights)
        for part in pack(known, Extent(4), block, layout.row_shards):
            batch = place_rows(part.batch, layout)
            (loss, _), slope = gradient(whole, batch, settings)
            told.append(jax.device_get((loss, slope)))
        return functools.reduce(add, told)

    layout = Layout(shape and make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]))
    loss, slope = differentiate(experience, weights, layout, block=4)
    rows = np.flatnonzero(np.asarray(experience.mask).any(axis=1))
    singles = [experience.take(np.array([row])) for row in rows]
    by_row = zip(singles, weights[rows], strict=True)
    alone = functools.reduce(
        add, [differentiate(one, weight[None], Layout(), SLOTS) for one, weight in by_row]
    )
    mean = np.abs(np.asarray(alone[0]))
    assert abs(loss - alone[0]) <= 1e-5 * max(1.0, mean)
    pairs = list(zip(jax.tree.leaves(slope), jax.tree.leaves(alone[1]), strict=True))
    apart = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in pairs))
    assert apart <= 1e-5 * np.sqrt(sum(np.sum(other**2) for _, other in pairs))


def test_entropy_of_packed_samples_is_asked_for(tiny):
    model = init(jax.random.key(0), tiny)
    part = pack(grouped(tiny.vocab_size).reading(), Extent(12), 4, 1)[0]
    hidden = read_packed(model, part.batch, ONE_DEVICE)
    given = (model, hidden, part.batch.targets, part.batch.mask)
    read = functools.partial(
        head_logprobs, *given, top_k_ids=None, temperature=1.0, chunk=CHUNK, layout=ONE_DEVICE
    )
    said, entropy = read(entropy=True)
    assert entropy is not None and bool(jnp.all(jnp.where(part.batch.mask, entropy > 0, True)))
    np.testing.assert_array_equal(read(entropy=False)[0], said)
    other = dataclasses.replace(part.batch, tokens=np.where(part.batch.tokens, 7, 0))
    assert not np.allclose(said, score_packed(model, other, temperature=1.0))


def test_nothing_is_said_where_no_model_reads(tiny):
    """As in GRPO without KL, whose update finds the old log-probs itself: zeros would be taken."""
    policy = init(jax.random.key(0), tiny)
    batch = grouped(tiny.vocab_size)
    settings = ScoringSettings({}, 1.0, Extent(12))
    assert score(batch, {}, settings)[0].columns.keys() == batch.columns.keys()
    nothing = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    settings = dataclasses.replace(settings, layouts={"reference": Layout()})
    said, _ = score(nothing, {"reference": policy}, settings)
    assert said.columns.keys() == {*batch.columns, "reference_logprobs"}
    assert not said.columns["reference_logprobs"].any()
