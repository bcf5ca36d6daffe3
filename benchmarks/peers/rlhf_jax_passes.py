"""rlhf_jax's forward and backward passes as a worker of gpu/passes.py: log-probs of all tokens as
training computes them, with the sum of their gradients. Usage: rlhf_jax_passes.py SETTINGS.json
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from protocol import Turns

from benchmarks.gpu.setting import compute_dtype, layouts
from rlhf_jax.inference.logprobs import token_logprobs
from rlhf_jax.models.files.huggingface_config import read_config
from rlhf_jax.models.transformer import cast, init
from rlhf_jax.runtime.compilation import configure_jax

options = json.loads(Path(sys.argv[1]).read_text())
configure_jax(options["deterministic"], options["programs"])
turns = Turns(("jax", "jaxlib"))
config = read_config(Path(options["model"]))
layout = dataclasses.replace(layouts(config)[0][options["kernels"]], role="training")
model = jax.jit(init, static_argnums=(1,))(jax.random.key(0), config)
tokens = jax.random.randint(
    jax.random.key(1), (options["rows"], options["tokens"]), 0, config.vocab_size, jnp.int32
)


@functools.partial(jax.jit, static_argnames="remat")
def passes(model, tokens, remat):
    """Compute the mean loss of a token, and its gradient, in float32 as the weights are."""

    def loss(model):
        own = cast(model, compute_dtype())
        return -token_logprobs(own, tokens, temperature=1.0, layout=layout, remat=remat).mean()

    return jax.value_and_grad(loss)(model)


while True:
    turns.begin()
    loss, gradient = jax.block_until_ready(passes(model, tokens, remat=options["remat"]))
    del gradient
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    turns.note(loss=float(loss), peak_device_bytes=peak)
