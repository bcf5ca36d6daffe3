"""Weights of tokens in the loss of a minibatch."""

from __future__ import annotations

import numpy as np


def token_mean_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / tokens, so that every token of a minibatch weighs the same.

    mask [n, T] bool -> [n, T] float32 (DAPO, Yu et al. 2025, eq. 8).
    """
    del max_new_tokens
    return (mask / max(1, mask.sum())).astype(np.float32)


def sequence_mean_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / (rows * tokens of the row), so that every response weighs the same.

    mask [n, T] bool -> [n, T] float32; rows without a token are not counted (DeepSeekMath, Shao et
    al. 2024, eq. 3).
    """
    del max_new_tokens
    tokens = mask.sum(axis=1, keepdims=True)
    return (mask / np.maximum(1, tokens) / max(1, (tokens > 0).sum())).astype(np.float32)


def constant_weights(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Compute mask / (rows * max_new_tokens): a constant weight, independent of lengths.

    mask [n, T] bool -> [n, T] float32; rows without a token are not counted. max_new_tokens: the
    longest possible response (Dr. GRPO, Liu et al. 2025, 3.2).
    """
    return (mask / (max(1, mask.any(axis=1).sum()) * max_new_tokens)).astype(np.float32)


# By the values of training.aggregate.
AGGREGATES = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
    "constant": constant_weights,
}
