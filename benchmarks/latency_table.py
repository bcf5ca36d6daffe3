"""Measured call times of a target and its drafter (CSV), and the surface of seconds between
them.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib

import numpy as np

from rlhf_jax.generation.speculative import tree
from rlhf_jax.planner.simulated_stage import GRAIN

DECODE = "target_decode"
VERIFY = "target_verify"
DRAFT = "drafter_decode"
ROWS = 64  # of a slice, at most
# The default table of benchmarks.
LATENCY_TABLE = str(pathlib.Path(__file__).parent / "tables" / "decode_latency_a100_llama31_8b.csv")


@dataclasses.dataclass(frozen=True)
class Points:
    """Measured calls; every leaf is [n]."""

    mode: np.ndarray  # of DECODE, VERIFY, DRAFT
    nodes: np.ndarray  # tokens a row that the target sees, 0 in a drafter's call
    batch: np.ndarray
    seq: np.ndarray  # context tokens a row
    seconds: np.ndarray

    def __getitem__(self, chosen) -> Points:
        return Points(*(leaf[chosen] for leaf in dataclasses.astuple(self)))


def read_table(path: str) -> Points:
    """The points of a latency table; raises FileNotFoundError, or ValueError with the missing
    part."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            f"There is no latency table {path}; --latency takes the path of a CSV file."
        )
    with pathlib.Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        entries = [entry for row in rows if (entry := _entry(row)) is not None]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no latency table ({error!r}): columns batch, seq, gamma, mode, median_ms."
        ) from error
    if len({row.get("model") for row in rows}) > 1:
        raise ValueError(f"{path} holds several models: give one table for each.")
    # plain decoding with the speculative engine loaded stands in
    if DECODE not in {entry[0] for entry in entries}:
        entries = [
            (DECODE if entry[0] == f"{DECODE}_sd" else entry[0], *entry[1:]) for entry in entries
        ]
    entries = [entry for entry in entries if entry[0] in (DECODE, VERIFY, DRAFT)]
    missing = {DECODE, VERIFY} - {entry[0] for entry in entries}
    if missing:
        raise ValueError(
            f"{path} has no rows of mode {' and '.join(sorted(missing))}: nothing to compare."
        )
    return Points(*map(np.array, zip(*entries, strict=True)))


def _entry(row: dict) -> tuple | None:
    """One measurement; None for the averages (batch 0)."""
    batch = int(row["batch"])
    mode = row["mode"]
    nodes = {VERIFY: int(row["gamma"] or 0) + 1, DRAFT: 0}.get(mode, 1)
    seconds = float(row.get("median_ms") or row["mean_ms"]) / 1e3
    return (mode, nodes, batch, int(row["seq"]), seconds) if batch and seconds > 0 else None


def surface(points: Points, nodes: np.ndarray, lives: np.ndarray, seqs: np.ndarray) -> np.ndarray:
    """[nodes, lives, seqs] seconds between the measured points, linear along each axis, clamped
    outside.
    """
    known = np.unique(points.nodes)
    return between(
        nodes, known, [_at_batches(points[points.nodes == each], lives, seqs) for each in known]
    )


def _at_batches(points: Points, lives: np.ndarray, seqs: np.ndarray) -> np.ndarray:
    known = np.unique(points.batch)
    return between(
        lives, known, [_along_context(points[points.batch == each], seqs) for each in known]
    )


def _along_context(points: Points, seqs: np.ndarray) -> np.ndarray:
    known = np.unique(points.seq)
    return between(seqs, known, [np.median(points.seconds[points.seq == each]) for each in known])


def between(places: np.ndarray, known: np.ndarray, values: list) -> np.ndarray:
    """[n, ...] values at n places, from values [k, ...] at k known ones in ascending order."""
    weights = np.stack([np.interp(places, known, each) for each in np.eye(len(known))], axis=1)
    return np.tensordot(weights, np.array(values), 1)


def possible_lengths(points: Points) -> np.ndarray:
    """0 to 8 as far as the table goes, and its own longer ones as far as a strategy does."""
    measured = np.unique(points.nodes[points.mode == VERIFY]) - 1
    lengths = np.union1d(np.arange(min(8, measured.max()) + 1), measured)
    return lengths[lengths < tree.NODE_BUCKETS[-1]]


def linear(points: Points) -> np.ndarray:
    """[3] least squares of seconds on (context, tokens, 1); zeros without points."""
    tokens = points.batch * np.maximum(points.nodes, 1)
    columns = np.stack([points.batch * points.seq, tokens, np.ones(len(tokens))], axis=1)
    return np.linalg.lstsq(columns, points.seconds, rcond=None)[0] if len(tokens) else np.zeros(3)


def expected(chance: float, lengths: np.ndarray) -> np.ndarray:
    """[S] tokens of a row a round: 1 + chance + chance^2 + ..., one term a draft."""
    return np.cumsum(chance ** np.arange(lengths[-1] + 1))[lengths]


def round_seconds(
    points: Points, lengths: np.ndarray, lives: np.ndarray, seqs: np.ndarray, free_drafter: bool
) -> np.ndarray:
    """[S, lives, seqs] seconds of a round by draft length: a verification, and a call of the
    drafter for each draft, where the table has them and they are not free.
    """
    times = surface(points[points.mode != DRAFT], lengths + 1, lives, seqs)
    if free_drafter or DRAFT not in points.mode:
        return times
    steps = surface(points[points.mode == DRAFT], np.zeros(1), lives, seqs)
    return times + lengths[:, None, None] * steps


def rates_of(
    points: Points, chance: float, longest: float, drafts: bool, free_drafter: bool
) -> np.ndarray:
    """[rows + 1, T] tokens per second of a row with the best draft length of each round, or none.

    `longest`: context tokens to cover; `chance`: that a draft is right, if those before it are.
    """
    lives = np.arange(1, min(ROWS, points.batch.max()) + 1)
    seqs = np.arange(0, longest + 2 * GRAIN, GRAIN)
    lengths = possible_lengths(points) if drafts else np.zeros(1, int)
    times = round_seconds(points, lengths, lives, seqs, free_drafter)
    best = (expected(chance, lengths)[:, None, None] / times).max(axis=0)
    return np.concatenate([np.zeros((1, len(seqs))), best])
