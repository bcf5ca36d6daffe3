"""How long a stage takes under several ways to place its samples on slices, by simulation: one
JSON document.

    python benchmarks/makespan.py --slices 64 --samples 64 --acceptance 0.7 --prediction noisy:0.5
    python benchmarks/makespan.py --slices 16 --lengths lognormal:900:1.3:16384 --prediction none

A slice is the machine of a table of measured call times (`--latency`; columns batch, seq, gamma,
mode, median_ms or mean_ms); at most 64 rows of it run at once, the other samples wait. Lengths are
drawn from a table of percentiles (`--lengths`); prompts have its mean. Without these options the
tables are those of benchmarks/tables. All policies but `plain` take the draft length of each round
that is best for the rows then live. Our policy is the planner that runs for real,
`rlhf_jax.generation.reallocation`, which knows the lengths (`oracle`), the true lengths times
log-normal noise of that sigma as an earlier roll-out would tell them (`noisy:0.5`), the lengths of
siblings that ended (`siblings`, 8 of a prompt), or just the lengths of the stage before and each
sample's length so far (`none`). What noise or siblings are worth it learns in the stage before, in
which noise was `--wrong`; with `--first` there is no stage before. `packing` is what could be had
with all known from the start. The host's time for each decision is charged, `--free-decisions`
leaves it out.

The lower bound is the larger of all work at the best throughput (and all inference, where fused)
and the longest sample alone at its best speed, both with the context of a fresh prompt. What can be
had with less known, `foresight.py` bounds. "fused": slices without rows do inference on finished
samples while others decode. See
`rlhf_jax/planner/simulated_stage.py` for what is modelled.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from benchmarks.latency_table import LATENCY_TABLE, Points, rates_of, read_table
from rlhf_jax.generation.reallocation import forecasts, length_model
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts, PromptLengths
from rlhf_jax.generation.reallocation.planner import Reallocation
from rlhf_jax.planner.placing import (
    Predict,
    by_siblings,
    even,
    from_lists,
    known_lengths,
    ours,
    prompts_of,
    static,
)
from rlhf_jax.planner.response_lengths import LENGTHS_TABLE, draw_lengths, read_percentiles
from rlhf_jax.planner.simulated_stage import (
    FINISHED,
    Outcome,
    Policy,
    SimulatedSlice,
    SimulatedStage,
    simulate,
)
from rlhf_jax.planner.worth_of_moves import lower_bound

STRIDE = 128  # tokens after which a packed slice's rate follows the context
PRECISION = 0.003  # of the deadline of a packing
LEFT = 0.2  # of all samples, at which the threshold rule gathers the rest
SATURATED = 0.9  # of a lone row's speed that a row keeps on a slice that is not saturated
TOKEN_BYTES = 131_072  # of an 8B model's cache: 2 x 32 layers x 8 heads x 128 x 2 bytes
PER_PROMPT = 8  # samples of a prompt, if siblings forecast
KEPT = 0.5  # weight of earlier evidence from one stage to the next, as in a run

PREDICTIONS = ("oracle", "noisy", "siblings", "none")


def main() -> None:
    """Print the document."""
    options = arguments()
    try:
        print(json.dumps(document(options), indent=1))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--inference-ms-per-token",
        type=float,
        default=0.1,
        help="of one slice, all models together",
    )
    parser.add_argument(
        "--bandwidth-gb", type=float, default=25.0, help="gigabytes a second between slices"
    )
    parser.add_argument(
        "--move-latency-ms", type=float, default=2.0, help="of a move, besides its bytes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", action="store_true", help="nothing is known of any lengths")
    parser.add_argument(
        "--wrong", type=float, help="sigma of the noise two stages before, if it was another"
    )
    parser.add_argument(
        "--free-decisions", action="store_true", help="the host's time is not charged"
    )
    return checked(parser, parser.parse_args(given))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser of the stage's options, and of the knowledge of lengths."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", default=LATENCY_TABLE, help="CSV of measured call times")
    parser.add_argument(
        "--lengths", default=LENGTHS_TABLE, help="CSV of percentiles of response tokens"
    )
    parser.add_argument("--slices", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64, help="of a slice")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="chance that a draft is right"
    )
    parser.add_argument(
        "--prediction", default="oracle", help="oracle, noisy:SIGMA, siblings or none"
    )
    parser.add_argument("--free-drafter", action="store_true", help="drafting costs nothing")
    return parser


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The checked options; the parser ends the program if they make no sense."""
    kind, _, sigma = options.prediction.partition(":")
    if kind not in PREDICTIONS or (kind == "noisy") != bool(sigma):
        parser.error("--prediction is oracle, noisy:SIGMA, siblings or none.")
    if options.slices < 1 or options.samples < 1 or not 0 <= options.acceptance <= 1:
        parser.error("--slices and --samples are at least 1, --acceptance is between 0 and 1.")
    return options


