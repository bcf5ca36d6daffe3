"""Advantages from rewards."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlhf_jax.types import Array


def group_advantages(rewards: Array, group_size: int, eps: float = 1e-6) -> Array:
    """Group-relative advantages: A_i = (r_i - mean(r)) / std(r) within each group of one prompt's samples.

    rewards [B] float32, groups contiguous, B a multiple of `group_size` -> [B]. The standard deviation is the
    population's; a group whose deviation is at most `eps` teaches nothing and gets 0 (DeepSeekMath, Shao et
    al. 2024, 4.1.2).
    """
    chex.assert_rank(rewards, 1)
    if rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards do not fall into groups of {group_size}.")
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    std = jnp.sqrt((centred**2).mean(axis=1, keepdims=True))
    return jnp.where(std > eps, centred / jnp.maximum(std, eps), 0.0).reshape(-1)
