"""The simulator of a stage on many slices: bounds, laws that every policy keeps, and how far ours
is ahead.
"""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
from latency_tables import write_table

from benchmarks import foresight, makespan
from benchmarks.latency_table import DECODE, DRAFT, VERIFY, read_table
from rlhf_jax import command
from rlhf_jax.generation.reallocation.planner import Reallocation
from rlhf_jax.planner.placing import static
from rlhf_jax.planner.response_lengths import draw_lengths, read_percentiles
from rlhf_jax.planner.simulated_stage import ROUND, WAITS, SimulatedSlice, SimulatedStage, simulate

LENGTHS = (
    "percentile,prompt_tokens,response_tokens\n"
    "1,1,4\n50,25,290\n90,491,700\n99.9,8288,1140\nmean,217.7,333.7\n"
)
# Responses of ShareGPT's first turns, tokens by percentile.
CHATS = {1: 4, 5: 23, 10: 51, 25: 149, 50: 291, 75: 454, 90: 699, 95: 815, 99: 960, 99.9: 1141}
# Some milliseconds of Llama-3.1-8B and a 4-bit copy that drafts, on an A100-80GB with vLLM: from
# EfficientRollout (Apache-2.0), sd_toggle/configs/sweep_a100_tp1_llama318binstruct.csv. By mode,
# draft length and context; of BATCHES.
BATCHES = 1, 4, 8, 16, 24, 32, 48, 64
MEASURED = {
    ("target_decode", 0, 256): (10.23, 10.18, 10.24, 11.32, 12.49, 12.73, 14.44, 14.79),
    ("target_decode", 0, 2048): (10.33, 10.54, 10.99, 12.6, 13.83, 14.07, 15.79, 16.12),
    ("target_verify", 3, 256): (9.95, 10.29, 12.34, 14.29, 15.84, 16.35, 21.4, 22.45),
    ("target_verify", 3, 2048): (11.26, 12.27, 13.69, 15.68, 17.2, 17.72, 22.78, 24.57),
    ("target_verify", 7, 256): (10.0, 11.46, 14.12, 15.77, 20.61, 21.44, 28.42, 36.51),
    ("target_verify", 7, 2048): (11.32, 13.53, 15.46, 17.13, 21.96, 23.57, 30.56, 40.02),
    ("drafter_decode", 3, 256): (4.99, 5.23, 5.34, 5.64, 6.99, 7.33, 8.82, 10.72),
    ("drafter_decode", 3, 2048): (5.25, 5.68, 6.1, 7.14, 9.1, 10.7, 12.93, 16.03),
}


def document(folder: pathlib.Path, *more: str) -> dict:
    """A small stage on a made-up machine."""
    (folder / "lengths.csv").write_text(LENGTHS)
    table = write_table(folder / "table.csv")
    files = [f"--latency={table}", f"--lengths={folder / 'lengths.csv'}"]
    return makespan.document(
        makespan.arguments([*files, "--slices=6", "--samples=24", "--free-decisions", *more])
    )


def measured(folder: pathlib.Path, samples: int, prediction: str) -> dict:
    """A stage on 64 slices of the measured machine."""
    lines = [
        f"{mode},{batch},{seq},{gamma},{took}"
        for (mode, gamma, seq), row in MEASURED.items()
        for batch, took in zip(BATCHES, row, strict=True)
    ]
    (folder / "table.csv").write_text("\n".join(["mode,batch,seq,gamma,median_ms", *lines]))
    percentiles = [f"{percentile},0,{tokens}" for percentile, tokens in CHATS.items()]
    table = ["percentile,prompt_tokens,response_tokens", *percentiles, "mean,217.7,333.7"]
    (folder / "lengths.csv").write_text("\n".join(table))
    files = [f"--latency={folder / 'table.csv'}", f"--lengths={folder / 'lengths.csv'}"]
    return makespan.document(
        makespan.arguments(
            [*files, f"--samples={samples}", f"--prediction={prediction}", "--free-decisions"]
        )
    )


@pytest.mark.parametrize("prediction", ["oracle", "noisy:0.5", "none"])
def test_all_end_above_the_bound_and_ours_is_not_behind(tmp_path, prediction):
    found = document(tmp_path, f"--prediction={prediction}")
    json.dumps(found)
    for figures in found["policies"].values():
        assert figures["generation_seconds"] >= found["lower_bound_seconds"]
        assert 0 <= figures["idle_share"] < 1
        assert figures["fused_seconds"] <= figures["unfused_seconds"] * 1.05
    slack = 1.0 if prediction == "oracle" else 0.95  # a few slices: much is luck
    assert found["static_to_ours"] >= slack
    assert found["policies"]["ours"]["migration_share"] < 0.02


