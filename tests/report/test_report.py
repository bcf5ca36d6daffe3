"""The report: one page of one file, whatever a run left, read back by an HTML parser and opened in
a browser.
"""

import json
import math

import browser
import numpy as np
import pytest
from pages import ADAPTIVE, CONFIG, HOSTILE, Page, evaluation, lines, page, played, rounds, row

from rlhf_jax import command
from rlhf_jax.monitoring import metrics, trace
from rlhf_jax.report.charts import line_chart, lines_chart, share_chart, stacked_chart
from rlhf_jax.report.drafting import NAMED, table
from rlhf_jax.report.page import PAIRS, write_report
from rlhf_jax.report.run import Series, read_run
from rlhf_jax.report.scales import (
    axis_number,
    domain,
    duration,
    groups,
    reading,
    share,
    smooth,
    ticks,
    volume,
)
from rlhf_jax.report.timeline import BARS, picture

SAMPLE = {"step": 0, "prompt": "p", "response": "", "reward": None}


TIMED = {
    "timed_rounds": 4,
    "seconds": 2.0,
    "timed_tokens": 160,
    "predicted_tokens": 200.0,
    "predicted_seconds": 2.0,
}
TREE = "model-parents:-1,-1,0"


def test_a_page_says_what_a_run_was_and_did(tmp_path):
    folder = tmp_path / "my_run"
    folder.mkdir()
    steps = [row(step, **{"loss/value": step, "gradient/norm": 2.0 * step}) for step in range(3)]
    seen = page(folder, steps, [evaluation(0, 0.25, "before"), evaluation(3, 0.75, "afterwards")])
    for words in (
        "my_run",
        "SmolLM2-135M",
        "lookup-chain-2",
        "0.250",
        "0.750",
        "+0.500",
        "1.60",
        "6.0 s",
    ):
        assert words in seen.text, words
    assert (
        "Held-out reward" in seen.text
        and "Held-out lexicon" in seen.text
        and "steps 3 " in seen.text
    )
    expected = [
        "Reward",
        "KL to the reference",
        "Response length",
        "Policy loss",
        "Value loss",
        "Generation speed",
    ]
    assert (
        seen.charts()[:6] == expected
        and "Time by stage" in seen.charts()
        and "gradient/norm" in seen.charts()
    )
    assert "generation 33%" in seen.text and "inference 33%" in seen.text


def test_samples_stand_side_by_side_with_their_rewards(tmp_path):
    first = evaluation(0, 0.25, "before")
    last = evaluation(3, 0.75, "afterwards")
    last["samples"][1]["prompt"] = "Another prompt."
    seen = page(tmp_path, [row(0)], [first, evaluation(2, 0.5, "between"), last])
    assert len(seen.all("article", "pair")) == 1, "prompts that differ are not paired"
    for words in ("Say yes.", "before training 0.250 before", "after 3 steps 0.750 afterwards"):
        assert words in seen.text
    assert "between" not in seen.text and "Say no." not in seen.text


def test_a_measure_may_be_missing_and_a_reward_may_have_failed(tmp_path):
    first = evaluation(0, 0.25)
    between = evaluation(1, None)
    last = evaluation(3, None, "afterwards")
    del between["eval/reward"], last["eval/reward"]
    last["eval/lexicon/failed"] = 2
    seen = page(tmp_path, [row(0)], [first, between, last])
    assert "Held-out reward 0.250 after 0 steps" in seen.text and "afterwards" in seen.text
    assert metrics.before_and_after(tmp_path)[0] == [("eval/lexicon", 0.5, 0.5)]


def test_many_long_samples_are_spread_evenly_and_cut(tmp_path):
    prompts = [f"Prompt number {number}." for number in range(1000)]
    seen = page(tmp_path, [row(0)], [evaluation(step, 0.5, "é" * 5000, prompts) for step in (0, 1)])
    shown = [number for number in range(1000) if f"Prompt number {number}. " in seen.text]
    assert 12 <= len(shown) <= PAIRS and shown[0] == 0 and len(set(np.diff(shown))) == 1
    assert "… (3,000 more characters)" in seen.text and "é" * 2001 not in seen.text


