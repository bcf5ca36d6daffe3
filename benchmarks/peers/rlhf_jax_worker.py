"""rlhf_jax as a worker of compare.py: plain decoding, float32, CPU. Usage: rlhf_jax_worker.py
FOLDER
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from protocol import cores, serve

from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.files import huggingface

jax.config.update("jax_platforms", "cpu")
layout = Layout(make_mesh(), "generation")
target = decoding_weights(huggingface.load(Path(sys.argv[1]), jnp.float32), layout)


def sample(prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
    requests = [
        Request(np.array(ids, np.int32), (row,), new_tokens) for row, ids in enumerate(prompts)
    ]
    slots = len(prompts[0]) + new_tokens
    decoding = GenerationConfig(
        Sampling(),
        (tree.PLAIN,),
        stop_tokens=(),
        max_rows=len(prompts),
        max_length=slots,
        seed=seed,
    )
    return [found.tokens for found in generate(target, None, requests, decoding, layout)]


serve(("jax", "jaxlib"), cores(), sample)
