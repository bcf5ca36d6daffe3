"""Print what adaptive drafting would choose, and why.

rlhf-jax strategy WORKDIR [--live 1,4,16,64] [--step N]

For each number of live rows: every strategy, the best first, with what its round is predicted to
give and what its rounds gave with about as many live rows.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation import drafting
from rlhf_jax.generation.precompile import VERIFIED
from rlhf_jax.generation.strategy import cost, statistics
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.runtime.checkpoint.store import read_part
from rlhf_jax.runtime.foreign import read_json
from rlhf_jax.runtime.mirror import fetched

# (heading, key, format) of the columns: predictions for a round, then measurements, empty if none.
HEADINGS = (
    ("predicted\ntok/row", "tokens_per_row", ".2f"),
    ("\nms", "milliseconds", ",.2f"),
    ("\ntok/s", "tokens_per_second", ",.1f"),
    ("so far\nrounds", "rounds", ",.0f"),
    ("\ntok/row", "realised_tokens_per_row", ".2f"),
    ("\ntok/s", "realised_tokens_per_second", ",.1f"),
)


def main(argv: list[str], console: Console | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog=argv[0], description="Print the table that adaptive drafting chooses from."
    )
    parser.add_argument("workdir", help="of the run; the run may be going on")
    parser.add_argument(
        "--live",
        default="",
        help="numbers of live rows, as in 1,4,16; from 1 to generation.max_rows if not given",
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; the latest if not given")
    options = parser.parse_args(argv[1:])
    workdir = fetched(options.workdir, checkpoints=True)
    config = read_config(workdir)
    step, selector = read_selector(workdir, config, options.step)
    live = live_rows(options.live, config.generation.max_rows)
    show(selector, config, live, f"{workdir.name} after {step:,} steps", console or Console())
    return 0


def read_config(workdir: Path) -> Config:
    """Return the config of the run in `workdir`.

    Raises ValueError or FileNotFoundError if there is none.
    """
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"There is no run in {workdir}: {file} is missing.")
    stored = read_json(file)
    if (
        not isinstance(stored, dict)
        or not {"generation", "drafter", "deterministic"} <= stored.keys()
    ):
        raise ValueError(
            f"{file} is no config of a run: it lacks generation, drafter or deterministic."
        )
    return Config(stored)


def read_selector(workdir: Path, config: Config, step: int | None) -> tuple[int, Selector]:
    """Return the step of a checkpoint and its selector of training's strategies.

    No weights are read. step: None for the latest checkpoint. Raises ValueError or OSError in one
    sentence if the run's strategy is fixed or there is no such checkpoint.
    """
    if not derived.adaptive(config):
        raise ValueError(
            f"The run in {workdir} chooses no strategy: its generation.strategy is"
            f" {config.generation.strategy!r}."
        )
    # The smallest readable part of the models is the policy's version, in host memory.
    memory = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=memory)
    template = {"policy": {"version": counter}}
    step, _, host = read_part(workdir / "checkpoints", template, step)
    saved = host["drafting"].get("selector")
    if saved is None:
        raise ValueError(
            f"The checkpoint of step {step} in {workdir} was made with a fixed strategy; name a"
            " later one."
        )
    selector = Selector(
        drafting.strategies(config), cost.restore(saved["costs"]), config.deterministic
    )
    selector.restore(saved)
    return step, selector


def live_rows(text: str, most: int) -> list[int]:
    """Return the numbers of '1,4,16'; for '' the powers 1, 4, 16 ... below `most`, and `most`.

    Raises ValueError if one is not above 0.
    """
    if not text:
        return [*(4**power for power in range(most.bit_length()) if 4**power < most), most]
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"--live is {text!r}; it must be numbers above 0, as in --live 1,4,16.")
    return numbers


def show(selector: Selector, config: Config, live: list[int], title: str, console: Console) -> None:
    """Print the choice at each number of live rows in one sentence, and a table for each."""
    console.print(Text(title, "bold"))
    situations = [_situation(selector, config, count) for count in live]
    for count, situation in zip(live, situations, strict=True):
        # Choosing changes the selector's state, and these are only queries.
        choice = copy.deepcopy(selector).choose(situation)
        console.print(Text(f"{count:,} live: {choice.why}."))
    for situation in situations:
        console.print("", _table(selector.table(situation), situation))


def _situation(selector: Selector, config: Config, live: int) -> Situation:
    """Return the situation of rounds with this many live rows.

    The batch has the smallest size allowed, on one device.
    """
    rows = config.generation.max_rows
    if live > rows:
        rows = statistics.bucket(live)
    while rows % 2 == 0 and rows // 2 >= max(live, config.generation.min_rows):
        rows //= 2
    return selector.typical_situation(live, rows, most_nodes=VERIFIED // rows)


def _table(rows: list[dict[str, Any]], situation: Situation) -> Table:
    """Return the table of strategies in one situation."""
    context = situation.context / situation.live
    title = f"{situation.live} live of {situation.rows} rows, {context:,.0f} tokens each"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    names = [_Name(row["strategy"]) for row in rows]
    least = max((len(part) for name in names for part in name.parts), default=0)
    table.add_column("\nstrategy", min_width=least)
    for heading, _, _ in HEADINGS:
        table.add_column(heading, justify="right")
    for name, row in zip(names, rows, strict=True):
        figures = row | {"milliseconds": 1e3 * row["seconds"]}
        cells = [format(figures[key], form) if figures[key] else "" for _, key, form in HEADINGS]
        table.add_row(name, *cells)
    return table


class _Name:
    """Show the name of a strategy; the parents of a tree may be broken over lines."""

    def __init__(self, name: str):
        self.parts = re.findall(r"[^,]+,?", name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self.parts)), sum(map(len, self.parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = ""
        for part in self.parts:
            if line and len(line + part) > options.max_width:
                yield Text(line)
                line = ""
            line += part
        yield Text(line)
