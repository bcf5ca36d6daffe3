"""The batch of token sequences that a step learns from, and its packed form."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import numpy as np
from flax import struct

from rlhf_jax.sequences.columns import check_column, declaration
from rlhf_jax.types import Array

T = TypeVar("T", bound="Sequences | PackedSequences")


@struct.dataclass
class Sequences:
    """Hold token sequences, prompt first, padded on the right, and what is known of them.

    Before the first token under a sequence's mask is its prompt. Samples of one prompt are
    neighbours.
    """

    tokens: Array  # [B, T] int32
    mask: Array  # [B, T] bool, the tokens that are learned from: of responses
    group: Array  # [B] int32, the same of sequences with one prompt
    columns: dict[str, Array] = dataclasses.field(default_factory=dict)  # as `COLUMNS` declares

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of columns of tokens, sequences and the whole batch."""
        return {"token": self.mask.shape, "sequence": self.group.shape, "batch": ()}

    def with_columns(self, **columns: Array) -> Sequences:
        """Return the sequences with more columns; ValueError where one is not as declared."""
        return _with_columns(self, columns)

    def reading(self, *names: str) -> Sequences:
        """Return the sequences with these columns alone, of those that are there."""
        kept = {name: column for name, column in self.columns.items() if name in names}
        return dataclasses.replace(self, columns=kept)

    def take(self, rows: np.ndarray) -> Sequences:
        """Return some rows of host arrays; what is known of the batch stays."""

        def chosen(name: str, column: Array) -> Array:
            return column if declaration(name).per == "batch" else column[rows]

        return Sequences(
            self.tokens[rows],
            self.mask[rows],
            self.group[rows],
            {name: chosen(name, column) for name, column in self.columns.items()},
        )

    def first_token(self) -> Sequences:
        """Return sequences of host arrays with the first token under the mask alone."""
        return dataclasses.replace(self, mask=self.mask & (np.cumsum(self.mask, axis=1) == 1))

    def past_end(self) -> Sequences:
        """Return sequences of host arrays with the place behind the last token under the mask, too.

        Before that place a model has read a whole sequence: there a scalar head says its worth.
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
    """Hold sequences token by token, prompts shared: a line of C tokens for each of S row shards.

    A prompt and what follows it of each of its samples are segments, each in one piece. A token
    sees what comes before it of its own segment and of its prompt's. There is room for C predicted
    tokens and C sequences, too: W and R. Columns of tokens are [S, W], of the predicted ones; those
    of sequences [S, R]. Padding is zero, -1 in numbers of segments and blocks, False in the mask.
    """

    tokens: Array  # [S, C] int32
    positions: Array  # [S, C] int32, of a token in its sequence
    segments: Array  # [S, C, 2] int32, a token's segment, and its prompt's
    pairs: Array  # [S, P, 2] int32, blocks of the line: tokens of the first see some of the second
    predict_from: Array  # [S, W] int32, where in the line the token before a predicted one is
    targets: Array  # [S, W] int32, the tokens that are predicted
    mask: Array  # [S, W] bool
    segment_ids: Array  # [S, W] int32, the sequence that a predicted token belongs to
    groups: Array  # [S, R] int32, of a sequence, counted from 0 in each line; -1 behind the last
    columns: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of columns of predicted tokens, sequences and the whole batch."""
        return {"token": self.mask.shape, "sequence": self.groups.shape, "batch": ()}

    def with_columns(self, **columns: Array) -> PackedSequences:
        """Return the sequences with more columns; ValueError where one is not as declared."""
        return _with_columns(self, columns)


def _with_columns(batch: T, columns: dict[str, Array]) -> T:
    for name, column in columns.items():
        check_column(name, column, batch.shapes)
    return dataclasses.replace(batch, columns={**batch.columns, **columns})
