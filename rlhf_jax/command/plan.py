"""Print the needs of a run on devices that may be absent: memory, tokens, predicted seconds.

    rlhf-jax plan CONFIG --devices v5p:2x2x1 [--config.any.key=value ...]
    rlhf-jax plan CONFIG --devices v5p:4x4x4 --search --verify --out plan.json
    rlhf-jax plan CONFIG --devices gpu:8x8:h100 --search --lag 1 --network 200
    rlhf-jax plan CONFIG --devices gpu:8:h100 --lengths lognormal:900:1.3:16384

Neither weights nor prompts are read: shapes come from a config.json, or from a table of published
models by name. Seconds are by formula, call by call, for responses of full length. A search
compares the config's plan and the presets with the best possible plan of calls, and proves it; it
also shows the effect of other efficiencies of the chip. It writes plan.svg next to plan.json. With
--verify the programs of the found plan, or else of the config's, are compiled for the named
devices: their memory, FLOPs and received bytes are printed next to the formulas'. With --lengths a
stage of generation is simulated, to measure the gain of moving samples between slices.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import jax

from rlhf_jax.config import command_line
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.planner.describe import print_plan
from rlhf_jax.planner.describe_search import print_search, timeline_svg
from rlhf_jax.planner.hardware import EXAMPLES, Hardware, parse_hardware
from rlhf_jax.planner.planned import plan_run
from rlhf_jax.planner.response_lengths import LENGTHS_TABLE, read_percentiles
from rlhf_jax.planner.searched import search_plans, vary
from rlhf_jax.planner.topology import topology_devices
from rlhf_jax.planner.verified import print_verified, verify_plan
from rlhf_jax.planner.worth_of_moves import rows_of_worth
from rlhf_jax.runtime.files import write_atomically


def main(argv: list[str]) -> int:
    """Return the exit code: 0 if the run fits, 1 if it does not.

    With --search, it is about the plan that was found.
    """
    options, rest = _parser(argv[0]).parse_known_args(argv[1:])
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")  # no device is queried or reserved
    hardware = _hardware(options)
    lengths = read_percentiles(options.lengths) if options.lengths else None
    config = command_line.read([argv[0], *rest])
    planned = plan_run(config, hardware)
    searched = search_plans(config, planned, options.lag) if options.search else None
    if searched and options.out and searched.plans[-1].fits:
        best = searched.plans[-1]
        out = Path(options.out)
        write_atomically(out, best.plan.text().encode())
        picture = timeline_svg(best, str(planned.hardware))
        write_atomically(out.with_suffix(".svg"), picture.encode())
    chosen = searched.plans[-1] if searched else planned
    run = planned._replace(plan=chosen.plan, remat=chosen.remat)
    ahead = copy.deepcopy(config)
    ahead.training.lag = max(options.lag, config.training.lag)
    verified = verify_plan(ahead, run, _print_progress) if options.verify else None
    more = [] if lengths is None else rows_of_worth(config, run, lengths)
    print_plan(config, planned, more)
    if searched:
        print_search(searched, vary(config, planned, searched.plans))
    if verified:
        print_verified(verified)
        return 1 if verified.too_large else 0
    if searched:
        return 0 if searched.plans[-1].fits else 1
    if planned.hardware.gigabytes:
        try:
            memory_parts.check(planned.parts, planned.hardware.gigabytes * memory_parts.GIGA)
        except ValueError as error:
            print(f"It does not fit: {error}")
            return 1
        print("It fits.")
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    """Make the parser of the command's own arguments; the rest belongs to the config."""
    parser = argparse.ArgumentParser(
        prog=name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", required=True, help=EXAMPLES)
    parser.add_argument("--search", action="store_true", help="find the best plan of calls")
    parser.add_argument("--out", help="where to write that plan, as NAME.json, for --config.plan")
    parser.add_argument(
        "--lag",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: of plans that draw the samples of the next step while this one trains",
    )
    parser.add_argument(
        "--network", type=float, metavar="GBITS", help="of each GPU, between nodes (gigabits/s)"
    )
    parser.add_argument("--chip", help="a file of figures that benchmarks/chip.py has measured")
    parser.add_argument(
        "--lengths",
        nargs="?",
        const=LENGTHS_TABLE,
        help="simulate the gain of moves: for chats, or a CSV of percentiles, or"
        " lognormal:MEDIAN:SIGMA:MOST",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compile the plan for those TPUs or GPUs"
    )
    return parser


def _hardware(options: argparse.Namespace) -> Hardware:
    """Return the hardware to plan for; ValueError if the arguments are inconsistent."""
    hardware = parse_hardware(options.devices)
    if options.chip:
        hardware = hardware.measured(Path(options.chip))
    if options.network is not None:
        hardware = hardware.with_network(options.network)
    if options.verify:
        topology_devices(hardware)
    if options.out and not (options.search and options.out.endswith(".json")):
        raise ValueError(
            f"--out {options.out} is for the plan that --search finds, in a file NAME.json."
        )
    if options.out and not Path(options.out).absolute().parent.is_dir():
        raise ValueError(f"--out {options.out} is in a missing folder: make it first.")
    if options.lag and not options.search:
        raise ValueError("--lag 1 applies to a search; add --search.")
    return hardware


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
