"""Adaptive drafting explains itself: sums of rounds, a file of them, the command's table, a student
beside its past.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from rich.console import Console
from students import CONFIG, make, responses_of, run
from tiny_run import lines
from worlds import READING, World, distill_drafter, rates, selector

from rlhf_jax.command import main
from rlhf_jax.command import strategy as command
from rlhf_jax.config import default
from rlhf_jax.generation.requests import RoundReport
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.strategy import statistics
from rlhf_jax.monitoring import metrics
from rlhf_jax.runtime.checkpoint.store import Checkpoints
from rlhf_jax.training.distill import DISTILLATION, Distillation, distill, student_of
from rlhf_jax.training.gradients import Learner
from rlhf_jax.training.learn import trained

CHAIN = trees.parse("model-chain-4")

# Sums of rounds


def report(live: int, seconds: float | None = 0.5, tokens: int = 9) -> RoundReport:
    return RoundReport(CHAIN, 8, live, tokens, tokens - live, 4 * live, 100 * live, 0, seconds)


def test_rounds_are_summed_by_strategy_and_live_rows():
    tallies: statistics.StrategyCounts = {}
    for live in (5, 8, 4):
        statistics.add(tallies, report(live), 10.0, 0.4, timed=True)
    statistics.add(tallies, report(7, seconds=None), 10.0, 0.4, timed=True)
    few, many = statistics.rows(tallies)
    assert (few["live"], few["live_rows"], few["rounds"]) == (4, 4, 1)
    expected = dict(
        live=8,
        strategy="model-chain-4",
        drafter="model",
        drafts=4,
        rounds=3,
        live_rows=20,
        tokens=27,
    )
    expected |= dict(
        accepted=7, timed_rounds=2, seconds=1.0, timed_tokens=18, predicted_tokens=20.0
    )
    assert many == expected | {"predicted_seconds": 0.8}
    assert statistics.restore(json.loads(json.dumps(statistics.state(tallies)))) == tallies


def test_a_round_of_nobody_is_none_and_unknown_times_leave_no_figure():
    tallies: statistics.StrategyCounts = {}
    statistics.add(tallies, report(0, tokens=0), 1.0, 0.1, timed=True)
    assert not tallies
    statistics.add(tallies, report(3), 1.0, 0.1, timed=False)
    (row,) = statistics.rows(tallies)
    assert "seconds" not in row and "predicted_tokens" not in row and row["rounds"] == 1


def drained(noise: float = 0.0, **options):
    """A selector after one drain of 16 rows, and the machine."""
    world = World(READING, {"lookup": rates(0.4), "model": rates(0.7)}, noise=noise)
    chooser = selector(world, **options)
    distill_drafter(chooser, world.truth["model"])
    world.drain(chooser, samples=16)
    return chooser, world


def test_the_finished_stage_stays_readable_until_the_next_has_ended():
    chooser, world = drained()
    assert chooser.last_stage == []
    chooser.stage_ended(kept=1.0)
    first = chooser.last_stage
    # the last round has not arrived
    assert sum(row["rounds"] for row in first) == len(world.taken) - 1
    assert {row["strategy"] for row in first} <= set(map(trees.name_of, world.taken))
    assert all(row["live"] / 2 < row["live_rows"] / row["rounds"] <= row["live"] for row in first)
    timed = [row for row in first if row["rounds"] >= 20]
    assert timed and all(
        row["predicted_seconds"] == pytest.approx(row["seconds"], rel=0.3) for row in timed
    )
    world.rounds(chooser, 3, 5)
    assert chooser.last_stage is first
    chooser.stage_ended(kept=1.0)
    assert {row["live"] for row in chooser.last_stage} == {4}
    assert sum(row["rounds"] for row in chooser.last_stage) == 4


def test_the_table_is_of_as_many_live_rows_and_the_typical_situation_of_their_context():
    chooser, world = drained()
    chooser.stage_ended(kept=1.0)
    for live in (2, 16):
        situation = chooser.typical_situation(live, 16, 33)
        assert situation.context == pytest.approx(world.length * live)
        assert (
            set(situation.classes) == {"lookup", "model"}
            and situation.classes["model"].sum() > live
        )
        found = {
            row["strategy"]: row["rounds"] for row in chooser.table(situation) if row["rounds"]
        }
        assert found and found == {
            row["strategy"]: row["rounds"] for row in chooser.last_stage if row["live"] == live
        }
    assert chooser.typical_situation(64, 64, 33).context == pytest.approx(world.length * 64), (
        "of all where there were none such"
    )
    assert all(
        len(trees.parse(row["strategy"]).parents) < 5
        for row in chooser.table(chooser.typical_situation(1, 1, 5))
    )


def test_with_frozen_costs_no_clock_is_in_what_is_left():
    def left(noise: float):
        chooser, _ = drained(noise, frozen_costs=True)
        chooser.stage_ended(kept=1.0)
        return chooser.last_stage, json.dumps(chooser.state(), default=np.ndarray.tolist)

    assert left(0.0) == left(1.0) and left(0.0)[0]


def test_strategies_are_lines_that_a_resumed_run_cuts(tmp_path):
    chooser, _ = drained()
    chooser.stage_ended(kept=1.0)
    writer = metrics.Writer(tmp_path, 0)
    for step in range(3):
        writer.write_rows("strategies", step, chooser.last_stage)
    writer.close()
    found = lines(tmp_path / "strategies.jsonl")
    assert [row for row in found if row["step"] == 1] == [
        {"step": 1, **row} for row in chooser.last_stage
    ]
    metrics.Writer(tmp_path, 2).close()
    assert {row["step"] for row in lines(tmp_path / "strategies.jsonl")} == {0, 1}
    metrics.open_run(tmp_path, "{}").close()
    assert (tmp_path / "earlier-1" / "strategies.jsonl").exists() and not lines(
        tmp_path / "strategies.jsonl"
    )


# The command


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's config and two checkpoints, of one drain and of two."""
    folder = tmp_path_factory.mktemp("explained")
    config = default()
    # no replay, as in the simulated world
    config.drafter.path = "there"
    config.generation.acceptance = "rejection"
    (folder / "config.json").write_text(config.to_json_best_effort())
    chooser, world = drained()
    state = {"policy": {"weights": jnp.zeros(3), "version": jnp.int32(1)}}
    with Checkpoints(folder / "checkpoints", 2, {}) as saved:
        for step in (1, 2):
            chooser.stage_ended(kept=1.0)
            saved.save(step, state, {"drafting": {"selector": chooser.state()}})
            world.drain(chooser, samples=16)
    return folder, chooser


