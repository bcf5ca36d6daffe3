"""Assemble the lookup corpus of a sample: texts of its own prompt, and of others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhf_jax.generation.requests import Sample


def known_texts(sample: Sample, ended: Mapping[int, np.ndarray], size: int) -> np.ndarray:
    """Return the lookup corpus of a sample [size] int32, with -1 after each text.

    Texts of its own prompt come last, the latest at the end, as many as fit; before them texts of
    other prompts, those given with the request and those `ended` since, by request.
    """
    others = [text for request, text in ended.items() if request != sample.request.id]
    texts = (*sample.request.others, *others, *sample.texts)
    joined = np.full(size, -1, np.int32)
    separated = [np.append(text, -1) for text in texts]
    flat = np.concatenate([np.zeros(0, np.int32), *separated])
    kept = flat[max(0, len(flat) - size) :]
    joined[: len(kept)] = kept
    return joined


def keep_latest(ended: dict[int, np.ndarray], request: int, text: np.ndarray, size: int) -> None:
    """Keep a text as its request's latest, and of others as many as fit into `size` tokens."""
    ended.pop(request, None)
    ended[request] = text
    while sum(map(len, ended.values())) - len(next(iter(ended.values()))) >= size:
        del ended[next(iter(ended))]
