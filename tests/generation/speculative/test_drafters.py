"""Drafters find what plain Python finds, look back without hindsight, and one pass over a text
foretells rounds.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.cache.contiguous import ContiguousCache
from rlhf_jax.cache.state import DecodeState, DraftState
from rlhf_jax.generation.speculative import protocol
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.drafters import replay, search, teacher
from rlhf_jax.generation.speculative.drafters.hindsight import look_back
from rlhf_jax.generation.speculative.drafters.lookup import LOOKUP
from rlhf_jax.generation.speculative.drafters.model import MODEL
from rlhf_jax.generation.speculative.drafters.replay import REPLAY
from rlhf_jax.generation.speculative.drafters.search import SearchDrafter, propose
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED, Sampling
from rlhf_jax.generation.strategy.acceptance import DEPTHS, RANKS
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh, pin_rows, place_rows, row_shardings
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.types import Strategy

SLOTS = 48
NOBODY = np.full((1, 0), -1, np.int32)
SEARCHERS = (LOOKUP, REPLAY)


def texts_state(
    texts: list[list[int]], histories: list[list[int]], earlier: list[list[int]] | None
) -> DecodeState:
    """A state that knows texts only: models and caches are not asked."""

    def padded(rows: list[list[int]], fill: int, size: int) -> jax.Array:
        return jnp.array([row + [fill] * (size - len(row)) for row in rows], jnp.int32).reshape(
            len(rows), size
        )

    rows = len(texts)
    return DecodeState(
        tokens=padded(texts, 0, SLOTS),
        length=jnp.array([len(text) for text in texts], jnp.int32),
        limit=jnp.full((rows,), SLOTS, jnp.int32),
        done=jnp.zeros((rows,), bool),
        key=jnp.zeros((rows, 2), jnp.uint32),
        temperature=jnp.ones((rows,), jnp.float32),
        history=padded(histories, -1, max(map(len, histories))),
        earlier=jnp.zeros((rows, 0), jnp.int32) if earlier is None else padded(earlier, -1, SLOTS),
        cache=ContiguousCache(()),
        draft=None,
    )


def chain(drafter: str, length: int) -> Strategy:
    return Strategy(trees.chain(length), drafter)


# The same in plain Python: slow, from the definitions.


def agreement(corpus: list[int], place: int, text: list[int]) -> int:
    """Tokens up to and including `place` that equal the text's end, at most LONGEST."""
    pairs = zip(reversed(corpus[: place + 1]), reversed(text), strict=False)
    return len(
        list(
            itertools.takewhile(
                lambda pair: pair[0] == pair[1], itertools.islice(pairs, search.LONGEST_MATCH)
            )
        )
    )


def until_unknown(tokens: list[int], depth: int) -> list[int]:
    known = list(itertools.takewhile(lambda token: token >= 0, tokens))[:depth]
    return known + [-1] * (depth - len(known))


def slow_lookup(text: list[int], history: list[int], others: list[list[int]], depth: int):
    """(class, continuations, best first) of lookup in history, siblings' texts and the text
    itself.
    """
    corpus = [*history, *itertools.chain(*([-1, *other] for other in others)), -1]
    own = len(corpus)
    corpus = [*corpus, *text]
    places = [place for place in range(len(corpus) - 1) if corpus[place + 1] >= 0]
    ranked = sorted(((agreement(corpus, place, text), place) for place in places), reverse=True)
    ranked = [(length, place) for length, place in ranked[:RANKS] if length]
    found = []
    for _, place in ranked:
        after = corpus[place + 1 :]
        found.append(until_unknown(after if place < own else after * depth, depth))
    longest = ranked[0][0] if ranked else 0
    return sum(longest >= edge for edge in (1, 2, 4)), found


def slow_replay(text: list[int], earlier: list[int], depth: int):
    """(class, continuations, best first) of replay in the earlier text."""
    here = len(text) - 1
    lengths = {
        p: agreement(earlier, p, text) for p in range(len(earlier) - 1) if earlier[p + 1] >= 0
    }
    follows = lengths.get(here, 0) >= min(replay.ALIGNED, len(text))
    ranked = [
        (
            (99 if follows else max(length, 1)) if place == here else length,
            -abs(place - here),
            place,
        )
        for place, length in lengths.items()
        if place == here or length >= replay.REALIGNED
    ]
    ranked = sorted(ranked, reverse=True)[:RANKS]
    found = [until_unknown(earlier[place + 1 :], depth) for _, _, place in ranked]
    kind = 0 if not ranked else 2 if ranked[0][2] != here else 3 if follows else 1
    return kind, found


