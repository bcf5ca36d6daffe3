"""What measures all that a GPU can tell, at tiny sizes on a CPU: figures, new starts, failures."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernels, on_gpu
from benchmarks.gpu import laws, speeds
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import ROOT, environment
from pallas_kernels import measured

# By part, where a case's seconds or shares are, and how many cases there are.
FIGURES = {
    "laws": ({"errors", "why"}, 4),
    "speeds": ({"seconds", "ratio", "of_floor", "why"}, 4),
    "texts": ({"tokens_compared", "differing_samples", "mismatch/max", "mismatch/mean"}, 5),
    "decoding": ({"contenders"}, 1),
    "step": ({"of_peak_flops", "seconds", "tokens_per_second"}, 1),
    "exactness": ({"seconds", "of_categorical"}, 2),
    "predictions": ({"calls"}, 1),
}


def started(out: Path, parts: str, *more: str) -> Any:
    """A start's command line, read."""
    ledger = Ledger.open(out, tiny=True)
    ledger.begin()
    return on_gpu.arguments(["--tiny", "--out", str(out), "--parts", parts, *more])


def here(asked: Any):
    """What measures a part in this process."""
    return lambda part, begins, ends: on_gpu.work(part, asked.out, tiny=True, seconds=begins)


def measure(asked: Any) -> dict[str, Any]:
    """Measure all parts in this process; the parts of the document."""
    for part in asked.parts:
        on_gpu.measure_part(part, asked, here(asked))
    return json.loads(asked.out.read_text())["parts"]


@pytest.fixture(autouse=True)
def programs_are_kept_with_the_tests(monkeypatch):
    monkeypatch.setattr(on_gpu, "configure_jax", lambda **_: None)


@pytest.fixture
def fewer_processes(monkeypatch):
    """Each of them takes seconds to begin: one file of tests is enough."""
    monkeypatch.setattr(laws, "TESTS", {"commit": laws.TESTS["commit"]})


@pytest.mark.long
def test_every_part_has_figures_and_the_next_start_has_nothing_to_do(tmp_path, fewer_processes):
    out = tmp_path / "results.json"
    parts = measure(started(out, ",".join(on_gpu.PARTS)))
    for part, (names, count) in FIGURES.items():
        assert not parts[part]["failed"] and not parts[part]["left"]
        full = [one for one in parts[part]["done"].values() if one.keys() >= names]
        assert len(full) == count, part
        for figures in parts[part]["done"].values():
            assert figures["device"] == "cpu" and figures["jax"] and figures["date"]
    check_figures(parts)
    written = out.read_text()
    again = measure(started(out, ",".join(on_gpu.PARTS)))
    assert again == json.loads(written)["parts"]


def check_figures(parts: dict[str, Any]) -> None:
    """What must be so on a CPU, in float32 and without kernels."""
    tests = parts["laws"]["done"]["commit: tests"]
    assert not tests["failed"] and tests["passed"] + len(tests["skipped"])
    for figures in parts["laws"]["done"].values():
        assert max(figures.get("errors", {"": {"": 0.0}}).popitem()[1].values()) < 1e-4
    for figures in parts["texts"]["done"].values():
        assert figures["differing_samples"] == 0 and figures["tokens_compared"] == 32
        assert figures["mismatch/max"] < 1e-4
    assert parts["texts"]["done"]["tiny, reference: replay-chain-8"]["acceptance"] == 1.0
    (decoded,) = parts["decoding"]["done"].values()
    assert decoded["contenders"].keys() == {"plain", "lookup-chain-4", "replay-chain-4", "adaptive"}
    assert all(one["bytes_per_second"] > 0 for one in decoded["contenders"].values())
    step = parts["step"]["done"]["tiny, reference"]
    assert [*step["seconds"]] == ["decoding weights", "generation", "scoring", "update"]
    assert math.isfinite(step["gradient_norm"]) and step["gradient_norm"] > 0
    losses = {one["loss"] for one in parts["step"]["done"]["tiny: passes"]["workers"].values()}
    assert max(losses) - min(losses) < 1 and len(losses) > 0
    calls = parts["predictions"]["done"]["tiny: calls"]["calls"]
    assert {"generation", "policy_training", "reference_inference"} <= calls.keys()
    assert all(one["ratio"] > 0 for one in calls.values())


def part_of(*cases: Case):
    """A part of these cases."""
    return lambda sizes, ledger: iter(cases)


