"""The batch of token sequences of a step, and its packed form."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import numpy as np
from flax import struct

from rlhf_jax.sequences.columns import declaration
from rlhf_jax.types import Array

T = TypeVar("T", bound="Sequences | PackedSequences")


@struct.dataclass
class Sequences:
    """Hold token sequences, prompt first, padded on the right, with columns.

    The tokens before the first one under a sequence's mask are its prompt. Samples of one prompt
    are neighbours.
    """

    tokens: Array  # [B, T] int32
    mask: Array  # [B, T] bool, the tokens in the loss: of responses
    group: Array  # [B] int32, equal for sequences with one prompt
    columns: dict[str, Array] = dataclasses.field(default_factory=dict)  # as declared in `COLUMNS`

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of columns of tokens, sequences and the whole batch."""
        return {"token": self.mask.shape, "sequence": self.group.shape, "batch": ()}

    def with_columns(self, **columns: Array) -> Sequences:
        """Return the sequences with more columns; ValueError if one is not as declared."""
        return _with_columns(self, columns)

    def reading(self, *names: str) -> Sequences:
        """Return the sequences with only these columns, if present."""
        kept = {name: column for name, column in self.columns.items() if name in names}
        return dataclasses.replace(self, columns=kept)

    def take(self, rows: np.ndarray) -> Sequences:
        """Return some rows of host arrays; columns of the whole batch are kept."""

        def chosen(name: str, column: Array) -> Array:
            return column if declaration(name).per == "batch" else column[rows]

        return Sequences(
            self.tokens[rows],
            self.mask[rows],
            self.group[rows],
            {name: chosen(name, column) for name, column in self.columns.items()},
        )

    def select(self, rows: np.ndarray, multiple: int) -> Sequences:
        """Return some rows of host arrays, filled up with masked-out ones to a multiple of rows."""
        missing = max(multiple, len(rows) + -len(rows) % multiple) - len(rows)
        selected = self.take(np.concatenate([rows, np.zeros(missing, int)]))
        present = np.arange(len(selected.mask)) < len(rows)
        return dataclasses.replace(selected, mask=selected.mask & present[:, None])

    def spread(self, places: np.ndarray, rows: int) -> Sequences:
        """Return host arrays with each row at its place among `rows`, masked-out ones elsewhere."""
        source = np.zeros(rows, int)
        source[places] = np.arange(len(places))
        present = np.isin(np.arange(rows), places)
        spread = self.take(source)
        return dataclasses.replace(spread, mask=spread.mask & present[:, None])

    def first_token(self) -> Sequences:
        """Return sequences of host arrays with the first token under the mask alone."""
        return dataclasses.replace(self, mask=self.mask & (np.cumsum(self.mask, axis=1) == 1))

    def past_end(self) -> Sequences:
        """Return sequences of host arrays whose masks include the place after the last token.

        There a model has read a whole sequence, and a scalar head rates it.
        """

        def wider(name: str, column: Array) -> Array:
            if declaration(name).per != "token":
                return column
            return np.pad(column, [(0, 0), (0, 1), *[(0, 0)] * (column.ndim - 2)])

        mask = np.pad(self.mask, ((0, 0), (0, 1)))
        ends = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
        rows = np.flatnonzero(mask.any(axis=1))
        mask[rows, ends[rows]] = True
        return dataclasses.replace(
            self,
            tokens=np.pad(self.tokens, ((0, 0), (0, 1))),
            mask=mask,
            columns={name: wider(name, column) for name, column in self.columns.items()},
        )

    def on_host(self) -> Sequences:
        """Return the sequences as host arrays."""
        return jax.tree.map(np.asarray, self)


@struct.dataclass
class PackedSequences:
    """Hold packed sequences with shared prompts: a line of C tokens for each of S row shards.

    A prompt and each sample's continuation of it are segments, each contiguous. A token sees the
    earlier tokens of its own segment and of its prompt's. There is also room for W = C predicted
    tokens and R = C sequences. Columns of tokens are [S, W], at predicted tokens; those of
    sequences [S, R]. Padding is zero, -1 in numbers of segments and blocks, False in the mask.
    """

    tokens: Array  # [S, C] int32
    positions: Array  # [S, C] int32, of a token in its sequence
    segments: Array  # [S, C, 2] int32, a token's segment, and its prompt's
    pairs: Array  # [S, P, 2] int32, blocks of the line: tokens of the first see some of the second
    predict_from: Array  # [S, W] int32, the line's index of the token before a predicted one
    targets: Array  # [S, W] int32, the predicted tokens
    mask: Array  # [S, W] bool
    segment_ids: Array  # [S, W] int32, the sequence of a predicted token
    groups: Array  # [S, R] int32, of a sequence, counted from 0 in each line; -1 behind the last
    columns: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of columns of predicted tokens, sequences and the whole batch."""
        return {"token": self.mask.shape, "sequence": self.groups.shape, "batch": ()}

    def with_columns(self, **columns: Array) -> PackedSequences:
        """Return the sequences with more columns; ValueError if one is not as declared."""
        return _with_columns(self, columns)


def _with_columns(batch: T, columns: dict[str, Array]) -> T:
    for name, column in columns.items():
        declared = declaration(name)
        shape = batch.shapes[declared.per]
        actual = tuple(np.shape(column))
        fits = actual[: len(shape)] == shape and len(actual) == len(shape) + declared.width
        if not fits or (declared.dtype and column.dtype != declared.dtype):
            more = " and one more axis" * declared.width
            raise ValueError(
                f"Column {name!r} must be {declared.dtype}{list(shape)}{more}; it is"
                f" {column.dtype}{list(actual)}."
            )
    return dataclasses.replace(batch, columns={**batch.columns, **columns})
