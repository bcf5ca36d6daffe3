"""How long a batch still takes that no sample waits to join: its rows gain at different paces and end apart.

Most tokens a second now is not the earliest end: rows that drafts carry far end first, and those that they do not are
left over in a small batch, which uses the machine badly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def seconds_left(
    pace: np.ndarray, counts: np.ndarray, left: np.ndarray, seconds: np.ndarray, plain: Callable[[int], float]
) -> np.ndarray:
    """[S] seconds until the last row has ended, were each strategy kept until the first rows end.

    pace [C, S]: tokens of a row's round, for C classes of rows that stay what they are; counts, left [C]: rows, and
    tokens that one of them has to come; seconds [S] of a round of all rows, the first strategy being plain decoding.
    plain(n): of a plain round of n rows; drafts are taken to cost as many times that as they do now. Once rows have
    ended, the others go on with the strategy or decode plainly, whichever is quicker.
    """
    ends = left[:, None] / pace
    order, columns = np.argsort(ends, axis=0, kind="stable"), np.arange(len(seconds))  # take_along_axis is slow
    ends, pace = ends[order, columns], pace[order, columns]
    rows = counts[order[::-1]].cumsum(axis=0)[::-1]  # that are left in each phase
    phases = ends[1:] - ends[:-1]
    rows = np.where(phases > 0, rows[1:], 0)  # nobody is left for no time
    thin = {count: plain(int(count)) if count else 0.0 for count in set(rows.ravel().tolist())}
    total = ends[0] * seconds
    for phase, count, tokens in zip(phases, rows, pace[1:], strict=True):
        times_plain = np.minimum(seconds / seconds[0], tokens)
        total = total + phase * times_plain * [thin[each] for each in count.tolist()]
    return total
