"""The drafters that come with the package, one file each."""

from rlhf_jax.generation.speculative.drafters.lookup import LOOKUP
from rlhf_jax.generation.speculative.drafters.model import MODEL
from rlhf_jax.generation.speculative.drafters.replay import REPLAY
from rlhf_jax.generation.speculative.protocol import register

for _drafter in (LOOKUP, REPLAY, MODEL):
    register(_drafter)
