"""Simulate the benefit of moving running samples between a run's slices."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.assignment import MOVE_SECONDS
from rlhf_jax.generation.reallocation import forecasts
from rlhf_jax.generation.reallocation.forecasts import LengthForecasts
from rlhf_jax.generation.strategy.roofline import ModelWork
from rlhf_jax.planner import placing
from rlhf_jax.planner.chips import ring_bandwidth
from rlhf_jax.planner.planned import Planned
from rlhf_jax.planner.response_lengths import Percentiles, draw_lengths
from rlhf_jax.planner.search.costs import PlacedRun
from rlhf_jax.planner.simulated_stage import GRAIN, Outcome, Policy, SimulatedSlice, simulate

DRAWS = 3  # of the lengths of a stage, each after a stage of others


def rows_of_worth(config: Config, planned: Planned, lengths: Percentiles) -> list[tuple[str, str]]:
    """Return rows of a plan: seconds of a stage by each placing policy, and the bound.

    Lengths are cut at `generation.max_new_tokens`. Drafts and prefills are left out. The hardware's
    chip must be known.
    """
    run = planned.run(config)
    run = run.at("generation") or run
    placed = PlacedRun.on_part(run, planned.hardware)
    slices = run.layout.slices
    if slices == 1:
        reason = "One slice generates everything, so no sample can move; mesh.slices makes more."
        return [("moves", reason)]
    machine = machine_of(placed)
    limit = float(config.generation.max_new_tokens)
    prompt = min(lengths.prompt, float(config.data.max_prompt_tokens))
    group = config.generation.samples_per_prompt
    luck = np.random.default_rng(config.seed)
    outcomes_by_name: dict[str, list[Outcome]] = {}
    bounds = []
    for _ in range(DRAWS):
        before, total = (
            np.minimum(draw_lengths(lengths, derived.samples(config), luck, group), limit)
            for _ in range(2)
        )
        policies = _policies(before, total, slices, group, limit)
        for name, policy in policies.items():
            outcome = simulate(machine, slices, total, prompt, policy)
            outcomes_by_name.setdefault(name, []).append(outcome)
        bounds.append(lower_bound(machine, total, slices, prompt))
    lines = [_line(name, outcomes) for name, outcomes in outcomes_by_name.items()]
    lines.append(f"{np.mean(bounds):8.1f} s  lower bound of any placement")
    about = f"a stage of {derived.samples(config):,} responses over {slices} slices"
    cut = float(np.interp(limit, lengths.tokens, lengths.percentiles))
    ended = f"{100 - cut:.2g}% of them cut off at {limit:,.0f} tokens" if cut < 100 else "none cut"
    lines.append(f"{about}, {ended}, no drafts, mean of {DRAWS} draws; simulated, not measured")
    if not config.generation.reallocate:
        lines.append("generation.reallocate is off: this run leaves samples where they begin")
    return [("moves", "\n".join(lines))]


def machine_of(placed: PlacedRun) -> SimulatedSlice:
    """Return a slice of a run by the roofline of its chips, for contexts up to the longest."""
    config = placed.run.config
    layout = placed.run.layout
    slices = layout.slices
    rows = min(config.generation.max_rows, math.ceil(derived.samples(config) / slices))
    live = np.arange(1, rows + 1)[:, None]
    contexts = np.arange(0, derived.text_tokens(config) + 2 * GRAIN, GRAIN)
    on_device = np.ceil(live * slices / layout.row_shards)
    seconds = placed.roofline().seconds(1, 1, on_device, on_device * contexts)
    rates = np.concatenate([np.zeros((1, len(contexts))), 1 / np.asarray(seconds)])
    hardware = placed.hardware
    stride = hardware.count // slices
    links = ring_bandwidth(placed.chip, hardware.count, hardware.nodes, slices, stride)
    work = ModelWork.of(placed.run.models.policy, layout.dtype.itemsize)
    return SimulatedSlice(
        rates, work.context_bytes, placed.chip.efficiency.links * links, MOVE_SECONDS
    )


def lower_bound(
    machine: SimulatedSlice, total: np.ndarray, slices: int, prompt: float, inference: float = 0.0
) -> float:
    """Return a lower bound of the seconds of any placement.

    It is all work at the best throughput, or the longest sample alone, both with the context of a
    fresh prompt. inference: seconds of it on all slices, which must end, too.
    """
    contexts = np.full(machine.rows, prompt)
    rates = np.arange(1, machine.rows + 1) * machine.rate(np.arange(1, machine.rows + 1), contexts)
    return max(
        float(total.sum() / slices / rates.max()) + inference,
        float(total.max() / machine.rate(np.ones(1, int), contexts[:1])[0]),
    )


def _policies(
    before: np.ndarray, total: np.ndarray, slices: int, group: int, limit: float
) -> dict[str, Policy]:
    """Return the placing policies for responses of these lengths, by their names in a plan."""
    shown = placing.prompts_of(before, group, limit)
    known = forecasts.after_stage(LengthForecasts(), shown, 1.0)
    guessed = placing.by_siblings(known, total, group, limit)
    what = "siblings that ended" if group > 1 else "the stage before"
    return {
        "each stays where it begins": placing.static(slices, len(total)),
        "spread evenly after each end": placing.even,
        f"ours, which knows {what}": placing.ours(guessed),
        "ours, were all lengths known": placing.ours(placing.known_lengths),
    }


def _line(name: str, outcomes: list[Outcome]) -> str:
    """Return the line of a policy: mean seconds, its name, mean moves."""

    def mean(of: Callable[[Outcome], float]) -> float:
        return float(np.mean([of(outcome) for outcome in outcomes]))

    moves = mean(lambda outcome: outcome.moves)
    count = f" ({moves:,.0f} moves)" if moves else ""
    return f"{mean(lambda outcome: outcome.seconds):8.1f} s  {name}{count}"
