"""Write the report of a run: one HTML file, readable without a network or scripts."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from rlhf_jax.monitoring.metrics import is_measure, paired
from rlhf_jax.report import drafting, timeline
from rlhf_jax.report.charts import COLOURS, Chart, line_chart, lines_chart, stacked_chart
from rlhf_jax.report.run import Row, RunRecord, Series, is_constant, read_run, series
from rlhf_jax.report.scales import duration, reading, signed, smooth
from rlhf_jax.report.warnings import certain_change, warnings
from rlhf_jax.runtime.files import write_atomically, writing

# (key, label) of the before-and-after number without held-out prompts: the first one present.
TRAINED = (
    ("reward/mean", "Training reward"),
    ("drafter/acceptance", "Tokens that the student draws, too"),
    ("loss/policy", "Loss"),
)
STAGE_NAMES = ("generation", "inference", "training")
# (key, title, unit) of the charts between the reward's and the stages'.
STEP_CHARTS = (
    ("kl/mean", "KL to the reference", "nats a token"),
    ("response/length_mean", "Response length", "tokens"),
    ("loss/policy", "Policy loss", ""),
    ("loss/value", "Value loss", ""),
    ("generation/tokens_per_second", "Generation speed", "tokens a second"),
)
PAIRS = 24  # most samples shown
OPEN_PAIRS = 6  # samples shown unfolded
LONGEST_TEXT = 2000  # characters of a text that are shown


@dataclasses.dataclass(frozen=True)
class Figure:
    """Hold a headline number: a value, its initial value, and a note."""

    label: str
    value: str
    before: str = ""
    change: float | None = None
    note: str = ""


def write_report(workdir: str | pathlib.Path) -> pathlib.Path:
    """Write WORKDIR/report.html from the run's files, and return its path.

    Errors are those of `read_run`, and OSError if the file cannot be written.
    """
    run = read_run(workdir)
    path = pathlib.Path(workdir).expanduser() / "report.html"
    content = render(run)
    with writing(path, "; make room and give rlhf-jax report again"):
        write_atomically(path, content)
    return path


def rendered(page: str, **values: Any) -> bytes:
    """Return the HTML of a page of this folder; a lone surrogate becomes '?'."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {"reading": reading, "change": _change}
    return made.get_template(page).render(**values).encode(errors="replace")