def options(found: list[list[int]], prefix: list[int]) -> list[int]:
    """The distinct next tokens of the continuations that agree with the prefix, in order."""
    depth = len(prefix)
    return list(dict.fromkeys(f[depth] for f in found if f[:depth] == prefix and f[depth] >= 0))


def slow_drafts(found: list[list[int]], strategy: Strategy) -> list[int]:
    paths = {-1: []}
    rank = trees.ranks(strategy)[1:]
    for node, parent in enumerate(strategy.parents):
        choices = options(found, paths[parent])
        paths[node] = [*paths[parent], choices[rank[node]] if rank[node] < len(choices) else -1]
    drafts = [paths[node][-1] for node in range(len(strategy.parents))]
    return drafts + [-1] * (trees.bucket(strategy) - 1 - len(drafts))


def slow_compare(found: list[list[int]], came: list[int]):
    """(ranks, offered): depth after depth while rank 0 was right."""
    ranks = [-1] * DEPTHS
    offered = [0] * DEPTHS
    for depth, token in enumerate(came):
        choices = options(found, came[:depth])
        offered[depth] = RANKS
        ranks[depth] = choices.index(token) if token in choices else -1
        if ranks[depth]:
            break
    return ranks, offered


@pytest.fixture(scope="module")
def crowd():
    """(texts, histories, earlier texts, siblings) of 40 rows over a vocabulary so small that
    everything repeats.
    """
    rng = np.random.default_rng(0)

    def words(longest: int) -> list[int]:
        return rng.integers(0, rng.choice([1, 2, 4, 50]), rng.integers(1, longest)).tolist()

    def changed(text: list[int]) -> list[int]:
        """The text and more, or less of it, or with one token inserted or lost."""
        place = int(rng.integers(len(text)))
        longer = [*text, *words(12)]
        shorter = longer[:place]
        inserted = [*longer[:place], 3, *longer[place:]]
        return [longer, shorter, inserted, shorter + longer[place + 1 :]][int(rng.integers(4))][
            :SLOTS
        ]

    texts = [words(SLOTS - 13) for _ in range(40)]
    histories = [[*words(10), -1, *words(10), -1][:20] for _ in texts]
    return (
        texts,
        histories,
        [changed(text) for text in texts],
        rng.integers(-1, 40, (40, 2)).astype(np.int32),
    )


def slow_find(crowd, drafter: str, row: int, cut: int, depth: int):
    texts, histories, earlier, siblings = crowd
    text = texts[row][: len(texts[row]) - cut]
    if drafter == "replay":
        return slow_replay(text, earlier[row], depth)
    others = [texts[i][: max(len(texts[i]) - cut, 0)] if i >= 0 else [] for i in siblings[row]]
    return slow_lookup(text, histories[row], others, depth)


STRATEGIES = (
    trees.chain(1),
    trees.chain(7),
    trees.chain(32),
    trees.full_tree((3, 2, 1)),
    (-1, -1, 0, 1, 2, 3),
)


@pytest.mark.parametrize("parents", STRATEGIES, ids=lambda parents: f"{len(parents)} nodes")
@pytest.mark.parametrize("drafter", SEARCHERS, ids=lambda drafter: drafter.name)
def test_drafts_are_those_of_plain_python(crowd, drafter, parents):
    strategy = Strategy(parents, drafter.name)
    state = texts_state(*crowd[:3])
    drafts = propose(drafter, state, crowd[3], strategy).drafts
    depth = int(trees.depths(strategy).max())
    wanted = [
        slow_drafts(slow_find(crowd, drafter.name, row, 0, depth)[1], strategy)
        for row in range(len(crowd[0]))
    ]
    np.testing.assert_array_equal(drafts, wanted)
    assert 0.5 < np.mean(np.array(wanted)[:, 0] >= 0) < 1


