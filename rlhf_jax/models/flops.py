"""Count FLOPs: of a model's products by its shapes, and of a function by its jaxpr.

The compiler's `cost_analysis()` counts a loop once, whatever its iterations, and a kernel not at
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from typing import cast as typed

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from rlhf_jax.models.transformer import abstract_weights
from rlhf_jax.types import ModelConfig


def product_flops(model: ModelConfig) -> tuple[int, int]:
    """Return the FLOPs of a token's products with the layers, and with the head."""
    of_layers = 2 * sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(model).layers))
    return of_layers, 2 * model.width * (1 if model.scalar_head else model.vocab_size)


def pair_flops(model: ModelConfig) -> int:
    """Return the FLOPs of attention, in all layers, for a token and one that it sees."""
    return 4 * model.num_layers * model.num_heads * model.head_dim


def count_flops(function: Callable, *arguments: Any, turns: int = 1) -> int:
    """Return the FLOPs of all matrix products of a call, on all devices together.

    arguments: arrays or shapes; nothing is computed. Of branches the largest counts. A loop whose
    iterations depend on data, such as attention in packed lines, counts `turns` times.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*arguments), turns)


def jaxpr_flops(jaxpr: ClosedJaxpr | Jaxpr, turns: int = 1) -> int:
    """Return the FLOPs of a traced program, as in `count_flops`."""
    return sum(_flops_of(equation, turns) for equation in jaxpr.eqns)


def _flops_of(equation: JaxprEqn, turns: int) -> int:
    """Return the FLOPs of one equation and its inner programs: two per multiplication."""
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left: Any = equation.invars[0].aval
        out: Any = equation.outvars[0].aval
        return 2 * math.prod(left.shape[axis] for axis in contracted) * math.prod(out.shape)
    if name.startswith("dot_product_attention"):  # cuDNN's, causal: half of each product
        batch, tokens, heads, dim = typed(Any, equation.invars[0].aval).shape
        products = 2 if "_fwd" in name else 5
        return products * batch * heads * dim * tokens**2
    parts = jax.tree.leaves(list(params.values()))
    inside = [jaxpr_flops(part, turns) for part in parts if isinstance(part, (ClosedJaxpr, Jaxpr))]
    if name == "cond":
        return max(inside)
    return sum(inside) * (turns if name == "while" else _turns(name, params))


def _turns(name: str, params: dict[str, Any]) -> int:
    """Return how often an equation runs its inner program: iterations, grid steps, or devices."""
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1