def test_lengths_follow_the_table(tmp_path):
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    known = read_percentiles(str(tmp_path / "lengths.csv"))
    drawn = draw_lengths(known, 100_000, np.random.default_rng(0))
    assert known.prompt == 217.7 and drawn.min() >= 1 and drawn.max() == 1140
    np.testing.assert_allclose(np.quantile(drawn, [0.5, 0.9]), [290, 700], rtol=0.02)


def test_a_machine_of_one_speed_takes_the_time_that_it_must():
    rates = np.concatenate([np.zeros((1, 40)), np.full((4, 40), 50.0)])
    machine = SimulatedSlice(rates, 1e5, 1e10, 0.0)
    total = np.array([100.0, 200.0, 50.0, 400.0])
    outcome = simulate(machine, 2, total, 100.0, static(2, 4), 0.0)
    assert outcome.seconds == pytest.approx(8.0, abs=4 * ROUND)
    assert outcome.busy == pytest.approx(4.0 + 8.0, abs=8 * ROUND)
    assert makespan.drained(machine, np.sort(total)[::-1], 100.0) == pytest.approx(8.0)


def test_a_move_stops_both_slices_for_as_long_as_its_bytes_take():
    rates = np.concatenate([np.zeros((1, 40)), np.full((4, 40), 50.0)])
    # 1.5 s for a prompt of 100 tokens
    machine = SimulatedSlice(rates, token_bytes=1e6, bandwidth=1e8, latency=0.5)

    def swap(stage: SimulatedStage) -> Reallocation:
        waits = (stage.place == WAITS).any()
        return (
            Reallocation([(0, 0), (1, 0)], [(1, 1)], np.zeros(stage.slices, bool))
            if waits
            else Reallocation([], [], np.zeros(stage.slices, bool))
        )

    outcome = simulate(machine, 2, np.array([100.0, 100.0]), 100.0, swap, 0.0)
    assert outcome.seconds == pytest.approx(2.0 + 1.5, abs=4 * ROUND)
    assert (outcome.moves, outcome.moved_bytes, outcome.paused) == (1, 1e8, pytest.approx(3.0))


def test_a_policy_may_not_overfill_a_slice():
    rates = np.concatenate([np.zeros((1, 40)), np.full((1, 40), 50.0)])
    machine = SimulatedSlice(rates, 1e5, 1e10, 0.0)
    with pytest.raises(RuntimeError, match="more rows"):
        simulate(
            machine,
            1,
            np.ones(2),
            1.0,
            lambda stage: Reallocation([(0, 0), (1, 0)], [], np.zeros(stage.slices, bool)),
            0.0,
        )


def test_bad_input_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="table of lengths"):
        read_percentiles(str(tmp_path / "none.csv"))
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="percentile"):
        read_percentiles(str(tmp_path / "bad.csv"))
    with pytest.raises(SystemExit):
        makespan.arguments(["--latency=a", "--lengths=b", "--prediction=noisy"])


def test_the_tables_that_come_with_the_benchmarks_are_read():
    asked = makespan.arguments([])
    assert {*read_table(asked.latency).mode} == {DECODE, VERIFY, DRAFT}
    percentiles, tokens, prompt = read_percentiles(asked.lengths)
    assert len(percentiles) == len(tokens) == 10 and prompt > 0


@pytest.mark.parametrize("deadline, late", [(8.0, 6.0), (16.0, 2.0), (24.0, 0.0)])
def test_the_bound_of_foresight_where_it_is_known(deadline, late):
    """Ten samples of 4 s each, one after the other on two slices."""
    machine = SimulatedSlice(np.array([np.zeros(10), np.full(10, 24.0)]), 0.0, 1.0, 0.0)
    alike = foresight.Kinds(np.array([10.0]), np.array([[1.0] * 24 + [0.0] * 2]))  # 96 tokens long
    assert 0.94 * late <= foresight.least_late(machine, alike, 2, 0.0, deadline) <= late + 1e-6