@pytest.mark.parametrize("drafter", SEARCHERS, ids=lambda drafter: drafter.name)
def test_looking_back_is_what_plain_python_sees(crowd, drafter):
    """Class now, class eight tokens ago and the ranks of what came, from what was known then."""
    signal = look_back(texts_state(*crowd[:3]), crowd[3], SEARCHERS)[drafter.name]
    for row, text in enumerate(crowd[0]):
        assert signal.confidence[row] == slow_find(crowd, drafter.name, row, 0, 1)[0]
        if len(text) <= DEPTHS:
            assert not np.any(signal.offered[row]) and np.all(signal.ranks[row] == -1)
            continue
        kind, found = slow_find(crowd, drafter.name, row, DEPTHS, DEPTHS)
        ranks, offered = slow_compare(found, text[-DEPTHS:])
        assert signal.past[row] == kind
        assert (signal.ranks[row].tolist(), signal.offered[row].tolist()) == (ranks, offered)
    assert set(np.unique(signal.ranks)) >= {-1, 0, 1} and set(np.unique(signal.confidence)) == {
        0,
        1,
        2,
        3,
    }


def test_what_nobody_asks_for_is_not_looked_at(crowd):
    state = texts_state(crowd[0], crowd[1], None)
    seen = look_back(state, crowd[3], (LOOKUP,))
    assert set(seen) == {"lookup"}
    assert all(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(seen))


def test_lookup_reads_what_siblings_have_written():
    state = texts_state([[1, 2, 3], [1, 2, 3, 4, 5], [9, 1, 2, 3, 6]], [[-1]] * 3, None)
    siblings = jnp.array([[1, 2], [0, -1], [-1, -1]], jnp.int32)
    tree = Strategy((-1, -1, 0), "lookup")
    drafts = propose(LOOKUP, state, siblings, tree).drafts
    # of two equal matches, the later in the corpus is first
    assert drafts[0, :3].tolist() == [6, 4, -1]
    assert propose(LOOKUP, state, siblings[:, ::-1], tree).drafts[0, :3].tolist() == [4, 6, 5]
    assert propose(LOOKUP, state, jnp.full((3, 2), -1, jnp.int32), tree).drafts[0, 0] == -1


def test_lookup_goes_on_where_a_text_repeats_itself():
    state = texts_state([[7, 5, 6, 5, 6, 5]], [[-1]], None)
    assert propose(LOOKUP, state, NOBODY, chain("lookup", 32)).drafts[0].tolist() == [6, 5] * 16


EARLIER = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("text", "drafts", "kind"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9], 3),  # the text follows
        ([1, 2], [3, 4, 5, 6], 3),  # all so far
        # another token: the position counts, its noise is the same
        ([1, 2, 3, 4, 40], [6, 7, 8, 9], 1),
        # and so while the last tokens agree, but are few
        ([1, 2, 3, 4, 40, 6, 7], [8, 9, 10, 11], 1),
        ([1, 2, 3, 40, 4, 5], [6, 7, 8, 9], 2),  # one token more
        ([1, 2, 5, 6, 7], [8, 9, 10, 11], 2),  # two fewer
        ([*EARLIER, 30, 31], [-1] * 4, 0),  # past the end
        ([*EARLIER, 2, 3], [4, 5, 6, 7], 2),
    ],
)
def test_replay_follows_the_earlier_text(text, drafts, kind):
    state = texts_state([text], [[-1]], [EARLIER])
    assert propose(REPLAY, state, NOBODY, chain("replay", 4)).drafts[0].tolist() == drafts
    assert look_back(state, NOBODY, (REPLAY,))["replay"].confidence.tolist() == [kind]


def test_without_an_earlier_text_there_is_nothing_to_replay():
    for state in (texts_state([[1, 2, 3]], [[-1]], None), texts_state([[1, 2, 3]], [[-1]], [[]])):
        assert propose(REPLAY, state, NOBODY, chain("replay", 2)).drafts.tolist() == [[-1, -1]]
        signal = look_back(state, NOBODY, (REPLAY,))["replay"]
        assert signal.confidence.tolist() == [0]


def test_places_are_found_where_only_heads_are_split():
    """XLA's partitioner aborted there, and the process with it, as two results met in a barrier."""
    layout = Layout(make_mesh(1, 1, 2, jax.devices()[:2]), "generation")
    scores = np.arange(8 * 64, dtype=np.int32).reshape(8, 64)

    @jax.jit
    def best(scores):
        top, where = search.best_places(scores)
        return pin_rows((top[:, :1], where[:, :2]), layout)

    top, where = best(place_rows(scores, layout))
    np.testing.assert_array_equal(top[:, 0], scores[:, -1])
    np.testing.assert_array_equal(where, [[63, 62]] * 8)