def render(run: RunRecord) -> bytes:
    """Return the page's HTML."""
    # The config's rows (key, value) by section; the keys outside any section come first, under ''.
    sections: dict[str, list[tuple[str, str]]] = {"": []}
    for name, value in run.config.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append((key, "—" if value in ("", [], {}) else str(value)))
    # The measures on held-out prompts, else the training reward, before and after.
    big = []
    for key in run.evaluations[0] if run.evaluations else ():
        if is_measure(key):
            line = series(run.evaluations, key)
            big += _before_after(f"Held-out {key.removeprefix('eval/')}", line, ends=True)
    for key, label in TRAINED:
        judged = key != "reward/mean" or certain_change(run) != 0
        big = big or _before_after(label, series(run.metrics, key), judged=judged)
    return rendered(
        "page.html",
        run=run,
        facts=facts(run),
        warnings=warnings(run),
        figures={"big": big, "small": headline(run)},
        charts=charts(run),
        picture=timeline.picture(run),
        words=timeline.words,
        left_out=left_out(run),
        drafting=drafting.charts(run) if drafting.drafts(run) else [],
        outcomes=drafting.table(run.strategies) if drafting.drafts(run) else [],
        others=other_charts(run),
        pairs=pairs(run),
        open_pairs=OPEN_PAIRS,
        config=sections,
    )


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return (name, value) facts of the run."""
    config = run.config
    done = len(run.metrics)
    steps = config.get("steps", 0)
    unfinished = isinstance(steps, int) and done < steps
    strategy = str(config.get("generation.strategy", ""))
    rows = [
        ("model", pathlib.PurePath(str(config.get("model.path", ""))).name),
        ("algorithm", run.title),
        ("steps", f"{done:,} of {steps:,}" if unfinished else f"{done:,}"),
        ("drafting", "none" if strategy == "plain" else strategy),
        ("device", run.environment.get("device", "")),
        ("date", f"{run.date.day} {run.date:%B %Y}"),
        *((name, run.environment.get(name, "")) for name in ("command", "commit", "versions")),
    ]
    return [(name, value) for name, value in rows if value]


def headline(run: RunRecord) -> list[Figure]:
    """Return the headline numbers: KL, length, speed, and the time taken."""
    rows = run.metrics
    figures = []
    if kl := series(rows, "kl/mean"):
        last = reading(smooth(kl.values)[-1])
        figures.append(Figure("KL to the reference", last, note="nats a token"))
    length = series(rows, "response/length_mean")
    figures += _before_after("Response length", length, "tokens", judged=False)

    tokens = _total(rows, "generation/tokens")
    seconds = _total(rows, "generation/seconds")
    if tokens and seconds:
        speed = reading(tokens / seconds)
        figures.append(Figure("Generation speed", speed, note="tokens a second"))
    rounds = 0.0
    for row in rows:
        a_round = row.get("generation/tokens_per_round", 0)
        if row.get("generation/tokens", 0) > 0 and a_round > 0:
            rounds += row["generation/tokens"] / a_round
    if rounds:
        gain = f"{tokens / rounds:.2f}"
        figures.append(Figure("Tokens per round", gain, note="plain decoding has 1"))

    stages = sum(_total(rows, f"{stage}/seconds") for stage in STAGE_NAMES)
    if spent := _total(rows, "step/seconds") or stages:
        a_step = f"{duration(spent / len(rows))} a step"
        figures.append(Figure("Wall time of all steps", duration(spent), note=a_step))
    return figures


def charts(run: RunRecord) -> list[Chart]:
    """Draw the reward, those of STEP_CHARTS that have values, and the time of the stages.

    In between are the gains of drafts with a fixed strategy, and the idle time and moves of slices.
    """
    trained = series(run.metrics, "reward/mean", "training")
    held_out = series(run.evaluations, "eval/reward", "held-out")
    legend = []
    if trained:
        legend += [("mean", "training, smoothed"), ("raw", "each step")]
    if held_out:
        legend.append(("dot", "held-out prompts"))
    reward = line_chart("Reward", trained, held_out, height=260)
    drawn = [Chart("Reward", "", reward, tuple(legend))]
    terms = _terms(run)
    if len(terms) > 1:
        lines = [
            (f"other-{index % COLOURS}", series(run.metrics, key, name))
            for index, (key, name) in enumerate(terms.items())
        ]
        drawn.append(lines_chart("Terms of the reward", "mean of a step, unweighted", lines))

    fixed = run.config.get("generation.strategy") != "plain" and not drafting.drafts(run)
    for key, title, note in STEP_CHARTS + (drafting.GAINS if fixed else ()):
        line = series(run.metrics, key, title)
        drawn.append(Chart(title, note, line_chart(title, line)))
    drawn += timeline.charts(run.metrics)
    drawn.append(_stage_chart(run.metrics))
    return [chart for chart in drawn if chart.svg]


def other_charts(run: RunRecord) -> list[Chart]:
    """Draw a small chart for each number without one above."""
    shown = {"step", "step/seconds", "reward/mean", *timeline.SLICE_KEYS}
    shown |= {key for key, *_ in STEP_CHARTS + drafting.GAINS} | _terms(run).keys()
    shown |= {f"{stage}/seconds" for stage in STAGE_NAMES}
    own = drafting.DRAFTING_KEYS if drafting.drafts(run) else ()
    keys = sorted({key for row in run.metrics for key in row if not key.startswith(own)} - shown)
    drawn = [Chart(key, "", line_chart(key, series(run.metrics, key), height=84)) for key in keys]
    return [chart for chart in drawn if chart.svg]


def left_out(run: RunRecord) -> list[str]:
    """List the charts left out because they would be empty, a sentence each."""
    sentences = []
    if run.trace is not None and len(run.trace.lanes) == 1:
        sentences.append("One slice generated everything.")
    if run.strategies and not drafting.drafts(run):
        sentences.append("Every round was plain: no drafter promised more tokens a second.")
    keys = dict.fromkeys(key for row in run.metrics for key in row)
    same = [line for line in (series(run.metrics, key) for key in keys) if is_constant(line)]
    if same:
        values = ", ".join(f"{line.name} {reading(line.values[0])}" for line in same)
        sentences.append(f"Never changed: {values}.")
    return sentences


def pairs(run: RunRecord) -> list[tuple[str, list[tuple[str, Row]]]]:
    """Return (prompt, [(when, sample), ...]) of at most PAIRS samples, evenly spread.

    Of two batches it pairs samples with one prompt. If training batches have no common prompt, the
    samples of the last stand alone. Long texts are cut.
    """

    def when(step: int) -> str:
        if not run.evaluations:
            return f"in step {step:,}"
        return "before training" if step == 0 else f"after {step:,} step{'s' * (step > 1)}"

    batches = [(when(step), rows) for step, rows in run.samples]
    rows = paired(*(samples for _, samples in batches)) if len(batches) > 1 else []
    if not rows:
        batches = batches[-1:]
        rows = [(sample,) for _, samples in batches for sample in samples]
    names = [name for name, _ in batches]
    return shown_pairs(names, rows)


def shown_pairs(
    names: Sequence[str], rows: Sequence[tuple[Row, ...]]
) -> list[tuple[str, list[tuple[str, Row]]]]:
    """Return (prompt, [(name, sample), ...]) of at most PAIRS rows of samples, evenly spread.

    The first sample of each prompt comes first, then the second.
    """
    pairs_of = [
        (str(row[0].get("prompt", "")), [*zip(names, map(_shown, row), strict=True)])
        for row in rows[:: -(-len(rows) // PAIRS) or 1]
    ]
    prompts = [prompt for prompt, _ in pairs_of]
    order = sorted(range(len(pairs_of)), key=lambda index: prompts[:index].count(prompts[index]))
    return [pairs_of[index] for index in order]


def _terms(run: RunRecord) -> dict[str, str]:
    """Return the keys of the means of the reward's terms, with their names."""
    keys = dict.fromkeys(key for row in run.metrics for key in row)
    matches = {key: re.fullmatch(r"reward/([^/]+)/mean", key) for key in keys}
    return {key: match[1] for key, match in matches.items() if match}


