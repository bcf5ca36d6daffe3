"""Tables of measured latencies, of a machine that is a formula."""

from __future__ import annotations

import csv
import itertools

import numpy as np

from benchmarks import strategy as benchmark

BATCHES = (1, 2, 4, 8, 16, 32)
SEQS = (128, 512, 1024, 2048)
GAMMAS = (1, 3, 8)


def milliseconds(mode: str, batch: int, seq: int, gamma: int) -> float:
    """A small model on a slow machine: 3 ms of weights, 40 us a token, and a cliff above 8 rows."""
    nodes, weights, token = (1, 0.3, 0.004) if mode == benchmark.DRAFT else (gamma + 1, 3.0, 0.04)
    cliff = 1.08 if batch > 8 else 1.0
    return cliff * (max(weights + 2e-5 * batch * seq, token * batch * nodes) + 0.01 * batch + 0.2)


MODES = benchmark.DECODE, benchmark.VERIFY, benchmark.DRAFT


def write_table(path, modes=MODES, machine=milliseconds, noise: float = 0.02) -> str:
    """A table in the format of the measured ones, with noise and rows of averages."""
    luck = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, ["model", "batch", "seq", "gamma", "mode", "mean_ms", "median_ms"]
        )
        writer.writeheader()
        for mode, gamma in [
            (m, g) for m in modes for g in ((0,) if m == benchmark.DECODE else GAMMAS)
        ]:
            writer.writerow(
                dict(model="m", batch=0, seq=0, gamma=gamma, mode=mode, mean_ms=1, median_ms=1)
            )
            for batch, seq in itertools.product(BATCHES, SEQS):
                took = machine(mode, batch, seq, gamma) * np.exp(luck.normal(0, noise))
                writer.writerow(
                    dict(model="m", batch=batch, seq=seq, gamma=gamma, mode=mode, median_ms=took)
                )
    return str(path)
