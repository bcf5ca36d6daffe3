"""Add a drafter from outside the package: python docs/examples/new_drafter.py

It proposes that the last token repeats. The drafts never change the text.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import protocol, tree
from rlhf_jax.generation.speculative.drafters.search import Found, SearchDrafter
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy.acceptance import RANKS
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.types import ModelConfig


class ToyDrafter(SearchDrafter):
    name = "toy"

    def search(self, state, siblings, depth):
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        tokens = jnp.full((len(last), depth, RANKS), -1).at[:, :, 0].set(last)
        return Found(tokens, confidence=jnp.ones(len(last), jnp.int8))


protocol.register(ToyDrafter())
model = unstack(init(jax.random.key(0), ModelConfig("llama", 300, 64, 96, 3, 4, 2, 16, 128)))
request = Request(np.array([5, 9, 2], np.int32), sample_ids=(0, 1, 2, 3), max_new_tokens=40)
for name in ("plain", "toy-chain-2"):
    how = GenerationConfig(Sampling(0.2), (tree.parse(name),), (), 4, max_length=64, seed=0)
    samples = sorted(generate(model, None, [request], how), key=lambda one: one.sample_id)
    print(f"{name}: {sum(one.rounds for one in samples)} rounds,", [one.tokens for one in samples])
