"""Predict how long a batch still takes that no waiting sample joins.

Its rows gain at different paces and end apart, so that most tokens a second now is not the earliest
end: rows that drafts carry far end first, and those that they do not are left over in a small
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
    left: np.ndarray  # [C] tokens that one of them has to come


def group_rows(pace: np.ndarray, counts: np.ndarray, left: np.ndarray, stay: float) -> RowGroups:
    """Group rows by cell, and split those that follow by where they are expected to diverge.

    pace [2 * CLASSES, S] tokens of a row's round, by seen prompt and class; counts, left
    [2 * CLASSES]: rows, and tokens that they have to come, summed; stay: the chance that a text
    that follows its earlier one does so for one token more.
    """
    # Lists, which are quicker than arrays for so few numbers.
    rows = counts.tolist()
    tokens = left.tolist()
    some = [cell for cell, count in enumerate(rows) if count]
    group_counts = [rows[cell] for cell in some]
    spans = [tokens[cell] / rows[cell] for cell in some]
    if not rows[FOLLOWING]:
        return RowGroups(pace[some], np.array(group_counts, float), np.array(spans))

    # Where texts diverge is geometric; `whole` of them never do within their span.
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
    """Return [S] seconds until the last row has ended, were each strategy kept at first.

    seconds [S] of a round of all rows; plain(n): seconds of a plain round of n rows. Drafts are
    taken to cost as many times a plain round as they do now. Once the first rows have ended, the
    others go on with the strategy or decode plainly, whichever is quicker.
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
