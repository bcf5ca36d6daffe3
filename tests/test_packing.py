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

from rlhf_jax.inference.logprobs import (
    CHUNK,
    head_logprobs,
    score_packed,
    score_rollout,
    token_logprobs,
)
from rlhf_jax.inference.packing import bucket, pack, padding_share, unpack
from rlhf_jax.inference.scoring import ScoringSettings, score
from rlhf_jax.mesh import ONE_DEVICE, Layout, make_mesh, model_shardings, place_rows
from rlhf_jax.model.packed import read_packed
from rlhf_jax.model.transformer import init
from rlhf_jax.training.batching import micro_batch
from rlhf_jax.training.gradients import critic_objective, policy_objective
from rlhf_jax.training.losses import token_mean_weights
from rlhf_jax.training.policy_losses import LOSSES
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Experience, Rollout

pytestmark = pytest.mark.usefixtures("compiled_soon")

PROMPTS = (3, 9, 5)  # tokens of each
GROUP = 4
SLOTS = 26


def grouped_rollout(vocabulary: int, seed: int = 0, top_k: bool = False) -> Rollout:
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
    support = None
    if top_k:
        support = random.integers(0, vocabulary, (rows, SLOTS, 6))
        support[..., 0] = tokens
        support = np.where(mask[..., None], support, -1).astype(np.int32)
    return Rollout(
        tokens=np.where(known, tokens, 0).astype(np.int32),
        mask=mask,
        logprobs=random.normal(size=mask.shape).astype(np.float32),
        length=length.astype(np.int32),
        sample_id=np.arange(rows, dtype=np.uint32),
        support=support,
    )