def on_a_tail(*more: str) -> dict:
    """Sixteen slices of the measured machine, half of the responses under 900 tokens."""
    law = ["--lengths=lognormal:900:1.3:16384", "--slices=16", "--free-decisions"]
    return makespan.document(makespan.arguments([*law, *more]))


def test_a_lognormal_law_is_cut_off_at_its_limit():
    known = read_percentiles("lognormal:900:1.3:16384")
    drawn = draw_lengths(known, 100_000, np.random.default_rng(0))
    assert drawn.max() == 16384 and known.prompt > 0
    np.testing.assert_allclose(np.median(drawn), 900, rtol=0.02)
    np.testing.assert_allclose(np.mean(drawn == 16384), 0.0128, atol=0.002)
    with pytest.raises(ValueError, match="MEDIAN:SIGMA:MOST"):
        read_percentiles("lognormal:900")


def test_samples_of_a_prompt_are_alike():
    known = read_percentiles("lognormal:900:1.3:16384")
    drawn = draw_lengths(known, 80_000, np.random.default_rng(0), alike=8)
    logs = np.log(drawn).reshape(-1, 8)
    assert logs.std(axis=1).mean() < 0.5 < 1.1 < logs.mean(axis=1).std()
    np.testing.assert_allclose(np.median(drawn), 900, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, gain",
    [
        (("--prediction=noisy:0.25", "--wrong=1.0"), 1.02),
        (("--prediction=siblings",), 0.985),
        (("--prediction=none",), 0.985),
    ],
    ids=["noisy", "siblings", "none"],
)
def test_what_is_known_of_a_tail_is_used(more, gain):
    """Beside the best of static, even and threshold; two stages before the noise was another."""
    assert on_a_tail(*more)["best_other_to_ours"] >= gain


@pytest.mark.slow
def test_a_first_stage_is_spread_evenly():
    """Nothing is known of what a forecast is worth, so none is believed."""
    found = on_a_tail("--prediction=noisy:0.5", "--first")
    assert (
        found["best_other_to_ours"] >= 0.995 and "lengths/earlier_within_50" not in found["covered"]
    )


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a plan prints, in one line."""
    words = ["plan", "grpo_llama32_1b", "--config.generation.max_new_tokens=512", *more]
    assert command.main(words) in (0, 1)
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_says_what_moves_are_worth(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    lengths = f"--lengths={tmp_path / 'lengths.csv'}"
    words = ("--devices=gpu:4:h100", "--config.mesh.slices=4")
    said = planned(capsys, lengths, *words)
    ways = (
        "each stays",
        "spread evenly",
        "ours, which knows siblings",
        "ours, were",
        "lower bound",
    )
    seconds = [float(re.findall(rf"([0-9.]+) s {way}", said)[0]) for way in ways]
    static, _, guessed, known, bound = seconds
    assert bound <= known <= guessed <= static and known < static
    assert "256 responses over 4 slices, 28% of them cut off at 512 tokens" in said
    assert "reallocate is off" in planned(
        capsys, lengths, *words, "--config.generation.reallocate=False"
    )
    assert "no sample can move" in planned(capsys, lengths, "--devices=gpu:1:h100")


@pytest.mark.slow
@pytest.mark.parametrize(
    "samples, gain, fused",
    [(32, 1.15, 1.15), (64, 1.25, 1.2), pytest.param(128, 1.3, 1.02, marks=pytest.mark.long)],
)
def test_known_lengths_gain_what_they_can(tmp_path, samples, gain, fused):
    found = measured(tmp_path, samples, "oracle")
    assert found["static_to_ours"] >= gain and found["ours_to_packing"] <= 1.08
    assert found["policies"]["ours"]["migration_share"] < 0.02
    assert found["static_unfused_to_ours_fused"] >= 1.2 and found["unfused_to_fused"] >= fused


@pytest.mark.long
def test_half_known_lengths_gain_where_samples_wait(tmp_path):
    assert measured(tmp_path, 128, "noisy:0.5")["static_to_ours"] >= 1.15


@pytest.mark.slow
@pytest.mark.parametrize(
    "samples", [32, *(pytest.param(count, marks=pytest.mark.long) for count in (64, 128))]
)
def test_without_predictions_nothing_is_lost(tmp_path, samples):
    found = measured(tmp_path, samples, "none")
    assert found["static_to_ours"] >= 0.99
    assert found["policies"]["ours"]["migration_share"] < 0.02
