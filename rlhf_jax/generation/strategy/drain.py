"""How long a batch still takes that no sample waits to join: its rows gain at different paces and end apart.

Most tokens a second now is not the earliest end: rows that drafts carry far end first, and those that they do not are
left over in a small batch, which uses the machine badly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def seconds_left(
    pace: np.ndarray, counts: np.ndarray, left: np.ndarray, seconds: np.ndarray, thinner: Callable[[int], float]
) -> np.ndarray:
    """[S] seconds until the last row has ended, were each strategy kept until the first rows end.

    pace [C, S]: tokens of a row's round, for C classes of rows that stay what they are; counts, left [C]: rows, and
    tokens that one of them has to come; seconds [S] of a round of all rows, the first strategy being plain decoding.
    thinner(n): the time of a round of n rows over that of all of them. Once rows have ended, the others go on with
    the strategy or decode plainly, whichever is quicker.
    """
    ends = left[:, None] / pace
    order = np.argsort(ends, axis=0, kind="stable")
    ends, pace, counts = (np.take_along_axis(each, order, 0) for each in (ends, pace, counts[:, None] + 0 * ends))
    phases = np.diff(ends, axis=0, prepend=0.0)
    rows = np.cumsum(counts[::-1], axis=0)[::-1]  # that are left in each phase
    thin = {count: thinner(int(count)) for count in np.unique(rows[1:])}
    total = phases[0] * seconds
    for phase, count, tokens in zip(phases[1:], rows[1:], pace[1:], strict=True):
        total = total + phase * np.minimum(seconds, tokens * seconds[0]) * [thin[each] for each in count]
    return total
