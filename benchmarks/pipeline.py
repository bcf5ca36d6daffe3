"""How close do schedules of fused pipelines come to their lower bound, with how much memory?

    python -m benchmarks.pipeline --instances benchmarks/tables/pipeline_instances.csv --limit 1.2
    python -m benchmarks.pipeline --limit none 1.2 1 --backward 2 3 --random 100 --unequal 20 \
        > benchmarks/results/pipeline.json

Policy and critic train at once, as two pipelines in opposite directions on the same nodes
(`rlhf_jax/pipeline`). Prints a JSON document with a case for each instance of a table, limit and
time of a backward over that of a forward, and a summary of instances drawn at random. `serial` is
one pipeline after the other, each by 1F1B. Times and memory are in the table's units.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import pathlib
import platform
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.schedule_check import TASK_KINDS, check
from rlhf_jax.pipeline.problem import RELATIVE_ERROR, Pipe, PipelineProblem, lay_copies
from rlhf_jax.pipeline.schedule import Schedule, one_f_one_b
from rlhf_jax.pipeline.search import solve
from rlhf_jax.report.charts import Lane, complete_svg, lanes_chart
from rlhf_jax.report.scales import axis_number, share

# The default table.
INSTANCES_TABLE = str(pathlib.Path(__file__).parent / "tables" / "pipeline_instances.csv")
MODELS = ("policy", "critic")  # of the two pipes
RANDOM_TRIES = 200  # of an instance drawn at random: under two seconds of the CPU
BAR_COLOURS = {
    "policy_forward": "#9dbff2",
    "policy_backward": "#2a6fdb",
    "critic_forward": "#f6cf94",
    "critic_backward": "#d98a2b",
}


class Instance(NamedTuple):
    """Hold a line of the table."""

    name: str
    stages: tuple[int, int]
    micro_batches: tuple[int, int]
    forward: tuple[float, float]
    kept: tuple[float, float]
    authors_peak: float

    def problem(self, limit: float | None, backward: float) -> PipelineProblem:
        """Return the problem; limit: over the authors' peak; backward: time over a forward's."""
        pipes = []
        for index, stages in enumerate(self.stages):
            forward = (self.forward[index],) * stages
            pipes.append(
                Pipe(
                    nodes=lay_copies(max(self.stages), stages, opposed=index > 0),
                    micro_batches=self.micro_batches[index],
                    forward=forward,
                    backward=tuple(backward * seconds for seconds in forward),
                    kept=(self.kept[index],) * stages,
                )
            )
        return PipelineProblem(tuple(pipes), None if limit is None else limit * self.authors_peak)


def main() -> None:
    """Print the document."""
    options = arguments()
    try:
        print(json.dumps(document(options), indent=1))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", default=INSTANCES_TABLE, help="CSV of instances")
    parser.add_argument(
        "--limit",
        type=factor,
        nargs="+",
        default=[None],
        help="memory of a node over the authors' peak, or none",
    )
    parser.add_argument(
        "--backward", type=float, nargs="+", default=[2.0], help="time over that of a forward"
    )
    parser.add_argument("--random", type=int, default=0, help="instances drawn at random")
    parser.add_argument("--unequal", type=int, default=0, help="and those with unequal stages")
    parser.add_argument("--tries", type=int, default=1000, help="of a search in the table, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=pathlib.Path, help="SVG file of the first schedule")
    return parser.parse_args(given)


def factor(word: str) -> float | None:
    """Return a number, or None of none."""
    return None if word == "none" else float(word)


def document(options: argparse.Namespace) -> dict[str, Any]:
    """Return all requested figures; write the picture."""
    content: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
        "tries": options.tries,
        "instances": table_cases(options),
    }
    if options.random:
        content["random"] = summary(options.random, unequal=False)
    if options.unequal:
        content["unequal"] = summary(options.unequal, unequal=True)
    return content


def table_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of the table's instances; draw the first schedule."""
    instances = read_instances(options.instances)
    cases = []
    for backward, limit, instance in itertools.product(options.backward, options.limit, instances):
        problem = instance.problem(limit, backward)
        schedule, figures = measure(problem, options.tries, options.seed)
        if options.picture is not None and not cases:
            options.picture.write_text(draw_schedule(schedule, f"Instance {instance.name}"))
        cases.append({"instance": instance.name, "backward": backward, "limit": limit} | figures)
    return cases