# ---- policies


def threshold(slices: int, count: int) -> Policy:
    """RLHFuse's rule: a static split; once a fifth is left, it is gathered on the fewest slices
    that it saturates."""
    split = static(slices, count)

    def policy(stage: SimulatedStage) -> Reallocation:
        if stage.freed.any() or (stage.place != FINISHED).sum() > LEFT * count:
            return (
                split(stage)
                if not stage.freed.any()
                else Reallocation([], [], np.zeros(slices, bool))
            )
        rates = stage.machine.rate(
            np.arange(1, stage.machine.rows + 1), np.full(stage.machine.rows, stage.prompt)
        )
        room = max(1, int((rates >= SATURATED * rates[0]).sum()))
        left = np.flatnonzero(stage.place != FINISHED)
        fullest = np.argsort(-stage.live, kind="stable")[: math.ceil(len(left) / room)]
        freed = ~np.isin(np.arange(stage.slices), fullest)
        live = stage.live
        plan = Reallocation([], [], freed)
        for sample in left[~np.isin(stage.place[left], fullest)].tolist():
            there = int(fullest[live[fullest].argmin()])
            live[there] += 1
            (plan.moves if stage.place[sample] >= 0 else plan.admissions).append((sample, there))
        return plan if live[fullest].max() <= stage.machine.rows else split(stage)

    return policy


# ---- the reference that knows all


def drained(machine: SimulatedSlice, tokens: np.ndarray, prompt: float) -> float:
    """Seconds of one slice for responses of tokens [n] in descending order, the longest first,
    refilled as rows end.
    """
    rows = tokens[: machine.rows]
    at = machine.rows
    seconds = 0.0
    done = np.zeros(len(rows))
    while len(rows):
        gain = min(float(rows.min()), STRIDE)
        seconds += gain / float(
            machine.rate(np.array([len(rows)]), prompt + done.mean(keepdims=True) + gain / 2)[0]
        )
        rows = rows - gain
        done = done + gain
        going = rows > 1e-9
        more = tokens[at : at + machine.rows - np.count_nonzero(going)]
        at += len(more)
        rows = np.concatenate([rows[going], more])
        done = np.concatenate([done[going], np.zeros(len(more))])
    return seconds


def packed(
    machine: SimulatedSlice, total: np.ndarray, slices: int, prompt: float
) -> list[np.ndarray]:
    """Samples by slice: the longest together, as many as end by the earliest deadline that all can
    keep.
    """
    order = np.argsort(-total, kind="stable")
    low = drained(machine, total[order[:1]], prompt)
    high = 2 * low
    found = None
    while found is None or high - low > PRECISION * high:
        deadline = (low + high) / 2
        lists = by_deadline(machine, total, order, slices, prompt, deadline)
        low, high, found = (
            (low, deadline, lists) if lists else (deadline, high if found else 2 * high, found)
        )
    return found


