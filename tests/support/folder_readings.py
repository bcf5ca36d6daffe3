"""What this package reads of a folder, as golden/make.py writes what transformers does."""

from __future__ import annotations

from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import transformer
from rlhf_jax.models.files.source import Source
from rlhf_jax.types import Model

TOLERANCE = 2e-4


@jax.jit
def last_logits(model: Model, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return transformer.logits(model, transformer.forward(model, tokens, positions)[0])[0, -1]


def read(source: Source) -> dict[str, Any]:
    """What golden/make.py writes of a folder, by this package."""
    tokenizer = source.tokenizer
    tokens = jnp.asarray([folders.TOKENS], jnp.int32)
    ids = [tokenizer.encode(text) for text in folders.TEXTS]
    found = {
        "logits": np.asarray(last_logits(source.load(jnp.float32), tokens)),
        "ids": ids,
        "texts": [tokenizer.decode(one) for one in ids],
        "special": dict(tokenizer.special),
    }
    if tokenizer.template is not None:
        found["rendered"] = [
            tokenizer.render(folders.CHAT, False, tools=tools) for tools in (None, folders.TOOLS)
        ]
    return found