def test_what_a_model_wrote_is_text(tmp_path):
    config = CONFIG | {"model": {"path": "<b>bold</b>"}, "<i>key": "<script>alert(2)</script>"}
    evaluations = [evaluation(step, 0.5, HOSTILE, [HOSTILE]) for step in (0, 1)]
    seen = page(
        tmp_path, [row(0, **{"<script>alert(3)</script>": 1.0})], evaluations, config=config
    )
    assert len(seen.all("script")) == 1 and not seen.all("img") and not seen.all("b", "bold")
    assert (
        "<script>alert('gotcha')</script>" in seen.text and "<script>alert(2)</script>" in seen.text
    )


def test_nothing_comes_from_a_network(tmp_path):
    seen = page(tmp_path, [row(0), row(1)], [evaluation(0, 0.5)])
    (policy,) = [attrs["content"] for attrs in seen.all("meta") if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    assert not [attrs for _, attrs in seen.elements if {"src", "href"} & set(attrs)]
    text = (tmp_path / "report.html").read_text()
    assert (
        "http" not in text.replace("http-equiv", "")
        and "@import" not in text
        and "url(" not in text
    )


@pytest.mark.parametrize(
    ("steps", "evaluations", "samples", "config", "words"),
    [
        ([row(0)], None, None, None, "Training reward"),
        ([row(0)], [], None, CONFIG, "1 of 3"),
        ([row(0)], [evaluation(0, 0.5)], None, CONFIG, "before training 0.500 yes"),
        ([], None, None, CONFIG, "No step has finished yet."),
        ([], [evaluation(0, 0.5)], None, CONFIG, "before training 0.500 yes"),
        ([{"step": 0}], [{"step": 0, "samples": []}], None, {}, "No step has finished yet."),
        (
            [{"step": 0, "reward/mean": 0.5}, {"step": 1, "kl/mean": math.nan}],
            None, None, CONFIG, "0.500",
        ),
        (
            [row(0), row(1)], None, [SAMPLE, SAMPLE | {"step": 1, "response": "s"}],
            CONFIG, "in step 1 s",
        ),
        ([row(0)], [], [SAMPLE], CONFIG, "(nothing)"),
    ],
)  # fmt: skip
def test_what_is_missing_is_left_out(tmp_path, steps, evaluations, samples, config, words):
    seen = page(tmp_path, steps, evaluations, samples, config)
    assert words in seen.text
    assert not {"nan", "NaN", "inf", "None", "undefined"} & set(seen.text.split())


def test_a_run_that_is_being_written_can_be_read(tmp_path):
    page(tmp_path, [row(0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    assert "1 of 3" in Page(write_report(tmp_path).read_text()).text


def test_ten_thousand_steps_fit_a_page(tmp_path):
    rng = np.random.default_rng(0)
    steps = [row(step, **{f"extra/{i}": rng.normal() for i in range(20)}) for step in range(10_000)]
    steps[5000]["kl/mean"] = 77.0
    seen = page(
        tmp_path,
        steps,
        [evaluation(step, 0.5) for step in range(0, 10_001, 10)],
        config=CONFIG | {"steps": 10_000},
    )
    assert (tmp_path / "report.html").stat().st_size < 3e6
    assert "↑ 77.0" in seen.text, "a spike is seen"
    assert "10,000" in seen.text and "10,000 of" not in seen.text


def test_a_written_run_is_read(tmp_path):
    made = json.dumps({"environment": {"device": "4 × TPU v5p", "command": "rlhf-jax train x"}})
    writer = metrics.open_run(tmp_path, json.dumps(CONFIG), about=made)
    writer.write_evaluation(
        0, {"eval/reward": 0.25}, [{"prompt": "p", "response": "r", "reward": 0.25}]
    )
    writer.write(row(0))
    writer.write_rows("samples", 0, [{"prompt": "p", "response": "r", "reward": 0.25}])
    writer.close()
    seen = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Held-out reward 0.250" in seen.text and "device 4 × TPU v5p" in seen.text
    assert "command rlhf-jax train x" in seen.text


def test_drafting_says_what_was_chosen_at_how_many_live_rows(tmp_path):
    shares = {"strategy/share_none": 0.25, "strategy/share_model": 0.75}
    steps = []
    for step in range(3):
        share = 0.5 + step / 10
        rates = {"generation/acceptance": share, "strategy/acceptance_model": share}
        steps.append(row(step, **shares, **rates))
    strategies = [played(step, 8) for step in range(3)]
    strategies += [
        played(0, 1, TREE, 30, **TIMED),
        played(2, 1, TREE, 10, **TIMED),
        played(2, 1, "model-chain-2"),
    ]
    seen = page(tmp_path, steps, config=ADAPTIVE, strategies=strategies)
    place = seen.charts().index("Strategies by live rows")
    assert seen.charts()[place : place + 4] == [
        "Strategies by live rows",
        "Drafters",
        "Acceptance by drafter",
        "Draft acceptance",
    ]
    assert "plain 38% model 62%" in seen.text
    assert "1 live row, 50 rounds\nmodel-tree of 3 80%\nmodel-chain-2 20%" in seen.titles
    assert "5 to 8 live rows, 30 rounds\nplain 100%" in seen.titles
    assert (
        "model-tree of 3 40 50% 2.00 100 80.0 0.80" in seen.text
        and "model-chain-2 10 12% 2.00 — — —" in seen.text
    )
    assert {"title": TREE} in [attrs for attrs in seen.all("td") if "title" in attrs]
    assert not {"strategy/share_none", "generation/acceptance"} & set(seen.charts()), (
        "each number has one chart"
    )


def test_without_choices_there_is_no_section(tmp_path):
    seen = page(tmp_path, [row(0, **{"generation/acceptance": 0.5})])
    assert "Drafting" not in seen.text and "Predicted and realised" not in seen.text
    assert "Draft acceptance" in seen.charts(), "of a strategy that is fixed"


def test_what_never_changed_is_a_sentence_and_no_chart(tmp_path):
    same = {"generation/acceptance": 0.0, "loss/value": 0.25, "reward/std": 0.5}
    strategies = [played(step, 2) for step in range(2)]
    seen = page(tmp_path, [row(0, **same), row(1, **same)], strategies=strategies, config=ADAPTIVE)
    assert "Every round was plain: no drafter promised more tokens a second." in seen.text
    assert not {"Value loss", "reward/std", "Draft acceptance", "Strategies by live rows"} & set(
        seen.charts()
    )
    told = "generation/acceptance 0, loss/value 0.250, reward/std 0.500."
    assert "Never changed: " in seen.text and told in seen.text
    assert "Policy loss" in seen.charts()


def test_a_student_is_shown_beside_itself_as_it_began(tmp_path):
    both = {"drafter/acceptance_frozen": 0.25, "drafter/version": 3, "drafter/behind": 0}
    seen = page(
        tmp_path,
        [row(step, **both, **{"drafter/acceptance": 0.25 * (1 + step)}) for step in range(3)],
    )
    assert (
        "Acceptance of the student" in seen.charts() and "Predicted and realised" not in seen.text
    )
    assert (
        "version 3, 0 updates of the policy behind" in seen.text
        and "kept current as it began" in seen.text
    )
    assert "step 2\nkept current 0.750\nas it began 0.250" in seen.titles
    assert [seen.all("text", f"end {kind}".split()[1]) != [] for kind in ("current", "frozen")] == [
        True,
        True,
    ]


def test_rare_strategies_count_together():
    rows = [played(0, 1, f"lookup-chain-{n}", rounds=100 - n) for n in range(1, NAMED + 4)]
    found = table(rows)
    assert len(found) == NAMED + 1
    assert [found[0]["label"], found[-1]["label"]] == ["lookup-chain-1", "3 others"]
    assert found[-1]["rounds"] == str(sum(row["rounds"] for row in rows[NAMED:]))


def test_a_line_of_no_strategy_is_one_sentence(tmp_path):
    with pytest.raises(
        ValueError, match=r"strategies\.jsonl: a line of step 4 lacks live; remove the line"
    ):
        page(tmp_path, [row(0)], strategies=[{"step": 4}])


def lanes_of(slices):
    return slices if isinstance(slices, list) else [f"slice {n}" for n in range(slices)]


def traced(folder, spans, slices, step=0, **files):
    trace.write(folder, step, spans, lanes_of(slices))
    return page(folder, [row(step)], **files)


def test_the_timeline_has_a_lane_for_each_slice(tmp_path):
    came = trace.Span(1, "exchange", 1.0, 1.0, 2, "", 3_000_000)
    spans = [came, *rounds(3, 4, rows=lambda index: 4 - index, strategy=TREE)]
    spans += [trace.Span(2, "inference", 2.5, 3.0, 8, "reference_inference", 900)]
    seen = traced(tmp_path, spans, 4, step=12)
    assert (
        "4 slices, idle for 46% of the time; 2 samples moved with caches of 3.00 MB." in seen.text
    )
    assert "timeline/step-000012.json" in seen.text and "Step 12" in seen.text
    assert "1 row 2 rows 3–4 rows inference samples came idle" in seen.text
    assert "What the devices did in step 12" in seen.charts()
    for part, idle in enumerate(("33%", "33%", "17%", "100%")):
        assert any(title.startswith(f"slice {part}, 0 to") for title in seen.titles)
        assert f" {idle}" in seen.text
    assert "slice 0, 0 to 0.06 s\n4.00 rows, model-tree of 3\nidle 0%" in seen.titles
    assert (
        "slice 1, 1.00 to 1.06 s\n2.00 rows, model-tree of 3\n2 samples came with caches of 3.00"
        " MB\nidle 0%" in seen.titles
    )
    assert "slice 2, 2.50 to 2.56 s\nreference inference 100%\nidle 0%" in seen.titles
    (full,) = seen.all("path", "rows-4")
    assert (
        full["d"]
        == "M0.0 26.8H333.3v196.4H0.0zM0.0 276.8H333.3v196.4H0.0zM0.0 526.8H333.3v196.4H0.0z"
    )
    assert len(seen.all("path", "mark")) == 1 and len(seen.all("path", "inference")) == 1


def test_the_timeline_names_calls_and_their_devices(tmp_path):
    """Under a plan that trains on other devices than those of the only slice."""
    lanes = ["slice 0", "devices 4–7"]
    spans = rounds(1, 4)
    spans += [
        trace.Span(1, "inference", 0.5, 0.75, 8, "critic_inference", 90),
        trace.Span(1, "training", 1.0, 1.5, 8, "policy_training", 90),
        trace.Span(1, "training", 1.5, 2.0, 8, "critic_training", 90),
    ]
    seen = traced(tmp_path, spans, lanes)
    assert "a lane a slice, or the devices of other calls" in seen.text
    assert "2 lanes, idle for 19%" in seen.text and "inference training idle" in seen.text
    assert "devices 4–7, 1.00 to 1.04 s\npolicy training 100%\nidle 0%" in seen.titles
    # the last step of a run that draws ahead draws nothing
    assert "2 lanes, idle for 19%" in traced(tmp_path, spans[-1:], lanes, step=1).text


@pytest.mark.parametrize("slices", [2, 64, 200])
def test_a_timeline_of_thousands_of_rounds_stays_small(tmp_path, slices):
    random = np.random.default_rng(0)
    spans = rounds(slices, 4000 // slices * 5, rows=lambda index: int(random.integers(1, 65)))
    at = random.uniform(0, 100, 3000)
    spans += [trace.Span(int(random.integers(slices)), "exchange", t, t, 1, "", 10**8) for t in at]
    trace.write(tmp_path, 0, spans, lanes_of(slices))
    page(tmp_path, [row(0)])
    chart = picture(read_run(tmp_path))
    assert chart is not None
    drawn = Page(chart.svg)
    assert (
        len(chart.svg) < 100_000
        and sum(path["d"].count("z") for path in drawn.all("path", "rows-4")) <= BARS
    )
    named = {title.split(",")[0] for title in drawn.titles}
    assert named >= {"slice 0", f"slice {slices - 1}"} and len(named) == min(slices, 128)
    assert ("128 of 200 slices" in chart.note) == (slices == 200)


def test_where_one_slice_only_generates_there_is_no_picture(tmp_path):
    assert "Perfetto" not in traced(tmp_path, rounds(1, 3), 1).text
    assert "One slice generated everything." in traced(tmp_path, rounds(1, 3), 1).text
    assert "Perfetto" not in traced(tmp_path, [], 4).text, "nothing happened"


def test_the_latest_trace_is_drawn_and_a_damaged_one_named(tmp_path):
    for step in (9, 10):
        seen = traced(tmp_path, rounds(2, 3), 2, step=step)
    assert "Step 10" in seen.text and "Step 9" not in seen.text
    (tmp_path / "timeline/step-000010.json").write_text('{"traceEvents": [{"ph": "X"')
    with pytest.raises(
        ValueError,
        match=r"step-000010.json is no trace .*; remove it, and the report is made without it",
    ):
        write_report(tmp_path)


def test_idle_time_and_moves_are_drawn_where_there_are_any(tmp_path):
    none = {"generation/idle_share": 0.0, "generation/moved_bytes": 0}
    assert not {"Idle time", "generation/idle_share"} & set(
        page(tmp_path, [row(0, **none), row(1, **none)]).charts()
    )
    some = {"generation/idle_share": 0.25, "generation/moved_bytes": 2e9}
    seen = page(tmp_path, [row(0, **none), row(1, **some)])
    assert seen.charts().index("Moved between slices") == seen.charts().index("Idle time") + 1
    assert "generation/moved_bytes" not in seen.charts() and "2G" in seen.text


def line(values, steps=None):
    return Series(
        "loss",
        np.arange(len(values)) if steps is None else np.array(steps),
        np.array(values, np.float64),
    )


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1e-300],
        [5.0] * 20,
        [-1.0, 1.0],
        [1e300, -1e300],
        [0.0] * 20 + [1e9],
        list(range(1000)),
        [1e-9, 2e-9],
    ],
)
def test_a_chart_draws_whatever_is_finite(values):
    drawn = line_chart("Loss", line(values), line(values[:2]))
    assert not any(word in drawn.lower().replace("infer", "") for word in ("nan", "inf"))
    changes = len(values) == 1 or min(values) < max(values)
    assert len(Page(drawn).all("svg", "plot")) == changes


def test_a_chart_of_nothing_is_nothing():
    assert line_chart("Loss", line([])) == "" and stacked_chart("Time", [line([])]) == ""


def test_a_chart_draws_the_values():
    drawn = Page(line_chart("Loss", line([0.0, 4.0, 2.0])))
    raw, bold = (attrs["d"] for attrs in drawn.all("path"))
    assert raw == bold == "M0.0 1000.0L500.0 0.0L1000.0 500.0"
    assert drawn.titles == ["step 0\nloss 0", "step 1\nloss 4.00", "step 2\nloss 2.00"]
    assert drawn.text.endswith(" 2.00")


def test_bars_stack_to_the_whole():
    drawn = Page(stacked_chart("Time", [line([1.0, 1.0]), line([3.0, 1.0])]))
    below, above = (attrs["d"] for attrs in drawn.all("path"))
    assert below == "M60.0 750.0h380.0v250.0h-380.0zM560.0 750.0h380.0v250.0h-380.0z"
    assert above == "M60.0 0.0h380.0v750.0h-380.0zM560.0 500.0h380.0v250.0h-380.0z"
    assert "together 4.0 s" in drawn.titles[0]


def test_end_labels_do_not_meet():
    drawn = Page(line_chart("Loss", line([0.0, 1.0]), line([0.0, 1.0])))
    heights = [float(attrs["y"]) for attrs in drawn.all("text", "end")]
    assert abs(heights[0] - heights[1]) == 16 and min(heights) >= 0


def test_labels_of_many_lines_keep_apart_and_in_order():
    ends = (0.1, 0.5, 0.52, 0.54, 1.0)
    lines = [(f"kind-{i}", line([0.0, end])) for i, end in enumerate(ends)]
    drawn = Page(lines_chart("Share", "", lines).svg)
    heights = [float(attrs["y"]) for attrs in drawn.all("text", "end")]
    assert min(np.diff(heights)) >= 16 - 1e-9 and heights[0] >= 0 and heights[-1] <= 190
    assert [attrs["class"] for attrs in drawn.all("text", "end")] == [
        f"end kind-{i}" for i in (4, 3, 2, 1, 0)
    ]
    assert heights[2] == pytest.approx((1 - 0.52) * 190, abs=0.1), (
        "the middle one of the three stays in its place"
    )


def test_shares_are_stacked_bars_by_name():
    drawn = Page(
        share_chart(
            "Who",
            ["1", "2"],
            [("a", np.array([25.0, 0.0])), ("b", np.array([75.0, 50.0]))],
            ["x", "y"],
        )
    )
    below, above = (attrs["d"] for attrs in drawn.all("path"))
    assert below == "M60.0 750.0h380.0v250.0h-380.0zM560.0 1000.0h380.0v0.0h-380.0z"
    assert above == "M60.0 0.0h380.0v750.0h-380.0zM560.0 500.0h380.0v500.0h-380.0z"
    assert (
        drawn.titles == ["x", "y"]
        and share_chart("Who", [], [], []) == ""
        and lines_chart("No", "", []).svg == ""
    )


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.0, 1.0], (0, 1, 0.5)),
        ([0.62, 0.97], (0.6, 1.0, 0.1)),
        ([3.0, 19.0], (0, 20, 5)),
        ([7.0], (6, 8, 0.5)),
        ([-3.0, -1.0], (-3, -1, 0.5)),
    ],
)
def test_axes_end_at_round_numbers(values, ends):
    low, high, step = domain(np.array(values))
    assert (low, high, step) == pytest.approx(ends)
    assert np.allclose(np.diff(ticks(low, high, step)), step)


