"""The report of a run: one HTML file, readable without a network or scripts."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from rlhf_jax.monitoring.report import drafting, timeline
from rlhf_jax.monitoring.report.charts import Chart, line_chart, stacked_chart
from rlhf_jax.monitoring.report.run import Row, Run, Series, read_run, series
from rlhf_jax.monitoring.report.scales import duration, reading, signed, smooth
from rlhf_jax.runtime.files import write_atomically

ALGORITHMS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce++": "REINFORCE++",
    "reinforce++-baseline": "REINFORCE++ with baseline",
}
STAGES = ("generation", "inference", "training")
# (key, title, what it counts) of the charts between the reward's and the stages'.
CHARTS = (
    ("kl/mean", "KL to the reference", "nats a token"),
    ("response/length_mean", "Response length", "tokens"),
    ("loss/policy", "Policy loss", ""),
    ("loss/value", "Value loss", ""),
    ("generation/tokens_per_second", "Generation speed", "tokens a second"),
)
# samples shown, of them unfolded, and characters of a text
PAIRS = 24
OPEN_PAIRS = 6
LONGEST = 2000


@dataclasses.dataclass(frozen=True)
class Figure:
    """A headline number: a value, what it was before, and a note."""

    label: str
    value: str
    before: str = ""
    change: float | None = None
    note: str = ""


def write_report(workdir: str | pathlib.Path, device: str = "") -> pathlib.Path:
    """Writes WORKDIR/report.html from the run's files and returns its path; `device` names the
    hardware, if known.

    Errors are those of `read_run`, and OSError where the file cannot be written.
    """
    run = read_run(workdir)
    path = pathlib.Path(workdir).expanduser() / "report.html"
    text = render(run, device)
    try:
        # A lone surrogate becomes '?'.
        write_atomically(path, text.encode(errors="replace"))
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            f"{path} cannot be written ({reason}); make room and give launch/report.py again."
        ) from error
    return path


def render(run: Run, device: str = "") -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"reading": reading, "change": _change}
    return environment.get_template("page.html").render(
        run=run,
        facts=facts(run, device),
        figures={"big": rewards(run), "small": headline(run)},
        charts=charts(run),
        picture=timeline.picture(run),
        words=timeline.words,
        drafting=drafting.charts(run) if drafting.drafts(run) else [],
        outcomes=drafting.table(run.strategies),
        others=other_charts(run),
        pairs=pairs(run),
        open_pairs=OPEN_PAIRS,
        config=_sections(run.config),
    )


def facts(run: Run, device: str) -> list[tuple[str, str]]:
    """(name, value) of what the run was."""
    config = run.config
    strategy = str(config.get("generation.strategy", ""))
    estimator = str(config.get("advantage.estimator", ""))
    rows = [
        ("model", pathlib.PurePath(str(config.get("model.path", ""))).name),
        ("algorithm", ALGORITHMS.get(estimator, estimator)),
        ("steps", _steps(run)),
        ("drafting", "none" if strategy == "plain" else strategy),
        ("device", device),
        ("date", f"{run.date.day} {run.date:%B %Y}"),
    ]
    return [(name, value) for name, value in rows if value]


def rewards(run: Run) -> list[Figure]:
    """What was measured on held-out prompts, before and after; without an evaluation, training's
    reward.
    """
    return _measures(run.evaluations) or _before_after(
        "Training reward", series(run.metrics, "reward/mean")
    )


def headline(run: Run) -> list[Figure]:
    """Where the run stands: KL, length, speed, and the time it took."""
    rows = run.metrics
    figures = []
    if kl := series(rows, "kl/mean"):
        figures.append(
            Figure("KL to the reference", reading(smooth(kl.values)[-1]), note="nats a token")
        )
    figures += _before_after(
        "Response length", series(rows, "response/length_mean"), "tokens", judged=False
    )
    tokens = _total(rows, "generation/tokens")
    seconds = _total(rows, "generation/seconds")
    if tokens and seconds:
        figures.append(
            Figure("Generation speed", reading(tokens / seconds), note="tokens a second")
        )
    if rounds := sum(
        row["generation/tokens"] / row["generation/tokens_per_round"] for row in rows if _drew(row)
    ):
        figures.append(
            Figure("Tokens per round", f"{tokens / rounds:.2f}", note="plain decoding has 1")
        )
    if spent := _total(rows, "step/seconds") or sum(
        _total(rows, f"{stage}/seconds") for stage in STAGES
    ):
        figures.append(
            Figure(
                "Wall time of all steps",
                duration(spent),
                note=f"{duration(spent / len(rows))} a step",
            )
        )
    return figures


def charts(run: Run) -> list[Chart]:
    """The reward's chart, those of CHARTS that have values, and the stages'; what drafts bring, of
    a fixed strategy, and what slices left undone and moved.
    """
    fixed = run.config.get("generation.strategy") != "plain" and not drafting.drafts(run)
    drawn = [_chart(run.metrics, *chart) for chart in CHARTS + (drafting.GAINS if fixed else ())]
    drawn += timeline.charts(run.metrics)
    return [chart for chart in (_reward_chart(run), *drawn, _stage_chart(run.metrics)) if chart.svg]


def other_charts(run: Run) -> list[Chart]:
    """A small chart for each number that has none above."""
    shown = {"step", "step/seconds", "reward/mean", *(key for key, *_ in CHARTS + drafting.GAINS)}
    shown |= {f"{stage}/seconds" for stage in STAGES} | {*timeline.OWN}
    own = drafting.OWN if drafting.drafts(run) else ()
    keys = sorted({key for row in run.metrics for key in row if not key.startswith(own)} - shown)
    small = [
        Chart(key, "", Markup(line_chart(key, series(run.metrics, key), height=84))) for key in keys
    ]
    return [chart for chart in small if chart.svg]


def pairs(run: Run) -> list[tuple[str, list[tuple[str, Row]]]]:
    """(prompt, [(when, sample), ...]) of at most PAIRS samples, evenly spread; of two batches, what
    has one prompt.

    Batches of training have no prompts in common: there the sample itself says its prompt.
    """
    batches = [
        [(_when(step, run), _shown(sample)) for sample in rows] for step, rows in run.samples
    ]
    rows = list(zip(*batches, strict=False))
    if run.evaluations:
        rows = [row for row in rows if len({sample["prompt"] for _, sample in row}) == 1]
    chosen = rows[:: -(-len(rows) // PAIRS) or 1]
    return [(row[0][1]["prompt"] if run.evaluations else "", list(row)) for row in chosen]


def _steps(run: Run) -> str:
    done = len(run.metrics)
    asked = run.config.get("steps", 0)
    return f"{done:,} of {asked:,}" if isinstance(asked, int) and done < asked else f"{done:,}"


def _measures(evaluations: list[Row]) -> list[Figure]:
    if not evaluations:
        return []
    names = [
        key for key in evaluations[0] if key != "step" and not key.startswith("eval/generation/")
    ]
    found = {key.removeprefix("eval/"): series(evaluations, key) for key in names}
    return [
        figure
        for name, line in found.items()
        for figure in _before_after(f"Held-out {name}", line, ends=True)
    ]


def _before_after(
    label: str, line: Series, note: str = "", judged: bool = True, ends: bool = False
) -> list[Figure]:
    """A figure of a series' start and end, as its chart labels them: smoothed, or the `ends`
    themselves.
    """
    if not line:
        return []
    first, last = line.values[[0, -1]] if ends else smooth(line.values)[[0, -1]]
    if len(line) == 1:
        return [Figure(label, reading(last), note=note or f"after {line.steps[0]:g} steps")]
    change = float(last - first) if judged else None
    return [Figure(label, reading(last), reading(first), change, note)]


def _total(rows: list[Row], key: str) -> float:
    return float(series(rows, key).values.sum())


def _drew(row: Row) -> bool:
    return row.get("generation/tokens", 0) > 0 and row.get("generation/tokens_per_round", 0) > 0


def _chart(rows: list[Row], key: str, title: str, note: str) -> Chart:
    line = series(rows, key, title)
    return Chart(title, note, Markup(line_chart(title, line)))


def _reward_chart(run: Run) -> Chart:
    trained = series(run.metrics, "reward/mean", "training")
    held_out = series(run.evaluations, "eval/reward", "held-out")
    legend = (("mean", "training, smoothed"), ("raw", "each step"), ("dot", "held-out prompts"))
    shown = legend[: 2 if trained else 0] + legend[2 if held_out else 3 :]
    return Chart("Reward", "", Markup(line_chart("Reward", trained, held_out, height=260)), shown)


def _stage_chart(rows: list[Row]) -> Chart:
    """Seconds of the steps that say them for every stage."""
    timed = [row for row in rows if all(f"{stage}/seconds" in row for stage in STAGES)]
    layers = [series(timed, f"{stage}/seconds", stage) for stage in STAGES]
    spent = [float(layer.values.sum()) for layer in layers]
    shares = [
        f"{stage} {seconds / (sum(spent) or 1):.0%}"
        for stage, seconds in zip(STAGES, spent, strict=True)
    ]
    legend = tuple((f"layer-{index}", text) for index, text in enumerate(shares))
    return Chart(
        "Time by stage", "seconds a step", Markup(stacked_chart("Time by stage", layers)), legend
    )


def _when(step: int, run: Run) -> str:
    if run.evaluations:
        return "before training" if step == 0 else f"after {step:,} step{'s' * (step > 1)}"
    return f"in step {step:,}"


def _shown(sample: Row) -> Row:
    """A sample as text to show, long ones cut."""
    texts = {key: _cut(str(sample.get(key, ""))) for key in ("prompt", "response")}
    reward = sample.get("reward")
    return texts | {
        "reward": reward if isinstance(reward, int | float) and np.isfinite(reward) else None
    }


def _cut(text: str) -> str:
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:LONGEST]} … ({left_out:,} more characters)"


def _sections(config: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """(key, value) rows of the config by section, the keys outside any section first, under ''."""
    sections: dict[str, list[tuple[str, str]]] = {"": []}
    for name, value in config.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append((key, "—" if value in ("", [], {}) else str(value)))
    return sections


def _change(value: float) -> str:
    """A change with its sign: +0.328, −0.012."""
    return ("+" if value >= 0 else signed("-")) + reading(abs(value))