def test_drafts_and_signals_lie_as_rows_do_on_a_mesh(crowd):
    layout = Layout(make_mesh(data=2, fsdp=4))
    state = texts_state(*crowd[:3])
    siblings = crowd[3]
    laid, others = place_rows((state, siblings), layout)
    for drafts, alone in (
        (
            propose(LOOKUP, laid, others, chain("lookup", 4), layout=layout),
            propose(LOOKUP, state, siblings, chain("lookup", 4)),
        ),
        (
            propose(REPLAY, laid, others, chain("replay", 4), layout=layout),
            propose(REPLAY, state, siblings, chain("replay", 4)),
        ),
        (look_back(laid, others, SEARCHERS, layout=layout), look_back(state, siblings, SEARCHERS)),
    ):
        jax.tree.map(np.testing.assert_array_equal, drafts, alone)
        wanted = row_shardings(drafts, layout)
        assert jax.tree.all(
            jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), drafts, wanted)
        )


# Draft models

SEED = 5
TEXTS = 6


def begun(target, drafter, temperature: float) -> DecodeState:
    """Texts of one token each: no cache is wanted yet."""
    empty = texts_state([[i + 1] for i in range(TEXTS)], [[-1]] * TEXTS, None)
    slots = 64 + model_drafter.CATCH_UP_TOKENS
    key = np.stack([np.full(TEXTS, SEED), np.arange(TEXTS)], axis=1).astype(np.uint32)
    return dataclasses.replace(
        empty,
        tokens=jnp.zeros((TEXTS, slots), jnp.int32).at[:, :1].set(empty.tokens[:, :1]),
        limit=jnp.arange(TEXTS, dtype=jnp.int32) + 52,
        key=jnp.asarray(key),
        temperature=jnp.full((TEXTS,), temperature, jnp.float32),
        cache=ContiguousCache.empty(target.config, TEXTS, slots, ONE_DEVICE),
        draft=DraftState(
            ContiguousCache.empty(drafter.config, TEXTS, slots, ONE_DEVICE),
            jnp.zeros((TEXTS,), jnp.int32),
        ),
    )


def roll_out(target, drafter, length: int, sampling: Sampling):
    """(the finished state, tokens [rounds, B] gained) with chains of `length` drafts."""
    state = begun(target, drafter, sampling.temperature)
    truncation = sampling.truncation
    strategy = chain("model", length)
    gained = []
    tree = trees.as_data(strategy, TEXTS)
    while not bool(state.done.all()):
        drafts, _, window, _ = model_drafter.propose(drafter, state, strategy, truncation)
        state, emission = run_round(
            target, state, drafts, None, tree, truncation=truncation, stop_tokens=(7,)
        )
        state = model_drafter.commit(state, window, emission.path, emission.count, strategy)
        gained.append(emission.count.tolist())
    return state, np.array(gained)


def rounds_foretold(rank: np.ndarray, start: int, end: int, length: int) -> list[int]:
    """Tokens of each round of chains of `length`, by the ranks of the text's own tokens."""
    gained = []
    place = start
    while place < end:
        right = int(np.argmin(np.append(rank[place : place + length] == 0, False)))
        gained.append(min(right + 1, end - place))
        place += gained[-1]
    return gained


@pytest.mark.parametrize(
    ("length", "sampling"),
    [(5, Sampling(1.0)), pytest.param(2, Sampling(0.7, top_k=20), marks=pytest.mark.slow)],
)
def test_one_teacher_forced_pass_foretells_every_round(target, drafter, length, sampling):
    """The tokens of each round of each sample, exactly."""
    state, gained = roll_out(target, drafter, length, sampling)
    mask = np.arange(state.tokens.shape[1]) < np.asarray(state.length)[:, None]
    mask[:, 0] = False
    given = state.tokens, mask, state.key, state.temperature
    rank, sure = map(np.asarray, teacher.score(drafter, *given, sampling.truncation))
    for row in range(TEXTS):
        foretold = rounds_foretold(rank[row], 1, int(state.length[row]), length)
        assert foretold == [count for count in gained[:, row].tolist() if count]
    assert mask.sum() > 150 and 1.3 < mask.sum() / np.count_nonzero(gained) < length + 0.9
    assert (
        set(np.unique(sure[mask])) <= {1, 2, 3}
        and not sure[~mask].any()
        and np.all(rank[~mask] == -1)
    )


