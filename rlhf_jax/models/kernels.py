"""Run the kernels of decoding over the mesh.

Each device runs them on its own rows and heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from pallas_kernels import BLOCK, Shape, implementation
from pallas_kernels.verify_head import Parts, combine
from rlhf_jax.mesh import ROW_AXES, Layout, on_each
from rlhf_jax.models.transformer import head_of
from rlhf_jax.models.weight import OutputFirst
from rlhf_jax.types import Model, ModelConfig


def shape_of(config: ModelConfig) -> Shape:
    """Return the properties of a model that the choice of kernels depends on."""
    return Shape(
        heads=config.num_heads,
        groups=config.num_kv_heads,
        dim=config.head_dim,
        width=config.width,
        vocab=config.vocab_size,
        layers=config.num_layers,
        tied=config.tied,
    )


def verify_head(layout: Layout) -> Callable[..., Parts]:
    """Return the function that computes the `Parts` of a model's logits at hidden [B, Q, M].

    The block noise is [B, Q, blocks], the temperature [B, Q]; every leaf of the result begins with
    [B, Q]. Each device takes its rows and its part of the vocabulary, which must be whole blocks:
    `decoding.decoding_weights`.
    """
    run = implementation("verify_head", layout.kernels)

    def parts(model: Model, hidden: Array, noise: Array, temperature: Array) -> Parts:
        """Compute the parts of all nodes of all rows."""
        head_weight = head_of(model)
        tied = isinstance(head_weight, OutputFirst)
        vocab = model.config.vocab_size
        head = head_weight.weight if tied else head_weight
        of = functools.partial(run, tied=tied)

        def local(hidden: Array, head: Array, noise: Array, temperature: Array) -> Parts:
            """Compute the parts of one device's share of the head, and combine those of all."""
            place = jax.lax.axis_index("tensor")
            held = head.shape[0 if tied else 1]
            known = jnp.clip(vocab - place * held, 0, held)
            parts_found = of(hidden, head, noise, temperature, known)
            return combine(parts_found, "tensor", place * (held // BLOCK))

        flat = [x.reshape(-1, *x.shape[2:]) for x in (hidden, noise, temperature)]
        if layout.mesh is None:
            parts_found = of(flat[0], head, *flat[1:], vocab)
        else:
            rows = PartitionSpec(ROW_AXES)
            words = PartitionSpec("tensor") if tied else PartitionSpec(None, "tensor")
            specs = (rows, words, PartitionSpec(ROW_AXES, "tensor"), rows)
            parts_found = on_each(local, layout, specs, rows)(flat[0], head, *flat[1:])
        return jax.tree.map(
            lambda leaf: leaf.reshape(*hidden.shape[:2], *leaf.shape[1:]), parts_found
        )

    return parts


def token_logprobs(layout: Layout) -> Callable[..., tuple[Array, Array]] | None:
    """Return `pallas_kernels.logprobs.token_logprobs` by a kernel; None without one.

    Each device takes its rows and, if the tensor axis divides the vocabulary, its part of that.
    """
    if layout.kernels.logprobs == "reference":
        return None
    run = implementation("logprobs", layout.kernels)
    if layout.mesh is None:
        return run

    def of_rows(
        hidden: Array, head: Array, targets: Array, *, temperature: float, tied: bool
    ) -> tuple[Array, Array]:
        """Compute both numbers of each row, on the device that holds it."""
        rows = PartitionSpec(ROW_AXES)
        words = layout.fit(("tensor", None) if tied else (None, "tensor"), head.shape)
        axis = "tensor" if "tensor" in words else None

        def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
            """Run the kernel on one device's part, in which targets count from its first token."""
            first = jax.lax.axis_index("tensor") * head.shape[0 if tied else 1] if axis else 0
            return run(hidden, head, targets - first, temperature=temperature, tied=tied, axis=axis)

        return on_each(local, layout, (rows, words, rows), rows)(hidden, head, targets)

    return of_rows