def test_a_lone_spike_does_not_flatten_the_rest():
    values = np.append(np.linspace(1, 2, 50), 900.0)
    assert domain(values)[1] <= 2.5 and smooth(values).max() <= 2
    assert domain(np.array([1.0, 2.0, 900.0]))[1] >= 900, "three values have no spike"


def test_the_moving_mean_keeps_lines_and_ends():
    steady = np.full(50, 3.0)
    assert np.allclose(smooth(steady), steady)
    noisy = np.linspace(0, 1, 300) + np.random.default_rng(0).normal(0, 0.1, 300)
    assert np.abs(smooth(noisy) - np.linspace(0, 1, 300)).max() < 0.08 and len(smooth(noisy)) == 300
    assert smooth(np.array([1.0, 5.0])).tolist() == [1, 5]


def test_points_are_grouped_evenly():
    parts = groups(1003, 200)
    assert len(parts) == 200 and parts[0].start == 0 and parts[-1].stop == 1003
    assert {part.stop - part.start for part in parts} == {5, 6} and len(groups(3, 200)) == 3


def test_numbers_are_read_at_a_glance():
    assert [reading(v) for v in (0, 0.9721, -1.646, 19.75, 1234.5, 2.5e7, 1.2e-5)] == [
        "0", "0.972", "−1.65", "19.8", "1,234", "25M", "1.2e−5"
    ]  # fmt: skip
    pairs = ((0.25, 0.05), (-0.0, 1), (1500, 500), (20_000, 10_000), (-2e-5, 1e-5))
    assert [axis_number(*pair) for pair in pairs] == [
        "0.25", "0", "1,500", "20k", "−2e−5"
    ]  # fmt: skip
    assert [volume(v) for v in (12, 45_600, 1.234e9)] == ["12 bytes", "45.6 kB", "1.23 GB"]
    assert [share(*pair) for pair in ((1, 3), (1, 999), (0, 1), (1, 0))] == [
        "33%",
        "<1%",
        "0%",
        "0%",
    ]
    assert [duration(s) for s in (8.53, 260, 11_100, 187_300)] == [
        "8.5 s",
        "4 min 20 s",
        "3 h 05 min",
        "2 d 4 h",
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither config.json nor metrics.jsonl"),
        ({"config.json": "{"}, "config.json is not JSON"),
        (
            {"metrics.jsonl": '{"step": 0}\n{"st\n{"step": 2}\n'},
            "metrics.jsonl, line 2, is no JSON object with a step",
        ),
        ({"metrics.jsonl": "[1]\n"}, "metrics.jsonl, line 1, is no JSON object with a step"),
    ],
)
def test_the_command_names_what_is_wrong(tmp_path, capsys, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert command.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_the_command_prints_the_path(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["report"])
    (tmp_path / "metrics.jsonl").write_text(lines([row(0)]))
    assert command.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n" and not list(
        tmp_path.glob("*.new")
    )


@pytest.mark.slow
def test_a_browser_shows_it_without_complaint(tmp_path):
    """At the width of a desk and of a phone, without a line to scroll sideways."""
    page(
        tmp_path,
        [row(step) for step in range(30)],
        [evaluation(0, 0.25, HOSTILE), evaluation(30, 0.75, HOSTILE)],
    )
    report = tmp_path / "report.html"
    seen = browser.shown(report, tmp_path / "profile")
    assert "CONSOLE" not in seen.stderr
    assert 'data-tip="step 29' in seen.stdout, "the script ran"
    drawn = report.read_text(encoding="utf-8").count('<svg class="plot"')
    assert seen.stdout.count('<svg class="plot"') == drawn > 5
    assert "alert('gotcha')&lt;/script&gt;" in seen.stdout
    for width in (1240, 390):
        assert browser.width_needed(report, tmp_path / "profile", width) <= width