def test_what_fails_is_named_and_tried_again_after_the_others(tmp_path, monkeypatch):
    tried = []
    broken = [True]

    def unsteady() -> dict[str, Any]:
        tried.append("unsteady")
        if broken[0]:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand many more lines")
        return {"speed": 1.0}

    def steady() -> dict[str, Any]:
        tried.append("steady")
        return {"speed": 2.0}

    cases = Case("unsteady", unsteady), Case("steady", steady)
    monkeypatch.setitem(on_gpu.PARTS, "texts", part_of(*cases))
    monkeypatch.setitem(on_gpu.PARTS, "step", lambda sizes, ledger: 1 / 0)
    monkeypatch.setitem(on_gpu.PARTS, "decoding", part_of(Case("last", steady)))
    out = tmp_path / "results.json"
    parts = measure(started(out, "texts,step,decoding"))
    assert parts["texts"]["failed"]["unsteady"]["error"] == (
        "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    assert "ZeroDivisionError" in parts["step"]["failed"]["start"]["error"]
    assert [*parts["texts"]["done"]] == ["steady"] and [*parts["decoding"]["done"]] == ["last"]
    assert tried == ["unsteady", "steady", "steady"]

    broken[0] = False
    parts = measure(started(out, "texts,step,decoding"))
    assert parts["texts"]["done"]["unsteady"]["speed"] == 1.0 and not parts["texts"]["failed"]
    assert tried[3:] == ["unsteady"]
    assert "step: 0 done, 1 failed" in on_gpu.summary(Ledger.open(out, tiny=True), ["step"])


def test_no_case_begins_after_the_deadline_and_those_left_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(on_gpu.PARTS, "texts", part_of(Case("one", dict), Case("two", dict)))
    out = tmp_path / "results.json"
    asked = started(out, "texts")
    assert on_gpu.work("texts", out, tiny=True, seconds=0.0) == 0
    assert Ledger.open(out, tiny=True).part("texts")["left"] == ["one", "two"]
    assert measure(asked)["texts"]["left"] == []


def test_a_case_whose_process_dies_has_failed_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(on_gpu.PARTS, "texts", part_of(Case("one", dict), Case("two", dict)))
    out = tmp_path / "results.json"
    asked = started(out, "texts")
    codes = [-signal.SIGSEGV, on_gpu.OVER_TIME]

    def worker(part: str, begins: float, ends: float) -> int:
        if not codes:
            return here(asked)(part, begins, ends)
        ledger = Ledger.open(out, tiny=True)
        ledger.use_device()
        ledger.start(part, ["two", "one"][len(codes) - 1], [])
        return codes.pop(0)

    on_gpu.measure_part("texts", asked, worker)
    failed = Ledger.open(out, tiny=True).part("texts")["failed"]
    assert "SIGSEGV" in failed["one"]["error"] and "time of its part" in failed["two"]["error"]
    assert failed.keys() == {"one", "two"}
    assert measure(started(out, "texts"))["texts"]["done"].keys() == {"one", "two"}


def test_without_a_gpu_no_real_size_is_measured(tmp_path):
    out = tmp_path / "results.json"
    assert on_gpu.work("texts", out, tiny=False, seconds=60.0) == 0
    told = Ledger.open(out, tiny=False).part("texts")["failed"]["start"]["error"]
    assert told == "ValueError: jax finds no GPU here; give --tiny for a CPU."


def test_figures_of_other_sizes_or_devices_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setitem(on_gpu.PARTS, "texts", part_of(Case("one", dict)))
    out = tmp_path / "results.json"
    measure(started(out, "texts"))
    with pytest.raises(ValueError, match="tiny sizes; name another --out"):
        Ledger.open(out, tiny=False)
    ledger = Ledger.open(out, tiny=True)
    ledger.document["device"] = "NVIDIA H100 80GB HBM3"
    with pytest.raises(ValueError, match=r"H100 80GB HBM3 with jax .* for cpu"):
        ledger.use_device()


def test_the_table_takes_kernels_whose_laws_held_and_that_were_timed(tmp_path, monkeypatch):
    """A kernel whose law did not hold loses the place that it had."""
    old = measured.summarise(
        "verify_head", "NVIDIA H100 80GB HBM3", [2.0] * 8, jax="0.10.2", date="2026-11-25"
    )
    assert old is not None
    monkeypatch.setattr(measured, "table", lambda: {(old.kernel, old.device_kind): old})
    ledger = Ledger.open(tmp_path / "results.json", tiny=False)
    ledger.document |= {"device": "NVIDIA H100 80GB HBM3", "jax": "0.11.2"}
    for kernel in kernels.PROBLEMS:
        holds = kernel != "verify_head"
        ledger.finish("laws", f"{kernel}: llama3_8b", {"within": holds}, 1.0)
        count = 7 if kernel == "logprobs" else 8
        for case in range(count):
            figures = {"kernel": kernel, "ratio": 1.0 + case / 8}
            ledger.finish("speeds", f"{kernel}: {case}", figures, 1.0)
    ledger.fail("laws", "commit: tests", "RuntimeError: no report")
    failed = {"test_verify_head_follows_its_law[llama3_8b]": "AssertionError"}
    ledger.finish("laws", "all: tests", {"tests": "file", "passed": 9, "failed": failed}, 1.0)
    path = tmp_path / "measured.json"
    lines = speeds.write_table(ledger, path)
    (row,) = measured.read(path).values()
    assert (row.kernel, row.device_kind, row.cases) == (
        "tree_attention",
        "NVIDIA H100 80GB HBM3",
        8,
    )
    assert row.least == 1.0 < row.ratio < row.median < 1.5
    told = dict(line.split(": ", 1) for line in lines)
    assert "verify_head: llama3_8b, all: tests" in told["verify_head"]
    assert "fewer than 8" in told["logprobs"]
    assert "commit: tests" in told["commit"] and "1.2" in told["tree_attention"]


@pytest.mark.slow
def test_the_command_measures_in_processes_of_its_own(tmp_path):
    out = tmp_path / "results.json"
    line = [sys.executable, "-m", "benchmarks.on_gpu", "--tiny", "--parts", "speeds", "--out"]
    outcome = subprocess.run(
        [*line, str(out)],
        cwd=ROOT,
        env=environment(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "speeds: 4 done, 0 failed, 0 left" in outcome.stdout
    assert "tree_attention: no measurement; no law of it was tried" in outcome.stdout
    assert measured.read(tmp_path / "measured.json") == dict(measured.table())
