"""The timeline: whose time is whose, how much was idle, and a trace that viewers accept."""

import dataclasses
import json
import random

import pytest

from rlhf_jax.monitoring import trace as timeline
from rlhf_jax.monitoring.trace import Span, apart, chrome_trace, idle_share, since, write

SLICES = ("slice 0", "slice 1", "slice 2")


def generate(index, began, ended, rows=4, label="plain", tokens=8):
    return Span(index, "generate", began, ended, rows, label, tokens)


def exchange(index, at, samples=2, moved=1000):
    return Span(index, "exchange", at, at, samples, "", moved)


def anything(seed, slices=3, count=40):
    """Spans of every kind, in order and in no order, overlapping as they like, in whole
    milliseconds.
    """
    draw = random.Random(seed)
    spans = []
    for _ in range(count):
        began = draw.randrange(300) / 1000
        kind = draw.choice(["generate", "generate", "inference", "exchange"])
        index = draw.randrange(slices)
        ended = began if kind == "exchange" else began + draw.randrange(60) / 1000
        spans.append(
            Span(index, kind, began, ended, draw.randrange(1, 9), "x", draw.randrange(100))
        )
    return spans


def times(spans):
    return [(span.began, span.ended) for span in spans]


def test_a_round_waits_for_the_one_before_it_on_its_slice():
    spans = [
        generate(0, 0.0, 2.0),
        generate(0, 1.0, 3.0),
        generate(1, 1.5, 2.5),
        generate(0, 4.0, 5.0),
    ]
    own = apart(spans)
    assert times(span for span in own if span.slice == 0) == [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0)]
    assert times(span for span in own if span.slice == 1) == [(1.5, 2.5)], (
        "slices do not wait for each other"
    )
    assert apart(own) == own


def test_what_came_is_taken_in_between_two_rounds():
    own = apart([generate(0, 0.0, 2.0), exchange(0, 1.0), generate(0, 1.0, 3.0)])
    assert [(span.kind, span.began, span.ended) for span in own] == [
        ("generate", 0.0, 2.0), ("exchange", 2.0, 2.0), ("generate", 2.0, 3.0)
    ]  # fmt: skip


def test_a_round_of_no_live_row_is_idle_time_and_still_takes_its_own():
    spans = [generate(0, 0.0, 1.0), generate(0, 0.5, 2.0, rows=0), generate(0, 1.5, 3.0)]
    assert times(apart(spans)) == [(0.0, 1.0), (2.0, 3.0)]
    assert idle_share(spans, 1) == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(5))
def test_idle_share_is_that_of_every_millisecond(seed):
    # one slice did nothing at all
    slices = 4
    spans = anything(seed)
    first, last = (round(1000 * pick(t for at in times(spans) for t in at)) for pick in (min, max))
    busy = {
        (span.slice, moment)
        for span in spans
        for moment in range(round(1000 * span.began), round(1000 * span.ended))
    }  # fmt: skip
    assert idle_share(spans, slices) == pytest.approx(1 - len(busy) / (slices * (last - first)))


def test_no_time_is_not_idle():
    assert idle_share([], 4) == 0.0 and idle_share([exchange(0, 1.0)], 4) == 0.0
    assert (
        idle_share([generate(0, 5.0, 6.0)], 1) == 0.0
        and idle_share([generate(0, 5.0, 6.0)], 2) == 0.5
    )


@pytest.mark.parametrize("spans", [anything(0), anything(1), [], [exchange(1, 7.0)]])
def test_a_trace_is_one_that_viewers_accept(spans):
    trace = json.loads(json.dumps(chrome_trace(spans, SLICES)))
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {timeline.PROCESS}, (
        "process 0 is the kernel's to Perfetto"
    )
    named = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert [named[tid] for tid in sorted(named)] == [
        "slice 0",
        "slice 1",
        "slice 2",
    ] and 0 not in named
    assert timeline.PROCESS not in named, "that thread would be shown as the main one"
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    complete = [event for event in timed if event["ph"] == "X"]
    assert len(complete) == len(spans) and all(
        event["dur"] >= 0 and event["tid"] in named for event in complete
    )
    assert not complete or complete[0]["ts"] == 0
    ends = dict.fromkeys(named, 0)
    for event in complete:  # Perfetto drops what overlaps
        assert isinstance(event["ts"], int) and event["ts"] >= ends[event["tid"]]
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_says_what_a_slice_did():
    spans = [generate(1, 10.0, 10.5, 4, "lookup-chain-2", 9), exchange(1, 10.25, 3, 4096)]
    events = [
        event for event in chrome_trace(spans, SLICES[:2])["traceEvents"] if event["ph"] == "X"
    ]
    assert events[0] == {
        "ph": "X", "cat": "generate", "name": "lookup-chain-2", "pid": 1, "tid": 1001,
        "ts": 0, "dur": 500_000, "args": {"rows": 4, "tokens": 9},
    }  # fmt: skip
    assert (events[1]["name"], events[1]["args"]) == ("exchange", {"samples": 3, "bytes": 4096})


def test_live_rows_are_counted_over_all_slices_where_they_change():
    spans = [
        generate(0, 0.0, 1.0, 4),
        generate(1, 0.5, 2.0, 3),
        generate(0, 0.5, 2.0, 4),
        generate(0, 3.0, 4.0, 1),
    ]
    points = [
        event for event in chrome_trace(spans, SLICES[:2])["traceEvents"] if event["ph"] == "C"
    ]
    assert {(event["name"], *event["args"]) for event in points} == {("live rows", "of all slices")}
    assert [(event["ts"], event["args"]["of all slices"]) for event in points] == [
        (0, 4), (500_000, 7), (2_000_000, 0), (3_000_000, 1), (4_000_000, 0)
    ]  # fmt: skip


def test_clocks_of_several_processes_become_one():
    spans = [generate(0, 105.0, 106.0), generate(1, 107.0, 108.0)]
    assert times(since(spans, 100.0)) == [(5.0, 6.0), (7.0, 8.0)]
    assert dataclasses.replace(since(spans, 100.0)[0], began=105.0, ended=106.0) == spans[0]


def test_the_latest_are_kept_and_none_of_later_steps(tmp_path):
    spans = [generate(0, 0.0, 1.0)]
    for step in [*range(8, 20), 15]:
        assert (
            write(tmp_path, step, spans, SLICES[:1])
            == tmp_path / "timeline" / f"step-{step:06d}.json"
        )
    found = sorted(path.name for path in (tmp_path / "timeline").iterdir())
    assert found == [f"step-{step:06d}.json" for step in range(10, 16)], (
        "those of 16 to 19 were of an interrupted run"
    )
    for step in range(16, 30):
        write(tmp_path, step, spans, SLICES[:1])
    assert len(list((tmp_path / "timeline").iterdir())) == timeline.KEPT_TRACES
    assert json.loads((tmp_path / "timeline/step-000029.json").read_text()) == chrome_trace(
        spans, SLICES[:1]
    )


def test_a_trace_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "timeline").write_text("in the way")
    with pytest.raises(
        OSError,
        match=r"step-000001.json cannot be written \(.*\): make room or name another workdir",
    ):
        write(tmp_path, 1, [], SLICES[:1])