def by_deadline(
    machine: SimulatedSlice,
    total: np.ndarray,
    order: np.ndarray,
    slices: int,
    prompt: float,
    deadline: float,
) -> list[np.ndarray] | None:
    """Samples by slice, each with the longest of the rest that it ends by the deadline; None if
    some are left.
    """
    lists = []
    count = 1
    for _ in range(slices):
        low = 0
        high = len(order)
        tried = max(count, 1)
        while low < high:
            ends = drained(machine, total[order[:tried]], prompt) <= deadline
            low, high = (tried, high) if ends else (low, tried - 1)
            guess = low + max(1, low // 16) if high == len(order) else (low + high + 1) // 2
            tried = min(max(guess, low + 1), max(high, 1))
        count = low
        lists.append(order[:count])
        order = order[count:]
    return None if len(order) else lists


# ---- the document


def document(options: argparse.Namespace) -> dict:
    """All measurements of the benchmark."""
    percentiles = read_percentiles(options.lengths)
    prompt = percentiles.prompt
    points = read_table(options.latency)
    luck = np.random.default_rng(options.seed)
    alike = PER_PROMPT if options.prediction == "siblings" else 1
    count = options.slices * options.samples
    total, before, long_before = (draw_lengths(percentiles, count, luck, alike) for _ in range(3))
    longest = prompt + float(total.max())
    plain, machine = (machine_of(options, points, longest, drafts) for drafts in (False, True))
    scoring = options.inference_ms_per_token / 1e3
    limit = float(percentiles.tokens[-1])
    known = learned(options, before, long_before, limit, luck)
    earlier = noisy(options.prediction, total, luck)

    policies = policies_of(options, plain, machine, total, prompt)
    apart, fused = (
        ours(predictions(options, known, total, earlier, limit), price) for price in (0.0, scoring)
    )
    policies["ours"] = (machine, apart, fused)
    inference = scoring * float((prompt + total).sum()) / options.slices

    slices = options.slices
    limits = [lower_bound(machine, total, slices, prompt, more) for more in (0.0, inference)]
    charged = not options.free_decisions

    def measured(own: SimulatedSlice, *both: Policy) -> dict:
        apart, fused = (
            simulate(own, slices, total, prompt, policy, scoring, charged) for policy in both
        )
        return figures(apart, fused, slices, inference, scoring)

    found = {name: measured(own, *both) for name, (own, *both) in policies.items()}
    fused_seconds = found["ours"]["fused_seconds"]
    return {
        "responses": responses_of(total),
        "lower_bound_seconds": round(limits[0], 3),
        "fused_lower_bound_seconds": round(limits[1], 3),
        "policies": found,
        "ours_to_packing": ratio(found, "ours", "packing", "generation_seconds"),
        "best_other_to_ours": min(
            ratio(found, name, "ours", "generation_seconds")
            for name in ("static", "even", "threshold")
        ),
        "static_to_ours": ratio(found, "static", "ours", "generation_seconds"),
        "unfused_to_fused": round(found["ours"]["unfused_seconds"] / fused_seconds, 4),
        "static_unfused_to_ours_fused": round(
            found["static"]["unfused_seconds"] / fused_seconds, 4
        ),
        "covered": forecasts.coverage(known, shown(total, earlier, limit)),
    }


def predictions(
    options: argparse.Namespace,
    known: LengthForecasts,
    total: np.ndarray,
    earlier: np.ndarray | None,
    limit: float,
) -> Predict:
    """Our policy's knowledge of lengths, by the command line."""
    if options.prediction == "oracle":
        return known_lengths
    if earlier is None:
        return by_siblings(known, total, PER_PROMPT, limit)
    return by_earlier(known, total, earlier, limit)


def by_earlier(
    known: LengthForecasts, total: np.ndarray, earlier: np.ndarray, limit: float
) -> Predict:
    """What an earlier response to each prompt, of tokens [n], says; limit: tokens at most."""
    curves = np.tile(length_model.survival(known.lengths), (len(total), 1))
    if known.belief(forecasts.BY_EARLIER):
        references = forecasts.earlier_references(list(earlier[:, None]), [limit] * len(total))
        curves = forecasts.survival(known, references)

    def predict(stage: SimulatedStage, rows: np.ndarray) -> np.ndarray:
        return length_model.remaining(curves, rows, stage.done[rows], limit)

    return predict


def learned(
    options: argparse.Namespace,
    before: np.ndarray,
    long_before: np.ndarray,
    limit: float,
    luck: np.random.Generator,
) -> LengthForecasts:
    """A run's knowledge after stages with the lengths before [n] and, if given, long before [n]."""
    known = LengthForecasts()
    if options.first:
        return known
    stages = [(before, options.prediction)]
    if options.wrong is not None:
        stages.insert(0, (long_before, f"noisy:{options.wrong}"))
    for lengths, kind in stages:
        prompts = shown(lengths, noisy(kind, lengths, luck), limit)
        known = forecasts.after_stage(known, prompts, KEPT)
    return known


def shown(total: np.ndarray, earlier: np.ndarray | None, limit: float) -> list[PromptLengths]:
    """What a stage with these lengths [n] has shown: of noisy ones [n], or of siblings."""
    if earlier is None:
        return prompts_of(total, PER_PROMPT, limit)
    pairs = zip(earlier[:, None], total[:, None], strict=True)
    return [PromptLengths(before, own, own < limit, limit) for before, own in pairs]


def machine_of(
    options: argparse.Namespace, points: Points, longest: float, drafts: bool
) -> SimulatedSlice:
    """The machine of measured points, for contexts up to the longest, with drafts or without."""
    return SimulatedSlice(
        rates_of(points, options.acceptance, longest, drafts, options.free_drafter),
        TOKEN_BYTES,
        options.bandwidth_gb * 1e9,
        options.move_latency_ms / 1e3,
    )


def responses_of(total: np.ndarray) -> dict:
    """How many responses there are, and how long."""
    mean = round(float(total.mean()), 1)
    return {"count": len(total), "mean": mean, "longest": int(total.max())}


def decision_figures(seconds: list[float]) -> dict:
    """Milliseconds of the first decision, and of those after it."""
    first, *later = (1e3 * np.array([*seconds, seconds[-1]])).tolist()
    figures = {"first": first, "median": np.median(later), "p99": np.quantile(later, 0.99)}
    return {name: round(float(each), 2) for name, each in figures.items()}


def policies_of(
    options: argparse.Namespace,
    plain: SimulatedSlice,
    machine: SimulatedSlice,
    total: np.ndarray,
    prompt: float,
) -> dict[str, tuple[SimulatedSlice, Policy, Policy]]:
    """By name, whose machine decodes and who places its samples, without and with inference."""
    count = len(total)
    lists = packed(machine, total, options.slices, prompt)
    return {
        "plain": (plain, static(options.slices, count), static(options.slices, count)),
        "static": (machine, static(options.slices, count), static(options.slices, count)),
        "even": (machine, even, even),
        "threshold": (machine, threshold(options.slices, count), threshold(options.slices, count)),
        "packing": (machine, from_lists(lists), from_lists(lists)),
    }


def noisy(prediction: str, total: np.ndarray, luck: np.random.Generator) -> np.ndarray | None:
    """[n] lengths as an earlier roll-out would tell them, where the command line names that."""
    kind, _, sigma = prediction.partition(":")
    return total * luck.lognormal(0, float(sigma), len(total)) if kind == "noisy" else None


def figures(apart: Outcome, fused: Outcome, slices: int, inference: float, scoring: float) -> dict:
    """Of a policy without and with inference meanwhile; inference: seconds of all of it on all
    slices.
    """
    return {
        "generation_seconds": round(apart.seconds, 3),
        "unfused_seconds": round(apart.seconds + inference, 3),
        "fused_seconds": round(fused.seconds + fused.unscored * scoring / slices, 3),
        "fused_generation_seconds": round(fused.seconds, 3),
        "idle_share": round(1 - apart.busy / slices / apart.seconds, 4),
        "migrations": apart.moves,
        "migrations_fused": fused.moves,
        "moved_gigabytes": round(apart.moved_bytes / 1e9, 2),
        "migration_share": round(apart.paused / slices / apart.seconds, 5),
        "decision_ms": decision_figures(apart.decisions),
    }


def ratio(found: dict, above: str, below: str, name: str) -> float:
    """Of the same figure of two policies."""
    return round(found[above][name] / found[below][name], 4)


if __name__ == "__main__":
    main()
