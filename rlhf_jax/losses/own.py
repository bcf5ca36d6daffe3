"""Check the output shapes of a user's equation before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rlhf_jax.runtime.foreign import one_line

SHAPE = (4, 6)  # of the test arrays: rows or samples, and tokens


def refusal(equation: Callable[..., Any], *dtypes: DTypeLike) -> str:
    """Return why an equation does not return one float per token; '' if it does.

    equation: takes an array [S, W] of each of `dtypes`; all of its results must have that shape.
    """
    try:
        outputs = jax.eval_shape(equation, *(jax.ShapeDtypeStruct(SHAPE, own) for own in dtypes))
        results = [(one.shape, one.dtype) for one in jax.tree.leaves(outputs)]
    except Exception as error:  # user code may raise anything
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
