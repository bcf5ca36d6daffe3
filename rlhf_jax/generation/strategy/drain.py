"""Predict the remaining time of a batch that no waiting sample joins.

Its rows gain at different paces and end at different times, so that most tokens per second now is
not the earliest end: rows with good drafts end first, and the others are left over in a small
batch, which uses the machine badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.strategy.acceptance import CLASSES

# The cells, of 2 * CLASSES, of rows of a seen prompt whose text has left their earlier one, and
# whose text follows it.
DIVERGED = 1 - CLASSES
FOLLOWING = -1
# Of the rows that will diverge, the parts that have done so by the middle of each third.
_DIVERGED_PARTS = (1 / 6, 3 / 6, 5 / 6)


class RowGroups(NamedTuple):
    """Hold C groups of rows, each of which gains at one pace until it ends."""

    # [C, S] tokens of a row's round by each strategy, the first being plain decoding
    pace: np.ndarray
    counts: np.ndarray  # [C] rows
    left: np.ndarray  # [C] remaining tokens of a row


def group_rows(pace: np.ndarray, counts: np.ndarray, left: np.ndarray, stay: float) -> RowGroups:
    """Group rows by cell, and split those that follow their earlier text by expected divergence.

    pace [2 * CLASSES, S] tokens of a row's round, by seen prompt and class; counts, left [2 *
    CLASSES]: rows, and their remaining tokens, summed; stay: the chance that a text that follows
    its earlier one does so for one more token.
    """
    # Lists are faster than arrays for so few numbers.
    rows = counts.tolist()
    tokens = left.tolist()
    some = [cell for cell, count in enumerate(rows) if count]
    group_counts = [rows[cell] for cell in some]
    spans = [tokens[cell] / rows[cell] for cell in some]
    if not rows[FOLLOWING]:
        return RowGroups(pace[some], np.array(group_counts, float), np.array(spans))

    # The point of divergence is geometric; `whole` of them never diverge within their span.
    span = spans[-1]
    whole = stay**span
    parts = [[math.log(1 - part * (1 - whole)) / math.log(stay)] for part in _DIVERGED_PARTS]
    where = np.array(parts)
    diverging = span / (where / pace[FOLLOWING] + (span - where) / pace[DIVERGED])
    shares = (whole, *[(1 - whole) / len(parts)] * len(parts))
    split = [group_counts[-1] * share for share in shares]
    return RowGroups(
        pace=np.concatenate((pace[some], diverging)),
        counts=np.array(group_counts[:-1] + split),
        left=np.array(spans + [span] * len(parts)),
    )


def seconds_left(
    rows: RowGroups, seconds: np.ndarray, plain: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return [S] seconds until the last row has ended, if each strategy is kept at first.

    seconds [S] of a round of all rows; plain(n): seconds of a plain round of n rows. The ratio of a
    round with drafts to a plain one is assumed constant. Once the first rows have ended, the others
    go on with the strategy or decode plainly, whichever is faster.
    """
    ends = rows.left[:, None] / rows.pace
    # Plain indexing, as take_along_axis is slow.
    order = np.argsort(ends, axis=0, kind="stable")
    columns = np.arange(len(seconds))
    ends = ends[order, columns]
    pace = rows.pace[order, columns]
    live = rows.counts[order[::-1]].cumsum(axis=0)[::-1]  # in each phase
    times_plain = np.minimum(seconds / seconds[0], pace[1:])
    return ends[0] * seconds + ((ends[1:] - ends[:-1]) * times_plain * plain(live[1:])).sum(axis=0)
