"""tunix's vanilla sampler as a worker of compare.py: float32, CPU. Usage: tunix_worker.py FOLDER

Its Llama model (0.1.7) rotates by its own default theta whatever the configuration says, and its
loop runs the model once more than there are tokens: the text differs from the other engines', the
work of a step not.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from llama_of_tunix import read_config
from protocol import cores, serve
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import params


class Ids:
    """A tokenizer whose texts are lists of ids; no id of a model ends a sample or is padding."""

    def encode(self, ids: list[int]) -> list[int]:
        return ids

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return -2


jax.config.update("jax_platforms", "cpu")
folder = Path(sys.argv[1])
config = read_config(folder)
model = params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
samplers: dict[int, Sampler] = {}


def sample(prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
    length = len(prompts[0])
    slots = length + new_tokens
    if slots not in samplers:
        cache = CacheConfig(slots, config.num_layers, config.num_kv_heads, config.head_dim)
        samplers[slots] = Sampler(model, Ids(), cache)
    # Without top_p the sampler is greedy; top_p 1 and no top_k is its path without truncation.
    out = samplers[slots](
        prompts,
        new_tokens,
        max_prompt_length=length,
        seed=seed,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    return [ids.tolist() for ids in out.tokens]


serve(("google-tunix", "jax", "jaxlib", "flax"), cores(), sample)