def read_instances(path: str) -> list[Instance]:
    """Read a table; raise FileNotFoundError, or ValueError with the missing part."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            f"There is no table of instances {path}; --instances takes the path of a CSV file."
        )
    with pathlib.Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [
            Instance(
                name=row["instance"],
                stages=(int(row["PP0"]), int(row["PP1"])),
                micro_batches=(int(row["M0"]), int(row["M1"])),
                forward=(float(row["f0"]), float(row["f1"])),
                kept=(float(row["mem0"]), float(row["mem1"])),
                authors_peak=float(row["authors_peak"]),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of instances ({error!r}): columns instance, PP0, PP1, M0, M1, f0, "
            "f1, mem0, mem1, authors_peak."
        ) from error


def measure(problem: PipelineProblem, tries: int, seed: int) -> tuple[Schedule, dict[str, float]]:
    """Return a checked schedule, and its figures."""
    began = time.process_time()
    schedule = solve(problem, tries, seed)
    seconds = time.process_time() - began
    check(problem, schedule)
    figures = {
        "makespan": schedule.makespan,
        "bound": schedule.bound,
        "over_bound": round(schedule.makespan / schedule.bound - 1, 5),
        "serial": one_f_one_b(problem).makespan,
        "peak": round(float(schedule.peak.max()), 6),
        "cpu_seconds": round(seconds, 2),
    }
    return schedule, figures


# ---- instances drawn at random


def random_problem(seed: int, unequal: bool = False) -> PipelineProblem:
    """Draw a policy on 2 to 16 nodes, and a critic on as many, in any number of copies."""
    draws = np.random.default_rng(seed)
    nodes = int(draws.integers(2, 17))
    divisors = [stages for stages in range(1, nodes + 1) if nodes % stages == 0]
    critic = int(draws.choice(divisors))
    return PipelineProblem(
        tuple(
            random_pipe(draws, lay_copies(nodes, stages, opposed=opposed), unequal=unequal)
            for stages, opposed in ((nodes, False), (critic, True))
        )
    )


def random_pipe(
    draws: np.random.Generator, nodes: tuple[tuple[int, ...], ...], unequal: bool
) -> Pipe:
    """Draw times, alike for all stages or not, and micro-batches, from half a stage's to four."""
    stages = len(nodes[0])
    forward = draws.integers(1, 13, size=stages if unequal else 1)
    forward = np.broadcast_to(forward, stages).tolist()
    ratio = int(draws.integers(1, 4))
    return Pipe(
        nodes=nodes,
        micro_batches=int(draws.integers(max(1, stages // 2), 4 * stages + 1)),
        forward=tuple(forward),
        backward=tuple(ratio * seconds for seconds in forward),
        kept=(1.0,) * stages,
    )


def summary(count: int, unequal: bool) -> dict[str, Any]:
    """Return figures of the instances drawn with seeds from 0 on."""
    problems = [random_problem(seed, unequal) for seed in range(count)]
    cases = [measure(problem, RANDOM_TRIES, seed=0)[1] for problem in problems]
    ratios = np.array([case["makespan"] / case["bound"] for case in cases])
    serial = np.array([case["serial"] / case["makespan"] for case in cases])
    seconds = [case["cpu_seconds"] for case in cases]
    return {
        "instances": count,
        "tries": RANDOM_TRIES,
        "at_bound": int((ratios <= 1 + RELATIVE_ERROR).sum()),
        "over_bound_p90": round(float(np.quantile(ratios, 0.9)) - 1, 5),
        "over_bound_most": round(float(ratios.max()) - 1, 5),
        "serial_over_makespan_median": round(float(np.median(serial)), 3),
        "cpu_seconds": round(sum(seconds), 1),
        "cpu_seconds_most": max(seconds),
    }


# ---- a picture


def draw_schedule(schedule: Schedule, name: str) -> str:
    """Return an SVG of the work of each node, a lane each; a backward is darker than a forward."""
    lanes = list(lanes_of(schedule))
    drawn = lanes_chart("Tasks by node", lanes, schedule.makespan)
    return complete_svg(
        drawn,
        title=f"{name}: {schedule.makespan:g}, bound {schedule.bound:g}",
        note="time of policy and critic in training at once, a lane for each node",
        colours=BAR_COLOURS,
        style="path{stroke:#fff;stroke-width:.5;vector-effect:non-scaling-stroke}",
    )


def lanes_of(schedule: Schedule) -> Iterator[Lane]:
    """Yield the lane of each node."""
    for node in range(len(schedule.peak)):
        own = schedule.tasks[schedule.tasks["node"] == node]
        bars = []
        tips = []
        for task in own:
            model = MODELS[task["pipe"]]
            kind = TASK_KINDS[task["kind"]]
            start = float(task["start"])
            end = start + float(task["seconds"])
            bars.append((f"{model}_{kind}", start, end))
            span = f"{axis_number(start, 0.01)} to {axis_number(end, 0.01)}"
            tips.append(
                (f"{model}, {kind} of micro-batch {task['micro_batch']}\n{span}", start, end)
            )
        idle = share(schedule.makespan - float(own["seconds"].sum()), schedule.makespan)
        yield Lane(name=f"{node}", bars=bars, tips=tips, marks=[], end=idle)


if __name__ == "__main__":
    main()
