"""How long a batch still takes that no sample waits to join: its rows gain at different paces and
end apart.

Most tokens a second now is not the earliest end: rows that drafts carry far end first, and those
that they do not are left over in a small batch, which uses the machine badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlhf_jax.generation.strategy.acceptance import CLASSES

# cells of rows whose text has left their earlier one, and whose text follows it
STRAYED = 1 - CLASSES
FOLLOWS = -1
# of the rows that will stray, the parts that have by the middle of each third
PARTS = (1 / 6, 3 / 6, 5 / 6)


class Rows(NamedTuple):
    """Rows in C groups that stay what they are."""

    # [C, S] tokens of a row's round by each strategy, the first being plain decoding
    pace: np.ndarray
    counts: np.ndarray  # [C] rows
    left: np.ndarray  # [C] tokens that one of them has to come


def foreseen(pace: np.ndarray, counts: np.ndarray, left: np.ndarray, stay: float) -> Rows:
    """The rows in groups, those that follow their earlier text split by where they will stray from
    it.

    pace [2 * CLASSES, S] of a row of each cell, by familiar and class; counts, left [2 * CLASSES]:
    rows, and tokens that they have to come, summed. stay: chance that a text which follows does so
    for one token more.
    """
    # quicker than arrays, of so few
    of = counts.tolist()
    tokens = left.tolist()
    some = [cell for cell, rows in enumerate(of) if rows]
    own = [of[cell] for cell in some]
    spans = [tokens[cell] / of[cell] for cell in some]
    if not of[FOLLOWS]:
        return Rows(pace[some], np.array(own, float), np.array(spans))
    span = spans[-1]
    whole = stay**span
    # it is geometric
    where = np.array([[math.log(1 - part * (1 - whole)) / math.log(stay)] for part in PARTS])
    strays = span / (where / pace[FOLLOWS] + (span - where) / pace[STRAYED])
    parts = [own[-1] * share for share in (whole, *[(1 - whole) / len(PARTS)] * len(PARTS))]
    paces = np.concatenate((pace[some], strays))
    return Rows(paces, np.array(own[:-1] + parts), np.array(spans + [span] * len(PARTS)))


def seconds_left(
    rows: Rows, seconds: np.ndarray, plain: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """[S] seconds until the last row has ended, were each strategy kept until the first rows end.

    seconds [S] of a round of all rows; plain(n) of a plain round of n rows; drafts are taken to
    cost as many times that as they do now. Once rows have ended, the others go on with the strategy
    or decode plainly, whichever is quicker.
    """
    ends = rows.left[:, None] / rows.pace
    # take_along_axis is slow
    order = np.argsort(ends, axis=0, kind="stable")
    columns = np.arange(len(seconds))
    ends = ends[order, columns]
    pace = rows.pace[order, columns]
    going = rows.counts[order[::-1]].cumsum(axis=0)[::-1]  # in each phase
    times_plain = np.minimum(seconds / seconds[0], pace[1:])
    return ends[0] * seconds + ((ends[1:] - ends[:-1]) * times_plain * plain(going[1:])).sum(axis=0)