@pytest.mark.parametrize("row_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 12])
def test_each_token_is_there_once_and_each_prompt_once_a_shard(row_shards, rows):
    rollout = grouped_rollout(50)
    mask = rollout.mask.copy()
    mask[5] = False  # a sample that is not trained on is not read
    packed = pack(rollout, mask, rows, length_bucket=4, row_shards=row_shards)
    told = [(part, np.asarray(part.take(rollout.logprobs))) for part in packed]
    again = unpack(told, (len(mask), SLOTS))
    np.testing.assert_array_equal(again, np.where(mask, rollout.logprobs, 0.0))
    assert sum(part.batch.mask.sum() for part in packed) == mask.sum()
    for part in packed:
        batch = jax.tree.map(np.asarray, part.batch)
        assert batch.samples[0].size <= max(1, rows // row_shards) * SLOTS
        before = np.take_along_axis(batch.positions, batch.before, axis=1)
        position = part.take(np.broadcast_to(np.arange(SLOTS), mask.shape))
        assert position is not None
        np.testing.assert_array_equal(before[batch.mask] + 1, position[batch.mask])
        np.testing.assert_array_equal(part.take(rollout.tokens), batch.targets)
        for shard, line in enumerate(batch.tokens):
            # Where a token is at home, its sample has it at its own place.
            home = batch.samples[shard].reshape(-1)[batch.home[shard]]
            used = np.unique(batch.samples[shard])
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
    numbers = np.zeros(known.shape, np.float32)
    rollout = Rollout(tokens, known & (place >= prompt), numbers, length, np.arange(rows), None)
    for part in pack(rollout, rollout.mask, rows, length_bucket=2, row_shards=2):
        batch = part.batch
        for shard, line in enumerate(np.asarray(batch.tokens)):
            told = np.asarray(batch.mask[shard])
            row, last = np.divmod(part.source[shard][told], 7)
            own = np.asarray(batch.owner[shard])[told]
            for sample, before in {
                (r, o): t for r, o, t in zip(row, own, last, strict=True)
            }.items():
                read = line[np.asarray(batch.samples[shard, sample[1]])[:before]]
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
    rollout = grouped_rollout(50, seed)
    mask = rollout.mask.copy()
    mask[np.random.default_rng(seed).integers(12, size=3)] = False
    rows = np.flatnonzero(mask.any(axis=1)).tolist()
    texts = {row: (row // GROUP, int(np.flatnonzero(mask[row])[-1])) for row in rows}
    (part,) = pack(rollout, mask, 12, length_bucket=4, row_shards=shards)
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
    assert part.batch.samples.shape == (shards, held, longest)
    assert part.batch.tokens.shape == (shards, min(held * longest, rounded(fullest, 4, 4)))
    assert part.batch.targets.shape == (shards, min(held * longest, rounded(predicted, 4, 4)))


@pytest.mark.parametrize("top_k", [False, True])
def test_scores_are_those_of_each_sample_by_itself(tiny, top_k):
    model = init(jax.random.key(0), tiny)
    rollout = grouped_rollout(tiny.vocab_size, top_k=top_k)
    found = score_rollout(model, rollout, temperature=0.7, rows=12, length_bucket=4)
    alone = token_logprobs(
        model, rollout.tokens, temperature=0.7, mask=rollout.mask, support=rollout.support
    )
    np.testing.assert_allclose(found, alone, atol=1e-4, rtol=0)


def experience_of(model, rollout: Rollout) -> Experience:
    """Old and reference log-probs near the model's, and an advantage for each sample."""
    random = np.random.default_rng(1)
    mask = rollout.mask.copy()
    mask[2] = False  # dropped
    said = np.asarray(token_logprobs(model, rollout.tokens, temperature=1.0, mask=rollout.mask))
    old, reference = (
        np.where(mask, said + random.normal(scale=0.1, size=mask.shape), np.nan) for _ in range(2)
    )
    advantages, values, returns = (
        np.where(mask, random.normal(size=mask.shape), np.nan).astype(np.float32) for _ in range(3)
    )
    return Experience(
        rollout,
        mask,
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
    objective = critic_objective if kind == "critic" else policy_objective
    policy = init(jax.random.key(0), tiny)
    model = init(jax.random.key(0), dataclasses.replace(tiny, scalar_head=True, tied=False))
    model = model if kind == "critic" else policy
    rollout = grouped_rollout(tiny.vocab_size, top_k=top_k)
    experience = experience_of(policy, rollout)
    weights = token_mean_weights(np.asarray(experience.mask), 1)

    gradient = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=2)

    def differentiate(experience, weights, layout, length_bucket):
        loss = LOSSES["gspo" if kind == "gspo" else "ppo"]
        settings = TrainingSettings(layout=layout, remat=False, chunk=16, loss=loss)
        whole = model
        if layout.mesh is not None:
            whole = jax.device_put(model, model_shardings(model, layout))
        told = []
        host = experience.rollout
        for part in pack(host, experience.mask, 4, length_bucket, layout.row_shards):
            batch = place_rows(micro_batch(experience, weights, 0.1, part), layout)
            (loss, _), slope = gradient(whole, batch, settings)
            told.append(jax.device_get((loss, slope)))
        return functools.reduce(add, told)

    layout = Layout(shape and make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]))
    loss, slope = differentiate(experience, weights, layout, length_bucket=4)
    rows = np.flatnonzero(np.asarray(experience.mask).any(axis=1))
    singles = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], experience) for row in rows]
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
    rollout = grouped_rollout(tiny.vocab_size)
    (part,) = pack(rollout, rollout.mask, 12, 4, 1)
    hidden = read_packed(model, part.batch, ONE_DEVICE)
    given = (model, hidden, part.batch.targets, part.batch.mask)
    read = functools.partial(
        head_logprobs, *given, support=None, temperature=1.0, chunk=CHUNK, layout=ONE_DEVICE
    )
    said, entropy = read(entropy=True)
    assert entropy is not None and bool(jnp.all(jnp.where(part.batch.mask, entropy > 0, True)))
    np.testing.assert_array_equal(read(entropy=False)[0], said)
    other = dataclasses.replace(part.batch, tokens=np.where(part.batch.tokens, 7, 0))
    assert not np.allclose(said, score_packed(model, other, None, temperature=1.0))


def test_nothing_is_said_where_no_model_reads(tiny):
    """As in GRPO without KL, whose update finds the old log-probs itself: zeros would be taken."""
    policy = init(jax.random.key(0), tiny)
    rollout = grouped_rollout(tiny.vocab_size)
    settings = ScoringSettings(Layout(), 1.0, microbatch_rows=12, policy_logprobs=False)
    assert score(policy, None, None, rollout, settings)[:3] == (None, None, None)
    nothing = dataclasses.replace(rollout, mask=np.zeros_like(rollout.mask))
    said = score(policy, policy, None, nothing, settings)
    assert said.logprobs is None and said.values is None
    assert said.reference_logprobs is not None and not said.reference_logprobs.any()
