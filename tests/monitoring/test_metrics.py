"""Files, progress and tables of a run."""

import concurrent.futures
import io
import json
import os
import re
import resource
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from rlhf_jax.monitoring import console as consoles
from rlhf_jax.monitoring import metrics, phases
from rlhf_jax.monitoring.console import STEP_COLUMNS
from rlhf_jax.monitoring.parts import PhaseParts

# of a step's line on screen, but for what only some runs have
COMMON = [column for column in STEP_COLUMNS if "drafter" not in column[1]]


def row(step, **more):
    """The numbers of a run that has rewards."""
    keys = (*metrics.REQUIRED, *(key for _, key, _, _ in COMMON))
    return {key: 0.5 for key in keys} | {"step": step, "generation/rounds": 20} | more


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def screen(terminal=False, width=100):
    return Console(file=io.StringIO(), record=True, width=width, force_terminal=terminal)


def test_writes_a_line_a_step_at_once(tmp_path):
    writer = metrics.Writer(tmp_path, first_step=1)
    writer.write(
        row(
            1,
            **{
                "reward/mean": jnp.float32(0.25),
                "generation/tokens": np.int64(640),
                "eval/vader": 0.5,
            },
        )
    )
    (line,) = read(tmp_path / "metrics.jsonl")  # before close: flushed
    writer.close()
    assert set(metrics.REQUIRED) <= set(line)
    assert (
        line["reward/mean"] == 0.25
        and line["generation/tokens"] == 640
        and line["eval/vader"] == 0.5
    )
    assert any(path.name.startswith("events") for path in (tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("key", metrics.REQUIRED)
def test_a_missing_key_is_refused(tmp_path, key):
    incomplete = row(1)
    del incomplete[key]
    writer = metrics.Writer(tmp_path, 1)
    with pytest.raises(ValueError, match=f"miss {key}"):
        writer.write(incomplete)
    writer.close()


@pytest.mark.parametrize("value", [float("nan"), jnp.float32("inf"), -np.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path, value):
    writer = metrics.Writer(tmp_path, 1)
    with pytest.raises(ValueError, match=r"Metric kl/mean is -?(nan|inf) at step 7"):
        writer.write(row(7, **{"kl/mean": value}))
    writer.close()
    assert read(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    first = metrics.Writer(tmp_path, 1)
    for step in (1, 2, 3):
        first.write(row(step))
        first.write_rows(
            "samples", step, [{"prompt": "p", "response": "schön\u2028", "reward": np.float32(0.5)}]
        )
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed while writing
    second = metrics.Writer(tmp_path, 3)
    second.write(row(3, **{"reward/mean": 0.75}))
    second.close()
    assert [(line["step"], line["reward/mean"]) for line in read(tmp_path / "metrics.jsonl")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.75),
    ]
    samples = [
        json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n")[:-1]
    ]
    assert (
        samples[1] == {"step": 2, "prompt": "p", "response": "schön\u2028", "reward": 0.5}
        and len(samples) == 2
    )


def run_progress(console, clock, monkeypatch, steps=3):
    monkeypatch.setattr(consoles.time, "monotonic", lambda: clock[0])
    with consoles.Progress(40, console=console) as progress:
        for step in range(1, steps + 1):
            for phase in ("generation", "inference", "training"):
                progress.update(phase, live_rows=5, tokens_per_second=812.4, tokens_per_round=1.9)
                clock[0] += 1.0
            told = {"generation/tokens_per_round": 1.75, "generation/tokens_per_second": 1234.5}
            progress.finish(row(step, **told, **{"step/seconds": 3.0}))
    return console.export_text()


def test_the_time_left_leaves_out_compilers_and_counts_evaluations(capsys):
    console = screen()
    progress = consoles.Progress(4, console=console)
    progress.finish(row(0, **{"step/seconds": 60.0}), compiling=50.0, other_seconds=7.0)
    assert console.export_text(clear=False).splitlines()[-1].endswith("0:00:37"), "3 steps of 10 s"
    progress.finish(row(1, **{"step/seconds": 8.0}), other_seconds=7.0)
    assert console.export_text().splitlines()[-1].endswith("0:00:23"), "the first is left out"


def test_plain_lines_fit_a_hundred_columns_and_line_up(monkeypatch):
    lines = run_progress(screen(), [0.0], monkeypatch).splitlines()
    steps = [line for line in lines if re.search(r"0:\d\d:\d\d$", line)]
    heading = lines[lines.index(steps[0]) - 1]
    assert heading.split()[:3] == ["step", "reward", "kl"] and len(heading) <= 100
    assert len(steps) == 3 and {len(line) for line in steps} == {len(heading)}
    # tokens a row gains in a round; 37 steps of 3 s
    assert "1.75" in steps[0] and steps[-1].endswith("0:01:51")
    assert all(len(line) <= 100 for line in lines)


def test_plain_lines_name_each_phase_of_the_first_step_then_beat(monkeypatch):
    text = run_progress(screen(), [0.0], monkeypatch)
    said = [line.split()[:2] for line in text.splitlines() if "live rows" in line]
    assert said == [["1/40", "generation"], ["1/40", "inference"], ["1/40", "training"]]
    console = screen()
    clock = [0.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: clock[0])
    with consoles.Progress(40, done=3, console=console) as progress:
        for _ in range(25):
            progress.update("generation", live_rows=5)
            clock[0] += 1.0
    assert console.export_text().count("4/40  generation  5 live rows") == 3  # at 0, 10 and 20 s


def test_terminal_panel_shows_phase_and_time(monkeypatch):
    console = screen(terminal=True)
    clock = [0.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: clock[0])
    progress = consoles.Progress(40, done=1, console=console)
    progress.finish(row(2, **{"reward/mean": 0.3, "step/seconds": 9.0}))
    clock[0] += 5
    progress.finish(row(3, **{"reward/mean": 0.9, "step/seconds": 5.0}))
    progress.update("generation", live_rows=5, tokens_per_second=812.4)
    clock[0] += 3
    console.print(progress._panel())
    panel = console.export_text()
    assert "step 4 of 40" in panel and "0:03:05 left" in panel and "▁█" in panel
    assert "generation 3 s" in panel and "5 live rows  812.4 tokens per second" in panel


def test_the_parts_of_a_phase_are_counted_as_they_are_finished():
    class Pending:
        done = False

        def is_ready(self):
            return self.done

    console = screen(terminal=True)
    progress = consoles.Progress(40, console=console)
    waiting = Pending()
    parts = PhaseParts(12, [jnp.zeros(()), jnp.ones(()), waiting])  # pyright: ignore
    progress.update("training", parts)
    console.print(progress._panel())
    waiting.done = True
    console.print(progress._panel())
    progress.update("saving")
    console.print(progress._panel())
    shown = console.export_text()
    assert shown.count("2 of 12") == 1 == shown.count("3 of 12"), "without another update"


def test_the_program_that_compiles_is_named():
    console = screen(terminal=True)
    with phases.PhaseClock("training") as clock:
        progress = consoles.Progress(40, console=console, program=clock.program)
        progress.update("training")
        name = {"fun_name": "jit(accumulate)"}
        jax.monitoring.record_scalar(phases.COMPILATION, 1.0, **name)
        console.print(progress._panel())
        jax.monitoring.record_event_duration_secs(phases.COMPILATION, 1.5, **name)
        console.print(progress._panel())
    shown = console.export_text()
    assert clock.program() == "" and shown.count("compiling gradients") == 1
    assert clock.take_held_up() == 1.5 and clock.take_held_up() == 0.0


def test_live_display_runs_and_leaves_the_lines(monkeypatch):
    text = run_progress(screen(terminal=True), [0.0], monkeypatch)
    assert text.count("0:00:00") <= 1 and "1/40" in text and "3/40" in text


def test_tables_show_text_as_it_is():
    console = screen()
    consoles.describe(
        "This run", [("devices", "2 x cpu"), ("memory", "policy 0.5 GB [f32]")], console
    )
    consoles.compare(
        [("held-out reward", 0.56, 0.92), ("kl", 0.1, 0.1)],
        [("the [bold]", "a\nb", "c" * 90)],
        console,
    )
    text = console.export_text()
    assert "policy 0.5 GB [f32]" in text and "+0.360" in text and "[bold]" in text and "a b" in text
    assert max(map(len, text.splitlines())) <= 100


def points(workdir):
    """(tag, step) -> value of every point of every event file, whichever order; a point twice is an
    error.
    """
    seen = {}
    for file in sorted((workdir / "tensorboard").glob("events.*")):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                assert (value.tag, event.step) not in seen
                texts = value.tensor.string_val
                seen[value.tag, event.step] = texts[0].decode() if texts else value.simple_value
    return seen


def write_steps(writer, *steps, reward=0.5):
    for step in steps:
        writer.write_evaluation(
            step, {"eval/reward": reward}, [{"prompt": "p", "response": "r", "reward": 1.0}]
        )
        writer.write(row(step, **{"reward/mean": reward}))
    writer.close()


def test_tensorboard_holds_each_point_of_a_resumed_run_once(tmp_path):
    write_steps(metrics.open_run(tmp_path, "{}"), 0, 1, 2, 3)
    for file in (tmp_path / "tensorboard").iterdir():
        # of another second, which a resumed run would be
        file.rename(file.with_name("events.out.tfevents.1.here"))
    write_steps(metrics.open_run(tmp_path, '{"a": 1}', first_step=2), 2, 3, 4, reward=0.75)
    found = points(tmp_path)
    assert {key: found["reward/mean", key] for key in range(5)} == {
        0: 0.5,
        1: 0.5,
        2: 0.75,
        3: 0.75,
        4: 0.75,
    }
    assert {step for tag, step in found if tag == "eval/reward"} == {0, 1, 2, 3, 4}
    # step is none, eval is one, and so are texts
    assert found["generation/rounds", 1] == 20 and len(found) == 5 * (len(row(0)) + 1)
    table = "| prompt | response | reward |\n| --- | --- | --- |\n| p | r | 1 |"
    assert {found[f"{metrics.HELD_OUT}/text_summary", step] for step in range(5)} == {table}
    assert (tmp_path / "config.json").read_text() == '{"a": 1}\n' and not list(
        tmp_path.glob("earlier-*")
    )


def test_a_line_may_be_torn_at_any_byte(tmp_path):
    write_steps(metrics.open_run(tmp_path, "{}"), 0)
    first = metrics.Writer(tmp_path, 1)
    first.write_rows("samples", 1, [{"response": "schön | a\n\u2028b", "reward": None}])
    first.close()
    (text,) = [text for (tag, _), text in points(tmp_path).items() if tag == "samples/text_summary"]
    assert text.endswith("\n| None | schön \\| a b | None |")
    whole = (tmp_path / "samples.jsonl").read_bytes()
    for end in range(len(whole) + 1):
        (tmp_path / "samples.jsonl").write_bytes(whole[:end])
        metrics.open_run(tmp_path, "{}", first_step=2).close()
        assert (tmp_path / "samples.jsonl").read_bytes() == (whole if end == len(whole) else b"")
    (tmp_path / "samples.jsonl").write_bytes(b"\0\0\0\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl: the line .* is no record of a step"):
        metrics.open_run(tmp_path, "{}", first_step=2)


def test_an_earlier_run_is_kept(tmp_path):
    for number in range(3):
        write_steps(metrics.open_run(tmp_path, str(number)), number)
        (tmp_path / "report.html").write_text(str(number))
    (tmp_path / "earlier-notes").mkdir()
    metrics.open_run(tmp_path, "3").close()
    for number in range(3):
        kept = tmp_path / f"earlier-{number + 1}"
        assert (kept / "config.json").read_text() == f"{number}\n"
        assert (kept / "report.html").read_text() == str(number)
        assert [line["step"] for line in read(kept / "metrics.jsonl")] == [number]
    assert points(tmp_path) == {} and (tmp_path / "config.json").read_text() == "3\n"


def test_what_cannot_be_written_is_named_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/run cannot be written \(Not a directory\): make room"):
        metrics.open_run(tmp_path / "file/run", "{}")
    writer = metrics.open_run(tmp_path / "run", "{}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as a full disk: a file cannot grow
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match=r"samples\.jsonl cannot be written \(File too large\)"):
            writer.write_rows("samples", 0, [{"response": "x" * 9000}])
        writer.write_evaluation(0, {"x" * 3000: 1.0}, [])
        with pytest.raises(OSError, match=r"tensorboard cannot be written \(File too large\)"):
            writer.write(row(0, **{"x" * 3000: 1.0}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    monkeypatch.setattr(
        metrics.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written \(No space left\)"):
        metrics.Writer(tmp_path / "run", 1)


def evaluated(folder, *lines):
    """The evaluations of a run: (means, (prompt, response) of each sample) of each."""
    writer = metrics.Writer(folder, 0)
    for step, (means, texts) in enumerate(lines):
        samples = [
            {"prompt": prompt, "response": response, "reward": None} for prompt, response in texts
        ]
        writer.write_evaluation(step, means, samples)
    writer.close()
    return metrics.before_and_after(folder)


def test_before_and_after_are_of_what_both_evaluations_have(tmp_path):
    before = (
        {"eval/reward": 0.25, "eval/vader": 0.5},
        [("a", "a1"), ("b", "b1"), ("a", "a2"), ("c", "c1")],
    )
    after = (
        {"eval/length": 3, "eval/reward": 0.75},
        [("d", "D1"), ("a", "A1"), ("b", "B1"), ("a", "A2"), ("a", "A3")],
    )
    measures, texts = evaluated(tmp_path, before, ({}, []), after)
    assert measures == [("eval/reward", 0.25, 0.75)]
    assert texts == [("a", "a1", "A1"), ("b", "b1", "B1"), ("a", "a2", "A2")]
    console = screen()
    consoles.compare(measures, texts, console)
    assert "+0.500" in console.export_text()


def test_the_seconds_of_phases_are_summed_and_compilations_heard(monkeypatch):
    """Seconds in which two threads compile count once, and in the phase in which they pass."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])

    def compile_until(end: float) -> None:
        jax.monitoring.record_scalar(phases.COMPILATION, now[0], fun_name="jit(beside)")
        now[0] = end
        jax.monitoring.record_event_duration_secs(phases.COMPILATION, 1.0)

    def compile_beside(end: float) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as worker:
            worker.submit(compile_until, end).result()

    with phases.PhaseClock("starting") as clock:
        now[0] = 1.5
        compile_beside(2.0)
        jax.monitoring.record_scalar(phases.COMPILATION, now[0])
        now[0] = 3.0
        clock.enter("training")
        compile_beside(4.0)
        now[0] = 5.0
        jax.monitoring.record_event_duration_secs(phases.COMPILATION, 1.5)
        now[0] = 9.0
        clock.enter("starting")
        now[0] = 10.0
    jax.monitoring.record_scalar(phases.COMPILATION, now[0])
    assert clock.program() == ""
    assert clock.seconds() == [("training", 6.0, 2.0), ("starting", 4.0, 1.5)]
    console = screen()
    consoles.where_time_went([*clock.seconds(), phases.PhaseSeconds("saving", 0.01, 0.0)], console)
    shown = console.export_text()
    assert "60%" in shown and "in all" in shown and "saving" not in shown


def test_before_and_after_may_have_nothing_in_common(tmp_path):
    assert metrics.before_and_after(tmp_path) == ([], [])
    assert evaluated(tmp_path, ({"eval/reward": 0.25}, [("a", "a1")]), ({}, [("b", "b1")])) == (
        [],
        [],
    )
    consoles.compare([], [], screen())
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "eval/rew')  # killed while writing
    assert metrics.before_and_after(tmp_path) == ([], [])


def test_few_of_many_samples_are_shown_evenly_spread(tmp_path):
    texts = [(str(number), "r") for number in range(20)]
    _, shown = evaluated(tmp_path, ({}, texts), ({}, texts))
    assert [prompt for prompt, _, _ in shown] == ["0", "4", "8", "12", "16"]


def test_sync_waits_for_the_disk_to_have_every_line(tmp_path, monkeypatch):
    writer = metrics.Writer(tmp_path, 1)
    synced = []
    monkeypatch.setattr(metrics.os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    writer.sync()
    names = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "strategies.jsonl")
    assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in names)
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"metrics\.jsonl cannot be written \(No space"),
    ):
        patch.setattr(
            metrics.os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        writer.sync()
    writer.close()
