"""The weights as generation wants them."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_kernels.shapes import BLOCK
from rlhf_jax import mesh as meshes
from rlhf_jax.model.transformer import cast, pad_vocab, unstack
from rlhf_jax.types import Model


def decoding_weights(policy: Model, dtype: DTypeLike, mesh: Mesh | None = None) -> Model:
    """Return a policy as generation wants it: layers unrolled, cast, split over `tensor` only.

    On a CPU a tied head is copied as [M, V], which is read faster than the embedding the other way
    round. Where the vocabulary is split, each device has whole blocks of the two-level draw.
    """
    return _decoding_weights(policy, dtype, mesh, jax.default_backend() == "cpu")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decoding_weights(policy: Model, dtype: DTypeLike, mesh: Mesh | None, untie: bool) -> Model:
    model = unstack(cast(policy, dtype))
    if untie and model.head is None:
        model = dataclasses.replace(model, head=model.embed.T)
    if mesh is None:
        return model
    if mesh.shape["tensor"] > 1 and not model.config.scalar_head:
        model = pad_vocab(model, BLOCK * mesh.shape["tensor"])
    shardings = meshes.model_shardings(model, mesh, "generation")
    return jax.lax.with_sharding_constraint(model, shardings)
