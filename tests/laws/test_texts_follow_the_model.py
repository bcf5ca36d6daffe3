"""Texts follow the model's law under every rule of acceptance, whatever drafts them, and when the
prompts are drawn again and again with the texts of before as drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import SIGNIFICANCE, p_value

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters.lookup import LookupDrafter
from rlhf_jax.generation.speculative.protocol import DRAFTERS
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.types import Model, ModelConfig, Strategy

VOCABULARY = 6
LAST = 3  # the token that every prompt ends with
NEW = 6  # tokens of a text, of which the last two are compared with their law
ROWS = 512
TURNS = 4
STANDARD_ERRORS = 4.5


class PackedLookup(LookupDrafter):
    """Look up in rounds with a budget of drafts."""

    name = "packed_lookup"
    packs = True


@pytest.fixture(scope="module", autouse=True)
def packed_lookup():
    DRAFTERS[PackedLookup.name] = PackedLookup()
    yield
    del DRAFTERS[PackedLookup.name]


def markov(seed: int) -> Model:
    """A model whose next token depends on the last one alone, as its layers add nothing."""
    config = ModelConfig("llama", VOCABULARY, 16, 24, 1, 2, 1, 8, 32)
    model = unstack(init(jax.random.key(seed), config))
    layers = jax.tree.map(jnp.zeros_like, model.layers)
    return dataclasses.replace(model, layers=layers, embed=model.embed * 2)


MODEL = markov(4)
DRAFT_MODEL = markov(5)


@functools.cache
def law() -> np.ndarray:
    """The law [V, V] of the next token by the last one, in float64 and by hand."""
    embed = np.asarray(MODEL.embed[:VOCABULARY], np.float64)
    head = embed if MODEL.head is None else np.asarray(MODEL.head, np.float64)
    head = head if head.shape == embed.shape else head.T
    scale = np.sqrt((embed**2).mean(-1, keepdims=True) + MODEL.config.norm_eps)
    logits = embed / scale * np.asarray(MODEL.norm, np.float64) @ head.T
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def decoding(rule: str, strategy: str, drafter: str = "") -> GenerationConfig:
    chosen = trees.parse(strategy)
    return GenerationConfig(
        Sampling(),
        (Strategy(chosen.parents, drafter or chosen.drafter, chosen.packed),),
        (),
        max_rows=ROWS,
        max_length=12,
        seed=3,
        acceptance=rule,
        history=NEW + 1,
    )


def prompts() -> list[np.ndarray]:
    """Different prompts that end alike, each with texts of its own."""
    digits = np.array(np.unravel_index(np.arange(ROWS), [VOCABULARY] * 4)).T
    return [np.array([*row, LAST], np.int32) for row in digits]


def on_devices(model: Model, layout: Layout) -> Model:
    """The model as `generate` wants it on the devices of a layout."""
    if layout.mesh is None:
        return model
    return jax.device_put(model, model_shardings(model, layout))


def draw(how: GenerationConfig, wanted: list[Request], layout: Layout = ONE_DEVICE):
    """The finished samples of requests."""
    place = functools.partial(on_devices, layout=layout)
    drafter = place(DRAFT_MODEL) if how.drafters[0].needs_model else None
    return list(generate(place(MODEL), drafter, wanted, how, layout))


def tokens_of(samples) -> np.ndarray:
    """The texts [ROWS, 1 + NEW] in the order of the prompts, each after the prompt's last token."""
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    return np.array([[LAST, *sample.tokens] for sample in ordered])


def p_of(tokens: np.ndarray) -> float:
    """P-value of the last two tokens under their law."""
    pairs = np.linalg.matrix_power(law(), NEW - 1)[LAST][:, None] * law()
    return p_value(tokens[:, -2] * VOCABULARY + tokens[:, -1], pairs.ravel())


def repeats(tokens: np.ndarray, before: np.ndarray) -> float:
    """How many standard errors more tokens are those of before than if texts were independent.

    Where both texts have the same last token, they draw from one law p, and agree by chance with
    probability sum p^2.
    """
    alike = tokens[:, :-1] == before[:, :-1]
    chance = (law() ** 2).sum(-1)[tokens[:, :-1]][alike]
    agreed = (tokens[:, 1:] == before[:, 1:])[alike]
    return (agreed - chance).sum() / np.sqrt((chance * (1 - chance)).sum())


