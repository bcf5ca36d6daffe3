"""Independent calls on devices of their own work at the same time, and none waits for another's
dispatch: by the spans of a run on eight virtual devices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import numpy as np
import placed_runs
import pytest
import tiny_run

from rlhf_jax.monitoring.parts import CallWatch
from rlhf_jax.monitoring.trace import Span, apart
from rlhf_jax.session import Session

# A model whose programs take a tenth of a second, so that their time is not that of dispatching.
LARGER = {"width": 256, "ffn_width": 1024, "num_layers": 4, "max_context": 128}
CHANGES = {
    "steps": 3,
    "data__max_prompt_tokens": 32,
    "generation__prompts_per_step": 16,
    "generation__max_new_tokens": 48,
    "generation__max_rows": 32,
    "training__microbatch_rows": 16,
}


@pytest.fixture
def run(tmp_path) -> placed_runs.Runner:
    folder = tiny_run.make_model(tmp_path / "larger", **LARGER)
    tiny_run.make_files(tmp_path)
    return placed_runs.Runner(tmp_path, folder)


def seen(run: placed_runs.Runner, monkeypatch, plan: str, **changes) -> tuple[list[Span], float]:
    """The spans of a late step, and which share of its calls' time went into dispatching them: the
    least of the steps after the first.
    """
    reports = []
    dispatched = []
    log = Session.log
    hear = CallWatch.record

    def logged(self, report, state, seconds):
        reports.append((report.spans, dispatched.copy()))
        dispatched.clear()
        log(self, report, state, seconds)

    def heard(self, part, result):
        dispatched.append(time.perf_counter() - part.began)
        hear(self, part, result)

    monkeypatch.setattr(Session, "log", logged)
    monkeypatch.setattr(CallWatch, "record", heard)
    run(plan, plan=plan, **CHANGES | changes)
    shares = []
    for spans, seconds in reports[1:]:
        own = [span for span in apart(spans) if span.kind in ("inference", "training")]
        assert len(own) == len(seconds)
        shares.append(sum(seconds) / sum(span.ended - span.began for span in own))
    return apart(reports[-1 - changes.get("training__lag", 0)][0]), min(shares)


def overlap(a: Iterable[Span], b: Iterable[Span]) -> float:
    """The share of the shorter's time in which both work."""
    times = [np.array([(span.began, span.ended) for span in spans]) for spans in (a, b)]
    both = sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in times[0] for y in times[1])
    return both / min(float(np.diff(one).sum()) for one in times)


@pytest.mark.alone
def test_policy_and_critic_train_at_the_same_time(run, monkeypatch):
    spans, share = seen(run, monkeypatch, "interleaved")
    policy, critic = (
        [s for s in spans if s.label == f"{m}_training"] for m in ("policy", "critic")
    )
    both = overlap(policy, critic)
    print(json.dumps({"policy and critic training overlap": both, "dispatching": share}))
    assert both >= 0.5
    assert share < 0.05


@pytest.mark.alone
@pytest.mark.long
def test_generation_works_beside_training(run, monkeypatch):
    spans, share = seen(run, monkeypatch, "disaggregated", training__lag=1)
    generation = [span for span in spans if span.kind == "generate"]
    training = [span for span in spans if span.kind == "training"]
    both = overlap(generation, training)
    print(json.dumps({"generation and training overlap": both, "dispatching": share}))
    assert {span.slice for span in generation} == {0} and {span.slice for span in training} == {1}
    assert both >= 0.5
    assert share < 0.05
