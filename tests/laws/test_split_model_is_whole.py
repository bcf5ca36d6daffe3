"""A model split over `mesh.tensor` 1, 2 or 4 devices writes the same texts, but for ties."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from margins import decision_margin
from places import GOLDEN

from pallas_kernels.dispatch import Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request, Sample
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import Layout
from rlhf_jax.models.files.source import open_source
from rlhf_jax.models.transformer import forward, init, logits
from rlhf_jax.types import Model, ModelConfig

# Below it a draw may go either way in float32, in tempered logits or in probability.
EPS = 1e-3
GREEDY = GOLDEN / "greedy.json"
# Heads, groups, feed-forward and vocabulary divide by four. 2,300 tokens are filled up to 10 blocks
# over two devices, and to 12 over four, of which the last device has nothing but filling.
CONFIG = ModelConfig("llama", 2300, 64, 96, 3, 8, 4, 8, 128)
# The vocabulary's parts are drawn from where they lie, as on a TPU.
STREAMED = Kernels(verify_head="interpret")
CASES = (
    (Sampling(1.0), 2, "plain", None),
    (Sampling(1.0), 4, "plain", None),
    (Sampling(1.0), 4, "model-tree-2x2x1", None),
    (Sampling(1.0), 2, "lookup-tree-2x2", STREAMED),
    (Sampling(1.0), 4, "plain", STREAMED),
    (Sampling(1.0, top_p=0.8), 2, "lookup-tree-2x2", None),
    (Sampling(1.0, top_p=0.8), 4, "plain", None),
    (Sampling(0.8, top_k=20), 2, "model-chain-3", None),
    (Sampling(0.8, top_k=20), 4, "plain", None),
)
VOCABULARY = {"embed", "head"}
FEED_FORWARD = {"gate", "up", "down"}
HEADS = {"query", "key", "value", "output"}


def layout_of(tensor: int, kernels: Kernels | None = None) -> Layout:
    """Return eight devices' layout: what `tensor` leaves, `fsdp` fills up with rows."""
    layout = Layout(meshes.make_mesh(1, 8 // tensor, tensor, jax.devices()[:8]), "generation")
    return layout if kernels is None else dataclasses.replace(layout, kernels=kernels)


def first_layers(model: Model, count: int) -> Model:
    """Return a model's first layers as a drafter: right often, not always."""
    config = dataclasses.replace(model.config, num_layers=count)
    layers = jax.tree.map(lambda leaf: leaf[:count], model.layers)
    return dataclasses.replace(model, layers=layers, config=config)


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold the samples that one layout wrote by one strategy, and what wrote them."""

    name: str
    target: Model  # as it decodes
    how: GenerationConfig
    samples: dict[int, Sample]

    def margin(self, sample: Sample, count: int) -> float:
        """Return the decision margin of this run's model after `count` tokens of a sample."""
        text = np.concatenate([sample.prompt, sample.tokens[:count]])[None].astype(np.int32)
        places = np.arange(text.shape[1], dtype=np.int32)[None]
        scores = logits(self.target, forward(self.target, text, places)[0])[:, -1]
        key = jnp.array([[self.how.seed, sample.sample_id]], jnp.uint32)
        position = jnp.array([text.shape[1]], jnp.int32)
        return float(decision_margin(scores, key, position, self.how.sampling)[0])


@dataclasses.dataclass
class Tally:
    """Count the tokens that were compared, and the ties among them."""

    tokens: int = 0
    ties: int = 0

    def compare(self, ours: Run, theirs: Run) -> None:
        """Ask each first differing token of a sample for margins below EPS in both runs.

        The rest of that sample is not compared.
        """
        assert ours.samples.keys() == theirs.samples.keys()
        for number, sample in theirs.samples.items():
            pairs = zip(ours.samples[number].tokens, sample.tokens, strict=False)
            same = [a == b for a, b in pairs]
            if all(same):
                assert len(ours.samples[number].tokens) == len(sample.tokens), (
                    f"sample {number} is longer in one of: {ours.name}; {theirs.name}"
                )
                self.tokens += len(same)
                continue
            first = same.index(False)
            margins = ours.margin(sample, first), theirs.margin(sample, first)
            assert max(margins) < EPS, (
                f"sample {number} differs at token {first}, {ours.name} from {theirs.name}:"
                f" {ours.samples[number].tokens[first]} with margin {margins[0]:.2g}, and"
                f" {sample.tokens[first]} with {margins[1]:.2g}"
            )
            self.tokens += first + 1
            self.ties += 1

    def check(self, least: int) -> None:
        """Ask for `least` tokens, and for at most one tie in 10,000 of them."""
        print(json.dumps(dataclasses.asdict(self)))
        assert self.tokens >= least
        assert self.ties <= self.tokens // 10_000, f"{self.ties} ties in {self.tokens} tokens"


def decoding(
    strategy: str, sampling: Sampling, rows: int, stop_tokens: tuple[int, ...]
) -> GenerationConfig:
    """Return how as many samples as rows are decoded, all at one time."""
    return GenerationConfig(
        sampling,
        (trees.parse(strategy),),
        stop_tokens,
        max_rows=rows,
        min_rows=rows,
        max_length=96,
        seed=3,
        history=64,
    )


def roll_out(
    models: tuple[Model, Model | None], layout: Layout, how: GenerationConfig, wanted: list[Request]
) -> Run:
    """Let a layout write the wanted samples, drafted by whatever its strategy asks for."""
    target, drafter = models
    drafter = drafter if any(one.needs_model for one in how.drafters) else None
    samples = {one.sample_id: one for one in generate(target, drafter, wanted, how, layout)}
    assert sorted(samples) == sorted(i for request in wanted for i in request.sample_ids)
    (strategy,) = how.strategies
    if strategy.parents:
        assert any(one.accepted for one in samples.values()), "No draft was accepted."
    name = f"tensor {layout.extent('tensor')}, {trees.name_of(strategy)}, {how.sampling}"
    return Run(name, target, how, samples)


def split_weights(target: Model) -> set[str]:
    """Name the weights that lie in parts over the `tensor` axis."""
    return {
        getattr(key, "key", getattr(key, "name", ""))
        for path, leaf in jax.tree_util.tree_leaves_with_path(target)
        for key in path
        if "tensor" in leaf.sharding.spec
    }


@pytest.fixture(scope="module")
def small():
    """Return what places the random policy, and its first two layers as a drafter, on a layout."""
    model = init(jax.random.key(0), CONFIG)
    assert model.head is not None
    # a law as sharp as a trained model's, so that its logits count beside the noise
    model = dataclasses.replace(model, head=model.head * 2.5)
    drafter = first_layers(model, 2)
    return functools.cache(
        lambda layout: (decoding_weights(model, layout), decoding_weights(drafter, layout))
    )


def small_requests() -> list[Request]:
    """Return 16 prompts of four samples each, of unequal lengths, with two earlier texts."""
    random = np.random.default_rng(0)
    return [
        Request(
            prompt=random.integers(0, CONFIG.vocab_size, random.integers(1, 16)).astype(np.int32),
            sample_ids=tuple(range(4 * i, 4 * i + 4)),
            max_new_tokens=int(random.integers(30, 50)),
            history=tuple(random.integers(0, 300, 20).astype(np.int32) for _ in range(2)),
        )
        for i in range(16)
    ]


@pytest.mark.long
def test_a_model_whose_every_axis_is_split_writes_what_it_writes_whole(small):
    """Under each law the plain text of tensor 1 is that of 2 and 4, plain or drafted."""
    wanted = small_requests()
    stops = tuple(range(8))

    @functools.cache
    def whole(sampling: Sampling) -> Run:
        layout = layout_of(1)
        return roll_out(small(layout), layout, decoding("plain", sampling, 64, stops), wanted)

    tally = Tally()
    for sampling, tensor, strategy, kernels in CASES:
        layout = layout_of(tensor, kernels)
        models = small(layout)
        for model in models:
            assert split_weights(model) == VOCABULARY | FEED_FORWARD | HEADS
        assert len(models[0].embed) == {2: 2560, 4: 3072}[tensor]
        found = roll_out(models, layout, decoding(strategy, sampling, 64, stops), wanted)
        tally.compare(found, whole(sampling))
    tally.check(10_000)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=50, top_p=0.9)], ids=str)
def test_a_real_model_whose_heads_stay_whole_writes_what_it_writes_whole(smollm2, sampling):
    """Nine heads of three groups are no multiple of two: feed-forward and vocabulary are split."""
    model = open_source(smollm2).load(jnp.float32)
    wanted = [
        Request(
            prompt=np.array(one["prompt"], np.int32),
            sample_ids=tuple(range(4 * i, 4 * i + 4)),
            max_new_tokens=8,
            history=(np.array(one["text"], np.int32),),
        )
        for i, one in enumerate(json.loads(GREEDY.read_text())[:8])
    ]
    tally = Tally()
    whole = None
    for tensor, strategy in ((1, "plain"), (2, "lookup-chain-1"), (4, "plain")):
        layout = layout_of(tensor)
        target = decoding_weights(model, layout)
        how = decoding(strategy, sampling, 32, stop_tokens=(2,))
        found = roll_out((target, None), layout, how, wanted)
        if whole is None:
            whole = found
            continue
        assert split_weights(target) == {"embed"} | FEED_FORWARD
        tally.compare(found, whole)
    tally.check(450)
