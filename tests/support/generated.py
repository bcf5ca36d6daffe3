"""Texts of small models, and what makes two of them equal."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from margins import decision_margin
from tiny_stage import requests

from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.models.transformer import forward, logits

STOP = 7
CORE = ("plain", "lookup-chain-4", "model-chain-3", "lookup-tree-3x2", "model-tree-2x2x1")


def decoding(strategy: str = "plain", **changes) -> GenerationConfig:
    base = GenerationConfig(
        Sampling(1.0),
        (trees.parse(strategy),),
        (STOP,),
        max_rows=5,
        max_length=64,
        seed=3,
        history=64,
    )
    return dataclasses.replace(base, **changes)


def run(target, drafter, how: GenerationConfig, wanted=None, **options):
    wanted = requests() if wanted is None else wanted
    drafter = drafter if any(one.needs_model for one in how.drafters) else None
    samples = list(generate(target, drafter, wanted, how, **options))
    assert sorted(s.sample_id for s in samples) == sorted(i for r in wanted for i in r.sample_ids)
    return {sample.sample_id: sample for sample in samples}


def assert_equal(target, ours, theirs, how: GenerationConfig, eps: float = 1e-3) -> None:
    """Equal texts, but for ties: a first difference needs a decision margin below eps; 1 in 10,000
    tokens at most.
    """
    ties = 0
    for name, sample in theirs.items():
        pairs = itertools.zip_longest(ours[name].tokens, sample.tokens)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            continue
        text = np.concatenate([sample.prompt, sample.tokens[:first]])[None].astype(np.int32)
        places = np.arange(text.shape[1], dtype=np.int32)[None]
        scores = logits(target, forward(target, text, places)[0])[:, -1]
        key = jnp.array([[how.seed, name]], jnp.uint32)
        margin = decision_margin(scores, key, jnp.array([text.shape[1]], jnp.int32), how.sampling)
        assert float(margin[0]) < eps, (
            f"sample {name} differs at token {first} with margin {margin[0]}"
        )
        ties += 1
    assert ties <= sum(len(s.tokens) for s in theirs.values()) // 10_000
