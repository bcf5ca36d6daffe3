"""The weights that decoding reads: the policy's own, and those of the drafter beside it."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.typing import DTypeLike

from pallas_kernels.shapes import BLOCK
from rlhf_jax.mesh import model_shardings
from rlhf_jax.model.transformer import cast, pad_vocab, unstack
from rlhf_jax.types import Model


def decoding_weights(
    policy: Model, dtype: DTypeLike, mesh: jax.sharding.Mesh | None = None
) -> Model:
    """Return the policy as generation wants it: layers unrolled, in `dtype`.

    The weights are split over the mesh's tensor axis only. On a CPU a tied head is copied as
    [M, V], which is read faster than the embedding the other way round. Where the vocabulary is
    split, it is padded, so that each device has whole blocks of the two-level draw.
    """
    return _decoding_weights(policy, dtype, mesh, untie=jax.default_backend() == "cpu")


@functools.partial(jax.jit, static_argnames=("dtype", "mesh", "untie"))
def _decoding_weights(
    policy: Model, dtype: DTypeLike, mesh: jax.sharding.Mesh | None, *, untie: bool
) -> Model:
    model = unstack(cast(policy, dtype))
    if untie and model.head is None:
        model = dataclasses.replace(model, head=model.embed.T)
    if mesh is None:
        return model
    if mesh.shape["tensor"] > 1 and not model.config.scalar_head:
        model = pad_vocab(model, BLOCK * mesh.shape["tensor"])
    return jax.lax.with_sharding_constraint(model, model_shardings(model, mesh, "generation"))


def student_for(
    target: Model, drafter: Model | None, mesh: jax.sharding.Mesh | None = None
) -> Model | None:
    """Return the drafter that runs beside the decoding weights `target`.

    A student, which has layers and a norm alone, is unrolled in the dtype of `target`, with its
    very embedding and head. A drafter that has its own, or None, is returned as it is.
    """
    if drafter is None or drafter.embed is not None:
        return drafter
    return completed(_unroll_student(drafter, target.norm.dtype, mesh), target)


@functools.partial(jax.jit, static_argnames=("dtype", "mesh"))
def _unroll_student(student: Model, dtype: DTypeLike, mesh: jax.sharding.Mesh | None) -> Model:
    model = unstack(cast(student, dtype))
    if mesh is None:
        return model
    return jax.lax.with_sharding_constraint(model, model_shardings(model, mesh, "generation"))


def completed(student: Model, policy: Model) -> Model:
    """Return the whole model of a student's layers and norm, and the policy's embedding and head.

    Nothing is copied.
    """
    return dataclasses.replace(student, embed=policy.embed, head=policy.head)
