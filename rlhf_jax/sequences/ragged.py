"""Sequences as flat arrays without padding, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.columns import declaration


def ragged(batch: Sequences) -> dict[str, np.ndarray]:
    """Return host arrays without what follows a sequence's last token under the mask.

    The lengths are "lengths" [B], a column is "column/NAME"; columns of the whole batch are left
    out.
    """
    length = batch.mask.shape[1]
    places = np.arange(length)
    lengths = np.where(batch.mask, places + 1, 0).max(axis=1, initial=0)
    present = places < lengths[:, None]
    flat = {
        "lengths": lengths,
        "group": batch.group,
        "tokens": batch.tokens[present],
        "mask": batch.mask[present],
    }
    for name, column in batch.columns.items():
        per = declaration(name).per
        if per != "batch":
            flat[f"column/{name}"] = column[present] if per == "token" else column
    return flat


def padded(flat: Mapping[str, np.ndarray], length: int) -> Sequences:
    """Return what `ragged` was given, padded to `length` tokens or to the longest sequence."""
    lengths = np.asarray(flat["lengths"])
    length = max(length, int(lengths.max(initial=0)))
    present = np.arange(length) < lengths[:, None]

    def spread(values: np.ndarray) -> np.ndarray:
        array = np.zeros((*present.shape, *values.shape[1:]), values.dtype)
        array[present] = values
        return array

    columns = {
        name.removeprefix("column/"): values
        for name, values in flat.items()
        if name.startswith("column/")
    }
    return Sequences(
        spread(flat["tokens"]),
        spread(flat["mask"]),
        np.asarray(flat["group"]),
        {
            name: spread(values) if declaration(name).per == "token" else np.asarray(values)
            for name, values in columns.items()
        },
    )


def joined(first: Sequences, second: Sequences) -> Sequences:
    """Return the rows of both, with the columns that both have; groups keep their numbers."""
    length = max(first.mask.shape[1], second.mask.shape[1])
    one, other = (padded(ragged(batch), length) for batch in (first, second))
    return Sequences(
        np.concatenate([one.tokens, other.tokens]),
        np.concatenate([one.mask, other.mask]),
        np.concatenate([one.group, other.group]),
        {
            name: np.concatenate([one.columns[name], other.columns[name]])
            for name in one.columns.keys() & other.columns.keys()
        },
    )
