"""Speculative decoding: a drafter proposes drafts, and the target verifies and accepts them."""

# Importing the package registers its drafters, so that strategies can name them.
from rlhf_jax.generation.speculative import drafters as drafters