def printed(*words, width=200) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=width)
    return command.main(["strategy.py", *map(str, words)], console), console.file.getvalue()  # pyright: ignore


def test_the_command_prints_every_strategy_and_the_choice(workdir):
    folder, chooser = workdir
    code, said = printed(folder, "--live", "1,16")
    assert code == 0 and "after 2 steps" in said
    assert "1 live of 8 rows, 200 tokens each" in said and "16 live of 16 rows" in said
    for name in (
        name for name in map(trees.name_of, chooser.candidates.strategies) if ":" not in name
    ):
        assert said.count(f"{name} ") >= 2, name
    names = {line.split()[0] for line in said.splitlines() if line.strip()}
    sentences = [line for line in said.splitlines() if "tokens/s predicted" in line]
    assert len(sentences) == 2 and all(line.endswith(".") for line in sentences)
    assert {line.partition(": ")[2].split(" (")[0] for line in sentences} <= names
    assert said.splitlines()[1:3] == sentences, "the answer stands before the tables"
    _, narrow = printed(folder, "--live", "1,16", width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    for name in map(trees.name_of, chooser.candidates.strategies):
        assert ":" in name or f"{name} " in narrow, "no name is broken"
    assert not [line for line in narrow.splitlines() if line.lstrip().startswith(",")], (
        "a tree is broken between parents"
    )


def test_the_command_shows_the_tables_of_the_checkpoint(workdir):
    """The rows in order of predicted tokens a second; rounds as they were counted by then."""
    folder, _ = workdir
    tables = {}
    for step in (1, 2):
        _, said = printed(folder, "--live", "16", "--step", step)
        rows = [
            line.split()
            for line in said.splitlines()
            if line.strip().startswith(("plain", "model-", "lookup-"))
        ]
        rows = [cells for cells in rows if len(cells) >= 4 and cells[1][0].isdigit()]
        rates = [float(cells[3].replace(",", "")) for cells in rows]
        assert rates == sorted(rates, reverse=True) and len(rates) > 10
        decimals = [[len(cell.partition(".")[2]) for cell in cells[1:4]] for cells in rows]
        assert decimals == [[2, 2, 1]] * len(rows), "a column reads alike"
        tables[step] = {cells[0]: int(cells[4]) for cells in rows if len(cells) > 4}
    assert sum(tables[2].values()) > sum(tables[1].values()) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "There is no checkpoint of step 7"),
        (["--live", "4,0"], "--live is '4,0'; it must be numbers above 0"),
        (["--live", "many"], "--live is 'many'"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(workdir, words, said, capsys):
    assert main(["strategy", str(workdir[0]), *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "There is no run in"),
        ({"generation": {}}, "is no config of a run"),
        (
            {"generation": {"strategy": "plain"}},
            "chooses no strategy: its generation.strategy is 'plain'",
        ),
        ({"generation": {"strategy": "adaptive"}}, "There is no checkpoint in"),
    ],
)
def test_a_run_without_choices_is_one_sentence(tmp_path, config, said, capsys):
    if config is not None:
        whole = json.loads(default().to_json_best_effort()) if config["generation"] else {}
        whole |= {"generation": whole.get("generation", {}) | config["generation"]}
        (tmp_path / "config.json").write_text(json.dumps(whole))
    assert main(["strategy", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_live_rows_are_spread_up_to_the_most():
    assert [command.live_rows("", most) for most in (1, 8, 64)] == [[1], [1, 4, 8], [1, 4, 16, 64]]


# A student beside itself as it began


@pytest.mark.slow
def test_a_student_that_never_learns_is_measured_beside_the_one_that_does():
    """Of four words, so that many tokens are drawn alike by chance: the two are equal at first, on
    the same rows.
    """
    policy = make(jax.random.key(0), dataclasses.replace(tiny_run.CONFIG, vocab_size=4))
    config = dataclasses.replace(CONFIG, microbatch_rows=4)
    learner = Learner("drafter", DISTILLATION, optax.adam(1e-2), config)
    part = functools.partial(student_of, layers=1)
    student = trained(policy, learner.optimizer, part=part)
    frozen = part(policy)
    given = (policy, responses_of(8, 16, 4), Distillation(learner, 8, frozen))
    found = []
    for _ in range(6):
        student, seen = distill(student, *given, step=0)
        found.append((seen["drafter/acceptance"], seen["drafter/acceptance_frozen"]))
    assert found[0][0] == found[0][1] > 0.1
    assert all(frozen == pytest.approx(found[0][1]) for _, frozen in found)
    assert abs(found[-1][0] - found[-1][1]) > 0.01


@pytest.mark.slow
def test_a_run_leaves_its_strategies_and_both_curves(tmp_path):
    """Stopped and gone on with, `deterministic`: the file is that of a run in one go, and the
    command reads it.
    """
    tiny_run.make_model(tmp_path / "tiny", num_layers=3)
    tiny_run.make_files(tmp_path)
    changes = {
        "deterministic": True,
        "generation__strategy": "adaptive",
        "evaluation__every": 0,
        "drafter__layers": 2,
    }
    changes |= {"drafter__learning_rate": 3e-3, "drafter__samples": 8, "checkpoint__every": 1}
    for name, steps in (("whole", 2), ("halves", 1), ("halves", 2)):
        run(tmp_path, name, **changes, steps=steps)
    whole, halves = (
        (tmp_path / name / "strategies.jsonl").read_bytes() for name in ("whole", "halves")
    )
    assert whole == halves
    steps = lines(tmp_path / "whole" / "metrics.jsonl")
    rows = lines(tmp_path / "whole" / "strategies.jsonl")
    for step in steps:
        own = [row for row in rows if row["step"] == step["step"]]
        assert sum(row["tokens"] for row in own) == step["generation/tokens"]
    assert steps[0]["drafter/acceptance"] == pytest.approx(
        steps[0]["drafter/acceptance_frozen"], abs=0.02
    )
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Strategies by live rows" in page and "as it began" in page
    code, said = printed(tmp_path / "whole", "--live", "4")
    assert code == 0 and "tokens/s predicted" in said
