"""Packed rounds: which drafts are kept, where they stand, what is expected of them, and what is
learnt.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.budget import (
    allocate_budget,
    expected_gains,
    pack,
    packed_tokens,
    rank_drafts,
)
from rlhf_jax.generation.speculative.results import observe_drafts
from rlhf_jax.generation.strategy import candidates, cost, predict, roofline
from rlhf_jax.generation.strategy.acceptance import CLASSES, DEPTHS
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh, place_rows
from rlhf_jax.types import Emission

GAINS = expected_gains(np.array([[0.5] * DEPTHS, [0.2] * DEPTHS, [0.6] * DEPTHS, [0.9] * DEPTHS]))
ROWS = 8
LENGTH = 8


def crowd(seed: int = 0):
    """(lengths, limits, done, drafts, classes) of rows of all kinds."""
    luck = np.random.default_rng(seed)
    length = luck.integers(5, 20, ROWS)
    limit = length + luck.integers(1, 12, ROWS)
    drafts = luck.integers(0, 50, (ROWS, LENGTH))
    known = luck.integers(0, LENGTH + 1, ROWS)
    drafts[np.arange(LENGTH) >= known[:, None]] = -1
    return (
        length,
        limit,
        luck.random(ROWS) < 0.2,
        drafts,
        np.where(known, luck.integers(1, CLASSES, ROWS), 0),
    )


def state_of(length, limit, done) -> DecodeState:
    rows = len(length)
    nothing = jnp.zeros((rows, 0), jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((rows, 32), jnp.int32),
        length=jnp.array(length, jnp.int32),
        limit=jnp.array(limit, jnp.int32),
        done=jnp.array(done, bool),
        key=jnp.zeros((rows, 2), jnp.uint32),
        temperature=jnp.ones((rows,), jnp.float32),
        cache=ContiguousCache(()),
        history=nothing,
        earlier=nothing,
        draft=None,
    )


def worthiest(length, limit, done, drafts, classes, nodes: int) -> np.ndarray:
    """[B] drafts that each row keeps: one by one, the worthiest of those that come next."""
    kept = np.zeros(len(length), int)
    budget = nodes * len(length) - int((~done).sum())
    usable = [
        0 if done[i] else min((drafts[i] >= 0).sum(), limit[i] - length[i] - 1)
        for i in range(len(length))
    ]
    while budget > 0:
        offers = [
            (-GAINS[classes[i], kept[i]], i) for i in range(len(length)) if kept[i] < usable[i]
        ]
        if not offers:
            break
        kept[min(offers)[1]] += 1
        budget -= 1
    return kept


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_worthiest_drafts_are_kept(seed, nodes):
    length, limit, done, drafts, classes = crowd(seed)
    place = jnp.asarray
    found, spent = allocate_budget(
        state_of(length, limit, done),
        place(drafts),
        place(classes, jnp.int8),
        GAINS,
        nodes=nodes,
        layout=ONE_DEVICE,
    )
    kept = (np.array(found) >= 0).sum(axis=1)
    wanted = worthiest(length, limit, done, drafts, classes, nodes)
    assert sorted(
        -GAINS[c, d] for c, k in zip(classes, kept, strict=True) for d in range(k)
    ) == sorted(-GAINS[c, d] for c, k in zip(classes, wanted, strict=True) for d in range(k))
    np.testing.assert_array_equal(found, np.where(np.arange(LENGTH) < kept[:, None], drafts, -1))
    np.testing.assert_array_equal(spent.drafts, kept)
    np.testing.assert_array_equal(spent.short, kept < (drafts >= 0).sum(axis=1))
    assert kept.sum() + (~done).sum() <= nodes * ROWS


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_packed_is_found_again_and_nothing_crosses_devices(devices):
    layout = Layout(make_mesh(1, devices, 1, jax.devices()[:devices]))
    luck = np.random.default_rng(1)
    verified = np.zeros((ROWS, 5), bool)
    for part in np.split(np.arange(ROWS), devices):
        verified[part, 0] = True
        rest = [(row, node) for row in part for node in range(1, 5)]
        for row, node in luck.permutation(rest)[: 2 * len(part)]:
            verified[row, node] = True
    grid = luck.normal(size=(ROWS, 5, 3)).astype(np.float32)

    @jax.jit
    def there_and_back(verified, grid):
        packing = pack(verified, 3, layout)
        return packing.unpack(packing.pack(grid))

    laid = place_rows((jnp.array(verified), jnp.array(grid)), layout)
    np.testing.assert_array_equal(np.array(there_and_back(*laid))[verified], grid[verified])
    assert not re.search("all-|collective", str(there_and_back.lower(*laid).compile().as_text()))


@pytest.mark.parametrize("nodes", [1, 2, 3, 9])
def test_as_many_are_expected_as_the_kept_ones_are_worth(nodes):
    """On two devices of 16 rows each, of which one is half empty."""
    counts = np.array([[3, 2, 1, 2], [6, 4, 2, 4]])
    gained = packed_tokens(rank_drafts(GAINS[:, :LENGTH]), counts, 32, np.array([nodes]), 1.0)[:, 0]
    kept = 0.0
    for own in counts:
        offers = sorted(
            -GAINS[c, d] for c in np.repeat(np.arange(CLASSES), own) for d in range(LENGTH)
        )
        kept -= sum(offers[: nodes * 16 - own.sum()])
    assert counts.sum(axis=0) @ gained == pytest.approx(counts.sum() + kept, rel=1e-5)


def test_drafts_that_were_left_out_say_nothing():
    """Three rows follow a chain of four as far as they may: 4, 2 and 0 drafts."""
    strategy = trees.parse("replay-chain-4-packed-3")
    allowed = np.array([4, 2, 0])
    path = np.minimum(np.arange(5), allowed[:, None])
    emission = Emission(
        tokens=np.zeros((3, 5), int),
        logprobs=np.zeros((3, 5)),
        top_k_ids=None,
        count=allowed + 1,
        accepted=allowed,
        path=path,
        done=np.zeros(3, bool),
    )
    said = observe_drafts(
        strategy, emission, np.full(3, 3), np.ones(3, bool), allowed, band=np.zeros(3, int)
    )
    assert (said.offered > 0).sum(axis=1).tolist() == [4, 2, 0]
    assert (said.ranks[said.offered > 0] == 0).all()


def test_a_sample_that_ends_at_its_limit_is_no_miss():
    """Every draft is right; the last token of a row needs none, and is left out."""
    length = np.array([6, 9])
    limit = np.array([9, 20])
    state = state_of(length, limit, np.zeros(2, bool))
    drafts = jnp.ones((2, LENGTH), jnp.int32)
    _, spent = allocate_budget(
        state, drafts, jnp.full(2, 3, jnp.int8), GAINS, nodes=8, layout=ONE_DEVICE
    )
    assert spent.drafts.tolist() == [2, LENGTH] and spent.short.tolist() == [True, False]


def test_expectations_hang_on_shares_and_stay_possible():
    """Classes that are sums over rounds say what one round says; no round gains more than it
    verifies.
    """
    choices = candidates.adaptive(["replay"], 8)
    machine = roofline.Machine(roofline.Roofline(*[1e-3] * 6), None, 1e-4)
    chooser = Selector(choices, cost.Costs(machine, machine))
    chooser.acceptance["replay"] = dataclasses.replace(
        chooser.acceptance["replay"], realised=np.full((3, 2), [9, 1.0])
    )
    chooser.expectations = predict.expect(choices, chooser.acceptance)
    counts = np.array([[0] * 4, [0, 16, 0, 16]])
    at = Situation(32, 32, 6400.0, 0, {"replay": counts}, lambda _: True)
    summed = dataclasses.replace(at, classes={"replay": 100 * counts})
    assert chooser.table(summed) == chooser.table(at)
    following = dataclasses.replace(at, classes={"replay": np.array([[0] * 4, [0, 0, 0, 32]])})
    for row in chooser.table(following):
        if "packed" in row["strategy"]:
            assert row["tokens_per_row"] <= int(row["strategy"].rpartition("-")[2]) + 1e-9


REFUSED = (
    "model-chain-8-packed-3",
    "lookup-chain-8-packed-3",
    "replay-tree-2x2-packed-3",
    "replay-chain-8-packed-9",
)


@pytest.mark.parametrize("name", [*REFUSED, "replay-chain-3-packed-4", "replay-chain-8-packed-1"])
def test_what_cannot_be_packed_is_refused(name):
    with pytest.raises(ValueError, match="packs nothing"):
        trees.parse(name)
    assert trees.name_of(trees.parse("replay-chain-8-packed-3")) == "replay-chain-8-packed-3"
