r"""How soon a stage can end for whoever knows only so much of its lengths: a bound, to compare
`makespan.py` with.

    python benchmarks/foresight.py --slices 64 --samples 64 --acceptance 0.7 \
        --prediction noisy:0.5 --deadlines 12,12.5

The tables are those of benchmarks/tables, or what `--latency` and `--lengths` name.

Prints for each deadline the least number of samples that any policy must expect to end later, to
the precision of the grids below. Moves cost nothing, slices are divisible, and a row keeps running
once it has begun. Samples of one kind look alike, and only the slices that they share bind them
together. With a price on slice seconds at each time instead, dynamic programming finds the best for
each kind on its own; whatever the prices, late samples and what was paid, less the worth of all
slices, are no more than the late samples of the best policy (Lagrange). Prices rise where slices
are short and fall where they are idle; the best bound counts.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from benchmarks import makespan
from benchmarks.latency_table import rates_of, read_table
from rlhf_jax.planner.response_lengths import Percentiles, draw_lengths, read_percentiles
from rlhf_jax.planner.simulated_stage import SimulatedSlice

GRAIN = 4.0  # tokens
STEPS = 48  # of time
SHARES = 20  # numbers of rows on a slice
# of prices, and those without a better bound
ROUNDS = 100
PATIENCE = 10
HOPES = 1.0, 0.1, 0.01, 0.001  # of all samples: the assumed improvements of the bound
# of samples whose noisy lengths are known, and lengths by which they are distinguished
KINDS = 28
DRAWN = 400_000
CONTEXT = 0.75  # of its length so far: the mean context of the slice that a row is on, or more


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Samples with equal forecasts."""

    count: np.ndarray  # [K] samples
    survival: np.ndarray  # [K, L + 2] chance to be at least so many GRAIN tokens long, then 0


def main() -> None:
    """Print the document."""
    parser = makespan.parser_of(__doc__)
    parser.add_argument("--deadlines", required=True, help="seconds, with commas between")
    options = makespan.checked(parser, parser.parse_args())
    known = read_percentiles(options.lengths)
    prompt = known.prompt
    longest = prompt + known.tokens[-1]
    rates = rates_of(
        read_table(options.latency), options.acceptance, longest, True, options.free_drafter
    )
    kinds = kinds_of(known, options.slices * options.samples, options.prediction)
    machine = SimulatedSlice(rates, 0.0, 1.0, 0.0)
    deadlines = map(float, options.deadlines.split(","))
    late = {
        each: round(least_late(machine, kinds, options.slices, prompt, each), 3)
        for each in deadlines
    }
    asked_for = {name: getattr(options, name) for name in ("slices", "samples", "prediction")}
    print(json.dumps(asked_for | {"least_late": late}, indent=1))


def kinds_of(known: Percentiles, count: int, prediction: str) -> Kinds:
    """Kinds of so many samples whose noisy lengths are known (`noisy:SIGMA`), or nothing
    (`none`).
    """
    grid = np.arange(0.0, known.tokens[-1] + GRAIN, GRAIN)
    shares = np.interp(grid[1:], [1, *known.tokens], [0, *known.percentiles])
    chance = np.append(shares / 100, 1.0)
    mass = np.diff(chance, prepend=0.0)[None]
    counts = np.array([float(count)])
    if prediction != "none":
        sigma = float(prediction.partition(":")[2])
        luck = np.random.default_rng(0)
        noisy = draw_lengths(known, DRAWN, luck) * luck.lognormal(0, sigma, DRAWN)
        # ever narrower kinds of ever longer samples
        edges = np.append(1 - np.geomspace(1, 1 / 400, KINDS), 1.0)
        centers = np.quantile(noisy, (edges[:-1] + edges[1:]) / 2)
        near = np.exp(-0.5 * (np.log(centers[:, None] / (grid + GRAIN / 2)) / sigma) ** 2) * mass
        mass = near / near.sum(axis=1, keepdims=True)
        counts = count * np.diff(edges)
    return Kinds(counts, np.pad(mass[:, ::-1].cumsum(axis=1)[:, ::-1], ((0, 0), (0, 2))))


def least_late(
    machine: SimulatedSlice, kinds: Kinds, slices: int, prompt: float, deadline: float
) -> float:
    """Samples that end after a deadline, expected and at least, whatever the policy."""
    gained, share = _choices(machine, prompt, kinds.survival.shape[1] - 2, deadline / STEPS)
    return max(
        _bound(kinds, gained, share, slices, float(kinds.count.sum()) * part) for part in HOPES
    )


def _bound(kinds: Kinds, gained: np.ndarray, share: np.ndarray, slices: int, hope: float) -> float:
    """The best bound by Polyak's steps, which hope for so much more, and for half once it does not
    come.
    """
    # of a slice for a step
    price = np.zeros(STEPS)
    best = 0.0
    since = 0
    for turn in range(ROUNDS):
        late, chosen = _cheapest(kinds, gained, share, price)
        bound = float(kinds.count @ late - slices * price.sum())
        if bound > best:
            best = bound
            since = turn
        elif turn - since >= PATIENCE:
            hope = hope / 2
            since = turn
        short = _used(kinds, gained, share, chosen) - slices
        price = np.maximum(price + short * (best + hope - bound) / max(short @ short, 1e-9), 0.0)
    return best


def _choices(
    machine: SimulatedSlice, prompt: float, lengths: int, seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    """([A, L] GRAIN tokens that a row gains in a step, [A] slices that it takes): how many share
    one, or waiting.
    """
    rows = np.unique(np.round(np.geomspace(1, machine.rows, SHARES)).astype(int))
    context = prompt + CONTEXT * GRAIN * np.arange(lengths)
    rates = np.stack([machine.rate(np.full(lengths, count), context) for count in rows])
    return np.pad(rates * seconds / GRAIN, ((0, 1), (0, 0))), np.append(1 / rows, 0.0)


def _cheapest(
    kinds: Kinds, gained: np.ndarray, share: np.ndarray, price: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """([K] late and paid for a sample of each kind from the start on, [STEPS, K, L] the choices
    that cost least).
    """
    lengths = gained.shape[1]
    to = np.minimum(np.arange(lengths) + gained, lengths)
    low = np.minimum(to.astype(int), lengths - 1)
    # what runs does not wait
    halted = np.where((share[:, None] == 0) & (np.arange(lengths) > 0), np.inf, 0.0)
    taken = share[:, None] * kinds.survival[:, None, :lengths]
    cost = kinds.survival[:, : lengths + 1]
    chosen = []
    for each in price[::-1]:
        after = cost[:, low] * (1 - to + low) + cost[:, low + 1] * (to - low)
        paid = after + each * taken + halted
        chosen.append(paid.argmin(axis=1))
        cost = np.pad(paid.min(axis=1), ((0, 0), (0, 1)))
    return cost[:, 0], np.stack(chosen[::-1])


def _used(kinds: Kinds, gained: np.ndarray, share: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[STEPS] slices that all samples take by their choices."""
    which = np.arange(len(kinds.count))
    lengths = gained.shape[1]
    at = np.zeros(len(which))
    used = []
    for choice in chosen:
        place = np.minimum(at.astype(int), lengths - 1)
        part = np.minimum(at - place, 1)
        alive = kinds.survival[which, place] * (1 - part) + kinds.survival[which, place + 1] * part
        used.append((kinds.count * alive) @ share[choice[which, place]])
        at = np.minimum(at + gained[choice[which, place], place], lengths)
    return np.array(used)


if __name__ == "__main__":
    main()
