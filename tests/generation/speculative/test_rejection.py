"""Acceptance by rejection: the emitted law is the target's, and its test sees planted biases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import SIGNIFICANCE, expected_law, law_of, p_value

from rlhf_jax.generation.speculative import rejection
from rlhf_jax.generation.speculative.sampling import (
    UNTRUNCATED,
    Sampling,
    noise_bits,
    rank,
    uniform,
)
from rlhf_jax.types import Tree

ranked = jax.jit(rank, static_argnums=(4, 5))
accept = jax.jit(rejection.accept, static_argnums=7)

VOCABULARY = 10
ROWS = 20_000
ROOT = 3
CHAIN = (-1, 0, 1)
TREE = (-1, -1, 0, 0, 1)
WIDE = (-1, -1, -1, -1)
# A first-order language model and a drafter of it: next-token logits by the last token.
_RANDOM = np.random.default_rng(7)
TARGET = jnp.asarray(_RANDOM.normal(size=(VOCABULARY, VOCABULARY)) * 1.5, jnp.float32)
DRAFTER = TARGET + jnp.asarray(_RANDOM.normal(size=(VOCABULARY, VOCABULARY)), jnp.float32)


def tree_of(parents: tuple[int, ...], rows: int, padding: int = 0) -> Tree:
    """A strategy's parents as data, with `padding` empty nodes."""
    nodes = len(parents) + 1
    up = np.zeros(nodes + padding, np.int32)
    depth = np.full(nodes + padding, -1, np.int32)
    up[1:nodes] = np.array(parents) + 1
    depth[0] = 0
    for node in range(1, nodes):
        depth[node] = depth[up[node]] + 1
    ancestors = np.eye(nodes + padding, dtype=bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[up[node]]
    up, depth, ancestors = (
        jnp.asarray(np.repeat(x[None], rows, 0)) for x in (up, depth, ancestors)
    )
    return Tree(parents=up, depth=depth, ancestors=ancestors)


def propose(root, key, position, sampling: Sampling, parents: tuple[int, ...], drafter: str):
    """Draft tokens [B, N+1]: siblings ranked from the drafter's law, or the next tokens up
    (lookup).
    """
    tokens = [root]
    depth = [0]
    ranks = functools.cache(
        lambda node: ranked(
            DRAFTER[tokens[node]], key, position + depth[node], *law_of(sampling), 4
        )
    )
    for node, parent in enumerate(parents):
        order = parents[:node].count(parent)
        depth.append(depth[parent + 1] + 1)
        if drafter == "lookup":
            tokens.append((tokens[parent + 1] + order + 1) % VOCABULARY)
        else:
            tokens.append(ranks(parent + 1)[:, order])
    return jnp.stack(tokens, 1)


def speculate(
    root, key, position, sampling: Sampling, parents: tuple[int, ...], drafter: str, accept=accept
):
    """One round from the token `root[B]`: (drafts, draws, log-probs, last)."""
    tokens = propose(root, key, position, sampling, parents, drafter)
    laws = DRAFTER[tokens] if drafter == "model" else None
    return tokens, *accept(
        tokens, tree_of(parents, len(root)), TARGET[tokens], laws, key, position, *law_of(sampling)
    )


def keys(rows: int) -> tuple[jax.Array, jax.Array]:
    sample = np.stack([np.full(rows, 5), np.arange(rows)], -1)
    return jnp.asarray(sample, jnp.uint32), jnp.asarray(np.arange(rows) % 3, jnp.int32)


def two_tokens(sampling: Sampling, parents: tuple[int, ...], drafter: str) -> np.ndarray:
    """The two tokens [B, 2] after the root, with a second round where the first gave only one."""
    key, position = keys(ROWS)
    # A fresh function each time, so that a planted bias is traced.
    fresh = jax.jit(lambda *inputs: rejection.accept(*inputs), static_argnums=7)
    run = functools.partial(
        speculate, sampling=sampling, parents=parents, drafter=drafter, accept=fresh
    )
    _, draws, _, _ = run(jnp.full(ROWS, ROOT, jnp.int32), key, position)
    level = np.array([parent == -1 for parent in parents])
    first = draws[:, 0]
    second = jnp.max(jnp.where(level, draws[:, 1:], -1), 1)
    _, later, _, _ = run(first, key, position + 1)
    return np.stack([first, jnp.where(second >= 0, second, later[:, 0])], 1)


def p_values(tokens: np.ndarray, sampling: Sampling) -> tuple[float, float]:
    """P-values of the first token and of the pair under the target's law."""
    laws = np.stack([expected_law(row, sampling) for row in TARGET])
    pairs = laws[ROOT][:, None] * laws
    return p_value(tokens[:, 0], laws[ROOT]), p_value(
        tokens[:, 0] * VOCABULARY + tokens[:, 1], pairs.ravel()
    )


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize(
    ("sampling", "parents"),
    [
        (Sampling(), CHAIN),
        (Sampling(), TREE),
        (Sampling(), WIDE),
        pytest.param(Sampling(top_p=0.8), TREE, marks=pytest.mark.slow),
    ],
    ids=["chain", "tree", "wide", "tree, top-p"],
)
def test_emitted_tokens_follow_the_target(sampling, parents, drafter):
    assert min(p_values(two_tokens(sampling, parents, drafter), sampling)) > SIGNIFICANCE


def keep_proposal(walk, token, where, reject=rejection._reject):
    """The rejected sibling stays in the drafter's law."""
    return reject(walk, token, where)._replace(proposal=walk.proposal)


BIASES = {
    "accept always": ("uniform", lambda bits: jnp.zeros(bits.shape, jnp.float32)),
    "residual is the whole law": ("_reject", lambda walk, token, where: walk),
    "rejected sibling stays in q": ("_reject", keep_proposal),
}


@pytest.mark.parametrize(
    ("bias", "drafter"),
    [
        ("accept always", "lookup"),
        ("accept always", "model"),
        ("residual is the whole law", "lookup"),
        ("residual is the whole law", "model"),
        ("rejected sibling stays in q", "model"),
    ],
)
def test_the_test_sees_planted_biases(bias, drafter, monkeypatch):
    monkeypatch.setattr(rejection, *BIASES[bias])
    assert max(p_values(two_tokens(Sampling(), WIDE, drafter), Sampling())) < SIGNIFICANCE


@pytest.mark.parametrize("start", [0, 5])
def test_each_draft_is_decided_by_the_noise_of_its_own_place(start):
    """By a uniform number of the fourth level: a draft at depth d is the token start + d - 1."""
    rows = 512
    key, _ = keys(rows)
    position = jnp.full(rows, start, jnp.int32)
    root = jnp.arange(rows, dtype=jnp.int32) % VOCABULARY
    tokens, _, _, last = speculate(root, key, position, Sampling(), CHAIN, "lookup")
    laws = np.asarray(jax.nn.softmax(TARGET))
    tokens = np.asarray(tokens)
    wanted = np.zeros(rows, int)
    for node in range(1, len(CHAIN) + 1):
        noise = uniform(noise_bits(key, position + node - 1, 4, jnp.int32(node)))
        drawn = np.asarray(noise) < laws[tokens[:, node - 1], tokens[:, node]]
        wanted = np.where((wanted == node - 1) & drawn, node, wanted)
    assert np.asarray(last).tolist() == wanted.tolist() and len(set(wanted.tolist())) > 2


def test_a_single_draft_is_coupled_maximally():
    """It is accepted as often as two laws can agree: sum min(p, q)."""
    key, position = keys(ROWS)
    root = jnp.full(ROWS, ROOT, jnp.int32)
    _, _, _, last = speculate(root, key, position, Sampling(), (-1,), "model")
    p, q = (expected_law(table[ROOT], Sampling()) for table in (TARGET, DRAFTER))
    rate = np.minimum(p, q).sum()
    assert abs(float(jnp.mean(last)) - rate) < 4 * np.sqrt(rate * (1 - rate) / ROWS)


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_paths_are_connected_and_logprobs_are_the_targets(drafter):
    sampling = Sampling(0.8, top_p=0.9)
    (key, position) = keys(200)
    root = jnp.asarray(np.arange(200) % VOCABULARY, jnp.int32)
    round_of = speculate(root, key, position, sampling, TREE, drafter)
    tokens, draws, logprobs, last = (np.asarray(x) for x in round_of)
    laws = np.log(np.maximum([expected_law(row, sampling) for row in TARGET], 1e-30))
    for row in range(200):
        path = []
        node = int(last[row])
        while node:
            path.append(node)
            node = TREE[node - 1] + 1
        path = [0, *reversed(path)]
        assert set(np.flatnonzero(draws[row] >= 0)) == set(path)
        assert [tokens[row, node] for node in path[1:]] == [draws[row, node] for node in path[:-1]]
        for node in path:
            assert abs(logprobs[row, node] - laws[tokens[row, node], draws[row, node]]) < 1e-4
        assert (logprobs[row][draws[row] < 0] == 0).all()
    assert (np.bincount(last, minlength=6)[[0, 1, 3]] > 0).all()


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_temperature_zero_gives_the_greedy_text(drafter):
    sampling = Sampling(0.0)
    (key, position) = keys(VOCABULARY)
    root = jnp.arange(VOCABULARY, dtype=jnp.int32)
    tokens, draws, logprobs, last = speculate(root, key, position, sampling, TREE, drafter)
    best = np.argmax(TARGET, -1)
    on_path = np.asarray(draws) >= 0
    np.testing.assert_array_equal(np.asarray(draws)[on_path], best[np.asarray(tokens)][on_path])
    # A draft that is the greedy token is accepted, whatever its rank.
    hit = (np.asarray(tokens)[:, 1:3] == best[:, None]).any(1)
    np.testing.assert_array_equal(np.asarray(last) > 0, hit)
    assert hit.any() and not np.asarray(logprobs).any()


def test_missing_drafts_and_padding_change_nothing():
    """Rows with no draft draw plainly; padded nodes are never visited; a row's trees are its
    own.
    """
    key, position = keys(32)
    tokens = propose(jnp.full(32, ROOT, jnp.int32), key, position, Sampling(), TREE, "model")
    tree = tree_of(TREE, 32)
    run = functools.partial(accept, temperature=1.0, truncation=UNTRUNCATED)
    draws, logprobs, last = run(tokens, tree, TARGET[tokens], DRAFTER[tokens], key, position)
    padded = jnp.pad(tokens, ((0, 0), (0, 3)), constant_values=2)
    wider = run(
        padded, tree_of(TREE, 32, padding=3), TARGET[padded], DRAFTER[padded], key, position
    )
    np.testing.assert_array_equal(wider[0][:, :6], draws)
    np.testing.assert_array_equal(wider[1][:, :6], logprobs)
    np.testing.assert_array_equal(wider[2], last)
    absent = tokens.at[::2, 1:].set(-1)
    mixed = run(absent, tree, TARGET[absent], DRAFTER[absent], key, position)
    assert not np.asarray(mixed[2])[::2].any() and (np.asarray(mixed[0])[::2, 1:] == -1).all()
    np.testing.assert_array_equal(mixed[0][1::2], draws[1::2])


def test_a_sharp_drafter_rejects_in_logs():
    """The second sibling's law underflows beside the first's, and is still exact."""
    drafter = jnp.asarray([[120.0, 0.0, 0.5, -1.0]])
    target = jnp.asarray([[-1.0, 0.5, 0.0, 0.2]])
    key, position = keys(ROWS)
    laws, logits = (jnp.broadcast_to(x, (ROWS, 4)) for x in (drafter, target))
    drafts = ranked(laws, key, position, 1.0, UNTRUNCATED, 2)
    tokens = jnp.concatenate([jnp.zeros((ROWS, 1), jnp.int32), drafts], 1)
    spread = (jnp.broadcast_to(x[:, None], (ROWS, 3, 4)) for x in (logits, laws))
    draws, _, last = accept(
        tokens, tree_of((-1, -1), ROWS), *spread, key, position, 1.0, UNTRUNCATED
    )
    assert p_value(np.asarray(draws[:, 0]), expected_law(target[0], Sampling())) > SIGNIFICANCE
    assert float(jnp.mean(last == 2)) > 0.5


def test_where_nothing_is_left_of_a_law_it_stays_a_law():
    """Of the target by rounding, as the drafter's is a little above it at each token; of the
    drafter's once its only token is rejected.
    """
    target = jnp.asarray([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    proposal = jnp.log(jnp.asarray([[0.250001, 0.750001], [0.75, 0.25], [1.0, 0.0]]))
    zeros = jnp.zeros((3, 1), jnp.int32)
    logprobs = jnp.zeros((3, 1))
    walk = rejection._Walk(zeros[:, 0], jnp.log(target), target, proposal, zeros, logprobs)
    left = rejection._reject(walk, jnp.array([1, 0, 0]), jnp.ones(3, bool))
    np.testing.assert_allclose(left.residual, [[0.25, 0.75], [0.0, 1.0], [0.0, 1.0]])
    assert left.proposal is not None
    np.testing.assert_allclose(jnp.exp(left.proposal), [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
