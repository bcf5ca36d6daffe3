"""The loss of a critic's values, and their explained variance."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.types import Array


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, clip: float
) -> jax.Array:
    """Compute max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token.

    values, old_values and returns [B, T] float32, mask [B, T] bool -> [B, T] float32, 0 where
    masked out (PPO's code, Dhariwal et al. 2017; Engstrom et al. 2020, 3).
    """
    chex.assert_equal_shape([values, old_values, returns, mask])
    near = jnp.clip(values, old_values - clip, old_values + clip)
    return jnp.where(mask, 0.5 * jnp.maximum((values - returns) ** 2, (near - returns) ** 2), 0.0)


def explained_variance(values: Array, returns: Array, mask: Array) -> float:
    """Compute 1 - var(returns - values) / var(returns) over the tokens of the mask.

    Host arrays [B, T]. 1 is a perfect critic, 0 one no better than the mean; also 0 if all returns
    are equal.
    """
    values = np.asarray(values, np.float64)[mask]
    returns = np.asarray(returns, np.float64)[mask]
    variance = returns.var() if returns.size else 0.0
    return float(1.0 - (returns - values).var() / variance) if variance else 0.0
