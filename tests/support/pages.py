"""Files of a run that never was, and what a parser sees on the page of its report."""

from __future__ import annotations

import html.parser
import json

from rlhf_jax.monitoring import trace
from rlhf_jax.report.page import write_report

CONFIG = {
    "steps": 3,
    "model": {"path": "models/SmolLM2-135M"},
    "advantage": {"estimator": "gae"},
    "generation": {"strategy": "lookup-chain-2", "rows": 8},
    "reward": {"metrics": {}},
}
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
HOSTILE = "</p><script>alert('gotcha')</script><img src=x onerror=alert(1)> & \x00 \ud800"


class Page(html.parser.HTMLParser):
    """What is on a page: its elements as (tag, attributes), its visible text by words; refuses
    wrong nesting.
    """

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.text = ""
        self.titles = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "title" in self.open:
            self.titles.append(data)
        elif not {"style", "script"} & set(self.open):
            self.text = " ".join([self.text, *data.split()])

    def all(self, tag, kind=""):
        found = [attrs for name, attrs in self.elements if name == tag]
        return [attrs for attrs in found if not kind or kind in attrs.get("class", "").split()]

    def charts(self):
        return [attrs["aria-label"].split(" by step")[0] for attrs in self.all("svg", "plot")]


def row(step, **more):
    keys = ("kl/mean", "loss/policy", "response/length_mean", "generation/tokens_per_second")
    keys += tuple(f"{stage}/seconds" for stage in ("generation", "inference", "training"))
    numbers = {key: 0.5 + step % 3 / 10 for key in keys} | {
        "generation/tokens": 640,
        "generation/tokens_per_round": 1.6,
    }
    return numbers | {"step": step, "step/seconds": 2.0, "reward/mean": 0.1 * step} | more


def evaluation(step, reward, response="yes", prompts=("Say yes.", "Say no.")):
    samples = [{"prompt": prompt, "response": response, "reward": reward} for prompt in prompts]
    return {"step": step, "eval/reward": reward, "eval/lexicon": 0.5, "samples": samples}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def played(step, live, name="plain", rounds=10, **more):
    """A line of strategies.jsonl: 2 tokens of a row a round, 100 tokens predicted a second of timed
    rounds.
    """
    drafter, drafts = ("none", 0) if name == "plain" else (name.split("-")[0], name.count(",") + 1)
    names = {"step": step, "live": live, "strategy": name, "drafter": drafter, "drafts": drafts}
    sums = {
        "rounds": rounds,
        "live_rows": rounds * live,
        "tokens": 2 * rounds * live,
        "accepted": rounds * live,
    }
    return names | sums | more


def page(folder, steps=(), evaluations=None, samples=None, config=CONFIG, strategies=()):
    """The page of a run with these files."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(lines(steps))
    for name, rows in (
        ("evaluations", evaluations),
        ("samples", samples),
        ("strategies", strategies),
    ):
        if rows is not None:
            (folder / f"{name}.jsonl").write_text(lines(rows))
    return Page(write_report(folder).read_text(encoding="utf-8"))


ADAPTIVE = CONFIG | {"generation": {"strategy": "adaptive", "rows": 8}}


def rounds(
    slices, count, rows=lambda index: 64 - index % 64, seconds=0.5, strategy="lookup-chain-2"
):
    """`count` rounds of each slice, one after the other."""
    return [
        trace.Span(
            part, "generate", seconds * index, seconds * (index + 1), rows(index), strategy, 100
        )
        for part in range(slices)
        for index in range(count)
    ]