def kept(history: History) -> History:
    """The history as a checkpoint gives it back."""
    restored = History(NEW + 1)
    restored.restore(history.state())
    return restored


def slices() -> Layout:
    return Layout(meshes.make_mesh(1, 1, 1, jax.devices()[:2], slices=2), "generation")


SOURCES: dict[str, tuple[str, str]] = {
    "lookup": ("lookup-chain-2", ""),
    "lookup, tree": ("lookup-tree-2x2", ""),
    "lookup, packed": ("replay-chain-3-packed-2", PackedLookup.name),
    "draft model": ("model-tree-2x1", ""),
    "replay": ("replay-chain-2", ""),
}
"""By source of drafts: the strategy's name, and the drafter in place of the one it names."""
LIKE_OTHERS = ("lookup, tree", "lookup, packed")

WAYS: dict[str, tuple[Callable[[History], History], Callable[[], Layout], int]] = {
    "evaluated again": (lambda history: history, lambda: ONE_DEVICE, 0),
    "noise is repeated": (lambda history: history, lambda: ONE_DEVICE, 1),
    "resumed": (kept, lambda: ONE_DEVICE, 0),
    "slices": (lambda history: history, slices, 0),
}
"""By way in which prompts come again: what becomes of the history, where, and repeated samples."""

CASES = [
    pytest.param(
        rule,
        source,
        way,
        marks=[pytest.mark.slow] * (not fast) + [pytest.mark.long] * (source in LIKE_OTHERS),
    )
    for rule in RULES
    for source in SOURCES
    for way in WAYS
    if source != "replay" or not RULES[rule].depends_on_drafts
    if way != "slices" or RULES[rule].depends_on_drafts
    for fast in [rule == "rejection" and source == "lookup" and way != "slices"]
]


@pytest.mark.parametrize(("rule", "source", "way"), CASES)
def test_texts_follow_the_law_when_prompts_come_again(rule, source, way):
    how = decoding(rule, *SOURCES[source])
    remember, layout, repeated = WAYS[way]
    history = History(NEW + 1)
    before = None
    accepted = 0
    for _ in range(TURNS):
        wanted = requests(
            prompts(), 1, NEW, first_id=0, history=history, rule=how.rule, repeated=repeated
        )
        samples = draw(how, wanted, layout())
        tokens = tokens_of(samples)
        assert p_of(tokens) > SIGNIFICANCE
        if how.rule.depends_on_drafts and before is not None:
            assert abs(repeats(tokens, before)) < STANDARD_ERRORS
        before = tokens
        accepted = sum(sample.accepted for sample in samples)
        history = remember(history.with_samples(samples))
    assert accepted > ROWS // 4, "nothing was drafted, and nothing shown"


@pytest.mark.parametrize("source", ["lookup", "lookup, tree", "lookup, packed"])
def test_noise_that_is_used_again_would_be_seen(source):
    """With the ids and texts of before given by hand, without whose they are."""
    how = decoding("rejection", *SOURCES[source])
    first = tokens_of(draw(how, [Request(p, (i,), NEW) for i, p in enumerate(prompts())]))
    again = [
        Request(prompt, (i,), NEW, history=(text[1:].astype(np.int32),))
        for i, (prompt, text) in enumerate(zip(prompts(), first, strict=True))
    ]
    assert repeats(tokens_of(draw(how, again)), first) > STANDARD_ERRORS


@pytest.mark.parametrize(("earlier", "fits"), [(0, True), (1, False), (5, False)])
def test_noise_that_is_used_again_is_refused(earlier, fits):
    """Of the sample itself, and of any that came later: its text may come from the sample's."""
    text = {earlier: np.array([1, 2], np.int32)}
    wanted = [Request(prompts()[0], (1, 2), 2, tuple(text.values()), earlier=text)]
    how = dataclasses.replace(decoding("rejection", "lookup-chain-2"), max_rows=2)
    if fits:
        assert len(draw(how, wanted)) == 2
        return
    with pytest.raises(ValueError, match=f"sample 1 may draft from the text of sample {earlier};"):
        draw(how, wanted)