def _before_after(
    label: str, line: Series, note: str = "", judged: bool = True, ends: bool = False
) -> list[Figure]:
    """Return figures of a series' start and end, or none if it is empty.

    They are those that its chart labels: smoothed, or the `ends` themselves. If a change is not
    `judged`, it is not marked as good or bad.
    """
    if not line:
        return []
    first, last = line.values[[0, -1]] if ends else smooth(line.values)[[0, -1]]
    if len(line) == 1:
        return [Figure(label, reading(last), note=note or f"after {line.steps[0]:g} steps")]
    change = float(last - first) if judged else None
    return [Figure(label, reading(last), reading(first), change, note)]


def _total(rows: list[Row], key: str) -> float:
    """Return the sum of a number over all steps."""
    return float(series(rows, key).values.sum())


def _stage_chart(rows: list[Row]) -> Chart:
    """Draw the seconds of every stage of the run, by the steps that have them."""
    names = [one for one in STAGE_NAMES if any(f"{one}/seconds" in row for row in rows)]
    timed = [row for row in rows if all(f"{stage}/seconds" in row for stage in names)]
    layers = [series(timed, f"{stage}/seconds", stage) for stage in names]
    spent = [float(layer.values.sum()) for layer in layers]
    shares = [
        f"{stage} {seconds / (sum(spent) or 1):.0%}"
        for stage, seconds in zip(names, spent, strict=True)
    ]
    legend = tuple((f"layer-{index}", text) for index, text in enumerate(shares))
    drawn = stacked_chart("Time by stage", layers)
    return Chart("Time by stage", "seconds a step", drawn, legend)


def _shown(sample: Row) -> Row:
    """Return a sample as display text, long ones cut."""
    texts = {}
    for key in ("prompt", "response"):
        text = str(sample.get(key, ""))
        left_out = len(text) - LONGEST_TEXT
        if left_out > 0:
            text = f"{text[:LONGEST_TEXT]} … ({left_out:,} more characters)"
        texts[key] = text
    reward = sample.get("reward")
    finite = isinstance(reward, int | float) and np.isfinite(reward)
    return texts | {"reward": reward if finite else None}


def _change(value: float) -> str:
    """Write a change with its sign: +0.328, −0.012."""
    return ("+" if value >= 0 else signed("-")) + reading(abs(value))