def test_the_pass_is_the_same_in_any_blocks(drafter, monkeypatch):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 300, (4, 40)).astype(np.int32)
    mask = (np.arange(40) > 3) & (np.arange(40) < rng.integers(10, 40, 4)[:, None])
    key = np.stack([np.full(4, SEED), np.arange(4)], axis=1).astype(np.uint32)
    temperature = np.array([1.0, 0.7, 0.0, 1.3], np.float32)
    given = tokens, mask, key, temperature, UNTRUNCATED
    whole = teacher.score(drafter, *given)
    for tokens_of_block in (14, 50):
        monkeypatch.setattr(teacher, "HEAD_TOKENS", tokens_of_block)
        jax.clear_caches()
        parts = teacher.score(drafter, *given)
        jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_observations_end_at_a_miss_a_lower_rank_and_the_texts_end():
    rank = np.array([[-1, -1, 0, 0, 2, 0, -1, 0]], np.int8)
    mask = np.array([[False, False, True, True, True, True, True, True]])
    found = teacher.as_observations(
        rank, np.array([[0, 0, 1, 2, 3, 1, 2, 3]], np.int8), mask, np.array([True])
    )
    assert found.confidence.tolist() == [0, 1, 2, 3, 1, 2] + [0] * 5 and found.seen_prompt.all()
    told = [row[seen > 0].tolist() for row, seen in zip(found.ranks, found.offered, strict=True)]
    # what has a class counts again where nothing is known
    known = [[0, 2], [2], [0, -1], [-1], [0]]
    assert told == [[0, 0, 2], *known, *known]
    assert found.ranks.shape == (11, DEPTHS) and set(found.offered.ravel()) == {0, RANKS}


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0], ids=["1", "0.5", "greedy"])
def test_confidence_is_the_probability_of_the_drafters_own_best(target, drafter, temperature):
    state = begun(target, drafter, temperature)
    sharp = dataclasses.replace(drafter, norm=drafter.norm * jnp.linspace(1, 8, 64))
    drafts, _, _, confidence = model_drafter.propose(sharp, state, chain("model", 2), UNTRUNCATED)
    hidden, _ = forward(sharp, state.tokens[:, :1], jnp.zeros((TEXTS, 1), jnp.int32))
    law = jax.nn.softmax(logits(sharp, hidden)[:, 0] / (temperature or 1.0))
    probability = np.asarray(law)[np.arange(TEXTS), np.asarray(drafts)[:, 0]]
    assert confidence.tolist() == (1 + (probability >= 0.3) + (probability >= 0.7)).tolist()
    assert confidence.dtype == jnp.int8 and len(set(confidence.tolist())) > 1


# Registering


@pytest.fixture
def registry(monkeypatch):
    """The drafters of the package, in a registry that ends with the test."""
    monkeypatch.setattr(protocol, "DRAFTERS", dict(protocol.DRAFTERS))
    return protocol.DRAFTERS


def named(name: str) -> protocol.Drafter:
    return type("Toy", (SearchDrafter,), {"name": name})()


def test_a_drafter_is_registered_once(registry):
    toy = named("toy")
    protocol.register(toy)
    protocol.register(toy)
    assert [*registry] == ["lookup", "replay", "model", "toy"]
    assert protocol.drafter_of(chain("toy", 2)) is toy
    assert protocol.drafters_of((trees.PLAIN, chain("toy", 2), chain("model", 1))) == (MODEL, toy)
    with pytest.raises(ValueError, match="There is a drafter called 'toy' already"):
        protocol.register(named("toy"))


@pytest.mark.parametrize("name", ["", "Toy", "my-toy", "none", "plain", "adaptive"])
def test_names_that_no_strategy_can_begin_with_are_refused(name, registry):
    with pytest.raises(ValueError, match="cannot be called"):
        protocol.register(named(name))


def test_a_drafter_that_nobody_registered_is_missed():
    with pytest.raises(ValueError, match="No drafter is called 'toy'"):
        protocol.drafter_of(chain("toy", 2))
    with pytest.raises(ValueError, match="Unknown strategy 'toy-chain-2'"):
        trees.parse("toy-chain-2")
    assert protocol.drafter_of(trees.PLAIN).name == "none"
