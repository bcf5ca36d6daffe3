"""Packed samples: each token is there once, and what is computed of it is that of its sample alone,
whatever else is in the line.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import sequences_of

from rlhf_jax.algorithms.grpo import POLICY_LOSS, GRPOOptions
from rlhf_jax.algorithms.ppo import CRITIC_LOSS
from rlhf_jax.inference.logprobs import CHUNK, head_logprobs, token_logprobs
from rlhf_jax.inference.scoring import ScoringSettings, score, score_packed, score_sequences
from rlhf_jax.losses.aggregate import token_mean_weights
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh, model_shardings, place_rows
from rlhf_jax.model.packed import read_packed
from rlhf_jax.model.transformer import init
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.minibatches import with_shares
from rlhf_jax.sequences.packing import bucket, pack, padding_share, unpack
from rlhf_jax.training.settings import TrainingSettings

PROMPTS = (3, 9, 5)  # tokens of each
GROUP = 4
SLOTS = 26


def grouped(vocabulary: int, seed: int = 0, top_k: bool = False) -> Sequences:
    """Samples of prompts of different lengths; one response has a single token."""
    random = np.random.default_rng(seed)
    rows = len(PROMPTS) * GROUP
    prompt = np.repeat(PROMPTS, GROUP)[:, None]
    length = np.minimum(prompt[:, 0] + random.integers(2, 18, rows), SLOTS)
    length[1] = prompt[1, 0] + 1
    place = np.arange(SLOTS)
    texts = random.integers(0, vocabulary, (len(PROMPTS), SLOTS)).repeat(GROUP, axis=0)
    tokens = np.where(place < prompt, texts, random.integers(0, vocabulary, (rows, SLOTS)))
    known = place < length[:, None]
    mask = known & (place >= prompt)
    top_k_ids = None
    if top_k:
        ids = random.integers(0, vocabulary, (rows, SLOTS, 6))
        ids[..., 0] = tokens
        top_k_ids = np.where(mask[..., None], ids, -1).astype(np.int32)
    return sequences_of(
        np.where(known, tokens, 0).astype(np.int32),
        mask,
        sampled_logprobs=random.normal(size=mask.shape).astype(np.float32),
        top_k_ids=top_k_ids,
    )


@pytest.mark.parametrize("row_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 12])
def test_each_token_is_there_once_and_each_prompt_once_a_shard(row_shards, rows):
    given = grouped(50)
    mask = np.array(given.mask)
    mask[5] = False  # a sample that is not trained on is not read
    sequences = dataclasses.replace(given, mask=mask)
    packed = pack(sequences, rows, length_bucket=4, row_shards=row_shards)
    told = [(part, np.asarray(part.batch.columns["sampled_logprobs"])) for part in packed]
    again = unpack(told, (len(mask), SLOTS))
    np.testing.assert_array_equal(again, np.where(mask, given.columns["sampled_logprobs"], 0.0))
    ids = [np.asarray(part.batch.columns["sample_ids"])[part.batch.groups >= 0] for part in packed]
    trained = np.flatnonzero(mask.any(axis=1))
    np.testing.assert_array_equal(np.sort(np.concatenate(ids)), trained)
    assert sum(part.batch.mask.sum() for part in packed) == mask.sum()
    for part in packed:
        batch = jax.tree.map(np.asarray, part.batch)
        assert batch.sequences[0].size <= max(1, rows // row_shards) * SLOTS
        before = np.take_along_axis(batch.positions, batch.predict_from, axis=1)
        position = part.take(np.broadcast_to(np.arange(SLOTS), mask.shape))
        np.testing.assert_array_equal(before[batch.mask] + 1, position[batch.mask])
        np.testing.assert_array_equal(part.take(given.tokens), batch.targets)
        for shard, line in enumerate(batch.tokens):
            # Where a token is at home, its sample has it at its own place.
            home = batch.sequences[shard].reshape(-1)[batch.slot[shard]]
            used = np.unique(batch.sequences[shard])
            np.testing.assert_array_equal(home[used], used)
            assert len(line) >= len(used)
    if row_shards == 1 and rows == 12:
        lengths = mask[mask.any(axis=1)].sum()
        assert packed[0].real_tokens == sum(PROMPTS) + lengths - mask.any(axis=1).sum()
        assert padding_share(packed) == 1 - packed[0].real_tokens / packed[0].batch.tokens.size
    assert padding_share([]) == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_reads_its_own_text(seed):
    """Though prompts begin alike, begin others, or differ in the last token alone."""
    random = np.random.default_rng(seed)
    rows = 8
    prompt = random.integers(1, 4, rows)[:, None]
    length = prompt[:, 0] + random.integers(1, 4, rows)
    place = np.arange(7)
    known = place < length[:, None]
    tokens = np.where(known, random.integers(0, 2, (rows, 7)), 0).astype(np.int32)
    sequences = sequences_of(tokens, known & (place >= prompt))
    for part in pack(sequences, rows, length_bucket=2, row_shards=2):
        batch = part.batch
        for shard, line in enumerate(np.asarray(batch.tokens)):
            told = np.asarray(batch.mask[shard])
            row, last = np.divmod(part.source[shard][told], 7)
            own = np.asarray(batch.segment_ids[shard])[told]
            for sample, before in {
                (r, o): t for r, o, t in zip(row, own, last, strict=True)
            }.items():
                read = line[np.asarray(batch.sequences[shard, sample[1]])[:before]]
                np.testing.assert_array_equal(read, tokens[sample[0], :before])


def rounded(count: int, unit: int, digits: int) -> int:
    """The least multiple of `unit` from `count` on of few binary digits, zeros behind left out."""
    units = max(1, -(-count // unit))
    return unit * next(n for n in itertools.count(units) if len(f"{n:b}".rstrip("0")) <= digits)


@pytest.mark.parametrize(("unit", "digits"), [(1, 2), (8, 3), (8, 4), (3, 1)])
def test_sizes_are_rounded_to_few_binary_digits(unit, digits):
    counts = range(1, 3000)
    assert [bucket(count, unit, digits) for count in counts] == [
        rounded(count, unit, digits) for count in counts
    ]


def test_line_lengths_are_few_and_little_of_them_is_padding():
    sizes = {bucket(count, 8, 4) for count in range(1, 10_000)}
    assert len(sizes) < 80
    assert all(bucket(count, 8, 4) <= max(count * 9 / 8, count + 7) for count in range(1, 10_000))


def tokens_of(rows, texts: dict[int, tuple[int, int]]) -> int:
    """Tokens of samples, each (prompt, tokens of it and in all) by row, each prompt once."""
    prompts = {texts[row][0] for row in rows}
    return sum(PROMPTS[one] for one in prompts) + sum(
        texts[row][1] - PROMPTS[texts[row][0]] for row in rows
    )


def fullest_of_the_best(texts: dict[int, tuple[int, int]], shards: int, most: int) -> int:
    """Tokens of the fullest shard where samples are dealt by length, or cut where they lie."""
    by_length = sorted(texts, key=lambda row: -texts[row][1])
    turn = [*range(shards), *reversed(range(shards))]
    dealt = [
        [row for i, row in enumerate(by_length) if turn[i % len(turn)] == shard]
        for shard in range(shards)
    ]
    best = max(tokens_of(rows, texts) for rows in dealt)
    rows = sorted(texts)
    for cuts in itertools.combinations_with_replacement(range(len(rows) + 1), shards - 1):
        pairs = itertools.pairwise((0, *cuts, len(rows)))
        parts = [rows[a:b] for a, b in pairs]
        if max(map(len, parts)) <= most:
            best = min(best, max(tokens_of(part, texts) for part in parts))
    return best


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_shards_are_as_even_as_any_cut_and_arrays_as_small_as_sizes_are(seed, shards):
    batch = grouped(50, seed)
    mask = np.asarray(batch.mask).copy()
    mask[np.random.default_rng(seed).integers(12, size=3)] = False
    rows = np.flatnonzero(mask.any(axis=1)).tolist()
    texts = {row: (row // GROUP, int(np.flatnonzero(mask[row])[-1])) for row in rows}
    (part,) = pack(dataclasses.replace(batch, mask=mask), 12, length_bucket=4, row_shards=shards)
    owners = [
        sorted({int(place) // SLOTS for place in places[own]})
        for places, own in zip(part.source, np.asarray(part.batch.mask), strict=True)
    ]
    assert sorted(itertools.chain.from_iterable(owners)) == rows
    longest = min(rounded(max(tokens for _, tokens in texts.values()), 4, 3), SLOTS)
    most = -(-12 // shards) * SLOTS // longest
    fullest = max(tokens_of(own, texts) for own in owners)
    assert fullest == fullest_of_the_best(texts, shards, most)
    assert part.real_tokens == sum(tokens_of(own, texts) for own in owners)
    held = min(most, rounded(max(map(len, owners)), 1, 2))
    predicted = max(sum(int(mask[row].sum()) for row in own) for own in owners)
    assert part.batch.sequences.shape == (shards, held, longest)
    assert part.batch.tokens.shape == (shards, min(held * longest, rounded(fullest, 4, 4)))
    assert part.batch.targets.shape == (shards, min(held * longest, rounded(predicted, 4, 4)))


@pytest.mark.parametrize("top_k", [False, True])
def test_scores_are_those_of_each_sample_by_itself(tiny, top_k):
    model = init(jax.random.key(0), tiny)
    batch = grouped(tiny.vocab_size, top_k=top_k)
    found = score_sequences(model, batch, temperature=0.7, rows=12, length_bucket=4)
    support = batch.columns.get("top_k_ids")
    alone = token_logprobs(model, batch.tokens, temperature=0.7, mask=batch.mask, support=support)
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
            pytest.param(shape, kind, marks=[pytest.mark.slow, pytest.mark.long])
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

    def differentiate(experience, weights, layout, length_bucket):
        options = GRPOOptions(loss="gspo" if kind == "gspo" else "ppo")
        settings = TrainingSettings(layout=layout, remat=False, chunk=16, options=options)
        whole = model
        if layout.mesh is not None:
            whole = jax.device_put(model, model_shardings(model, layout))
        told = []
        known = with_shares(experience.with_columns(kl_weight=np.array(0.1, np.float32)), weights)
        for part in pack(known, 4, length_bucket, layout.row_shards):
            batch = place_rows(part.batch, layout)
            (loss, _), slope = gradient(whole, batch, settings)
            told.append(jax.device_get((loss, slope)))
        return functools.reduce(add, told)

    layout = Layout(shape and make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]))
    loss, slope = differentiate(experience, weights, layout, length_bucket=4)
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
    (part,) = pack(grouped(tiny.vocab_size).reading(), 12, 4, 1)
    hidden = read_packed(model, part.batch, ONE_DEVICE)
    given = (model, hidden, part.batch.targets, part.batch.mask)
    read = functools.partial(
        head_logprobs, *given, support=None, temperature=1.0, chunk=CHUNK, layout=ONE_DEVICE
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
    settings = ScoringSettings({}, 1.0, microbatch_rows=12)
    assert score(batch, {}, settings)[0].columns.keys() == batch.columns.keys()
    nothing = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    settings = dataclasses.replace(settings, layouts={"reference": Layout()})
    said, _ = score(nothing, {"reference": policy}, settings)
    assert said.columns.keys() == {*batch.columns, "reference_logprobs"}
    assert not said.columns["reference_logprobs"].any()
