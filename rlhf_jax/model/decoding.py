"""The weights that decoding reads: the policy's own, and those of the drafter beside it."""

from __future__ import annotations

import dataclasses
import functools

import jax

from pallas_kernels.shapes import BLOCK
from rlhf_jax.mesh import ONE_DEVICE, Layout, bring_weights, pin_weights
from rlhf_jax.model.transformer import cast, pad_vocab, unstack
from rlhf_jax.types import Model


def decoding_weights(policy: Model, layout: Layout = ONE_DEVICE) -> Model:
    """Return the policy as generation wants it: layers unrolled, in the layout's dtype and places.

    On a CPU a tied head is copied as [M, V], which is read faster than the embedding the other way
    round. Where the vocabulary is split, it is padded, so that each device has whole blocks of the
    two-level draw.
    """
    policy = bring_weights(policy, layout)
    return _decoding_weights(policy, layout, untie=jax.default_backend() == "cpu")


@functools.partial(jax.jit, static_argnames=("layout", "untie"))
def _decoding_weights(policy: Model, layout: Layout, *, untie: bool) -> Model:
    model = unstack(cast(policy, layout.dtype))
    if untie and model.head is None:
        model = dataclasses.replace(model, head=model.embed.T)
    if layout.extent("tensor") > 1 and not model.config.scalar_head:
        model = pad_vocab(model, BLOCK * layout.extent("tensor"))
    return pin_weights(model, layout)


def student_for(target: Model, drafter: Model | None, layout: Layout = ONE_DEVICE) -> Model | None:
    """Return the drafter that runs beside the decoding weights `target`.

    A student, which has layers and a norm alone, is unrolled as `target` is, with its
    very embedding and head. A drafter that has its own, or None, is returned as it is.
    """
    if drafter is None or drafter.embed is not None:
        return drafter
    return completed(_unroll_student(bring_weights(drafter, layout), layout), target)


@functools.partial(jax.jit, static_argnames=("layout",))
def _unroll_student(student: Model, layout: Layout) -> Model:
    return pin_weights(unstack(cast(student, layout.dtype)), layout)


def completed(student: Model, policy: Model) -> Model:
    """Return the whole model of a student's layers and norm, and the policy's embedding and head.

    Nothing is copied.
    """
    return dataclasses.replace(student, embed=policy.embed, head=policy.head)
