"""Print what a run needs on devices that need not be here: memory, tokens, predicted seconds.

    rlhf-jax plan CONFIG --devices v5p:2x2x1 [--config.any.key=value ...]
    rlhf-jax plan CONFIG --devices v5p:4x4x4 --search --out plan.json
    rlhf-jax plan CONFIG --devices v5p:4x4x4 --search --verify

Neither weights nor prompts are read: shapes come from a config.json, or from a table of published
models by their names. Seconds are by formula, call by call, for responses of full length. A search
compares the config's plan and the presets with the best plan of calls that there is, and proves it.
With --verify the programs of the plan that was found, or else of the config's, are compiled for the
TPUs that are named: their memory, FLOPs and bytes that chips receive stand beside the formulas'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf_jax.build.describe import print_plan, print_search
from rlhf_jax.build.planned import plan_run
from rlhf_jax.build.searched import search_plans
from rlhf_jax.build.verified import print_verified, topology_devices, verify_plan
from rlhf_jax.config import command_line, memory_parts
from rlhf_jax.config.hardware import EXAMPLES, parse_hardware
from rlhf_jax.runtime.files import write_atomically


def main(argv: list[str]) -> int:
    """Return the exit code: 0 where the run fits, 1 where it does not, 2 for a mistake.

    Of a search, whether the plan that it found does.
    """
    parser = argparse.ArgumentParser(
        prog=argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", required=True, help=EXAMPLES)
    parser.add_argument("--search", action="store_true", help="find the best plan of calls")
    parser.add_argument("--out", help="where to write that plan, as NAME.json, for --config.plan")
    parser.add_argument("--chip", help="a file of figures that benchmarks/chip.py has measured")
    parser.add_argument("--verify", action="store_true", help="compile the plan for those TPUs")
    asked, rest = parser.parse_known_args(argv[1:])
    try:
        hardware = parse_hardware(asked.devices)
        if asked.chip:
            hardware = hardware.measured(Path(asked.chip))
        if asked.verify:
            topology_devices(hardware)
        config = command_line.read([argv[0], *rest])
        planned = plan_run(config, hardware)
        if asked.out and not (asked.search and asked.out.endswith(".json")):
            raise ValueError(f"--out {asked.out} is for what --search finds, in a file NAME.json.")
        searched = search_plans(config, planned) if asked.search else None
        if searched and asked.out and searched.plans[-1].fits:
            write_atomically(Path(asked.out), searched.plans[-1].plan.text().encode())
        plan = searched.plans[-1].plan if searched else planned.plan
        verified = verify_plan(config, planned, plan, _say) if asked.verify else None
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_plan(config, planned)
    if searched:
        print_search(searched)
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
