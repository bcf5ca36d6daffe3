"""Speculative decoding: drafts are proposed by a drafter, verified by the target, and accepted."""

# Importing the package registers the drafters that come with it, so that strategies can name them.
from rlhf_jax.generation.speculative import drafters as drafters
