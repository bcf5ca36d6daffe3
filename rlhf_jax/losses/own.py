"""Ask an equation of a user's own for its shapes, before a run pays for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rlhf_jax.runtime.foreign import one_line

SHAPE = (4, 6)  # of the arrays that are shown to an equation: rows or samples, and tokens


def refusal(equation: Callable[..., Any], *dtypes: DTypeLike) -> str:
    """Say why an equation does not give one float for each token of its arrays; '' where it does.

    equation: takes an array [S, W] of each of `dtypes`; all that it returns must have that shape.
    """
    try:
        found = jax.eval_shape(equation, *(jax.ShapeDtypeStruct(SHAPE, own) for own in dtypes))
        results = [(one.shape, one.dtype) for one in jax.tree.leaves(found)]
    except Exception as error:  # the code is a user's and may raise anything
        return f"fails: {one_line(error)}"
    wrong = [
        f"{dtype.name}{[*shape]}"
        for shape, dtype in results
        if shape != SHAPE or not jnp.issubdtype(dtype, jnp.floating)
    ]
    if wrong or not results:
        return (
            f"gives {' and '.join(wrong) or 'nothing'} for arrays of {[*SHAPE]}; it must give a"
            " float for each token and leave sums and means to the run"
        )
    return ""
