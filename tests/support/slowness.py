"""How slow this machine is: limits in seconds are of one that adds 100,000 numbers in 2.5 ms."""

from __future__ import annotations

import time


def slowness() -> float:
    """How many times as long as that machine this one takes, at least 1."""

    def seconds() -> float:
        start = time.perf_counter()
        total = 0
        for number in range(100_000):
            total += number
        return time.perf_counter() - start

    return max(1.0, min(seconds() for _ in range(20)) / 2.5e-3)
