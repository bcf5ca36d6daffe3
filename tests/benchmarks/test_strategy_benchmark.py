"""The strategy benchmark, from a table of another machine to the document."""

from __future__ import annotations

import json

import numpy as np
import pytest
from latency_tables import BATCHES, SEQS, milliseconds, write_table

from benchmarks import strategy as benchmark
from benchmarks.latency_table import expected
from rlhf_jax.generation.strategy.settings import SELECTOR_SETTINGS


def dear(mode: str, batch: int, seq: int, gamma: int) -> float:
    """A machine where drafting never pays: half the target's work for a draft, and every verified
    token costs.
    """
    nodes, weights, token = (1, 1.5, 0.5) if mode == benchmark.DRAFT else (gamma + 1, 3.0, 1.0)
    return max(weights + 1e-5 * batch * seq, token * batch * nodes) + 0.05 * batch + 0.3


def cheap(mode: str, batch: int, seq: int, gamma: int) -> float:
    """A machine where drafting always pays: it waits for the target's weights, whatever is
    verified.
    """
    nodes, weights, token = (1, 0.4, 0.001) if mode == benchmark.DRAFT else (gamma + 1, 20.0, 0.004)
    return max(weights + 1e-6 * batch * seq, token * batch * nodes) + 0.01 * batch + 0.1


def asked_of(path: str, *more: str):
    return benchmark.arguments(
        ["--latency", path, "--typical-length", "100", "--stages", "1", *more]
    )


@pytest.mark.parametrize(
    "drafter", ["--free-drafter", pytest.param("--seed=1", marks=pytest.mark.slow)]
)
def test_ours_is_near_the_oracle_and_behind_no_fixed_choice(tmp_path, drafter):
    path = write_table(tmp_path / "table.csv")
    found = benchmark.document(
        benchmark.read_table(path), asked_of(path, "--acceptance=0.3,0.8", drafter)
    )
    json.dumps(found)
    error = found["cost_model"]["relative_error"]
    assert error.keys() == {benchmark.DECODE, benchmark.VERIFY, benchmark.DRAFT, "all"}
    assert error["all"]["median"] <= 0.08
    for case in found["acceptance"].values():
        assert 0.97 <= case["ours_to_oracle"] <= 1.001
        assert case["ours_to_best_fixed"] >= 0.995
        assert case["ours_to_plain"] >= 0.995
        assert case["first_stage"]["ours_to_oracle"] >= 0.93
        assert case["decision_microseconds"] > 0
    assert found["acceptance"]["0.8"]["ours_to_plain"] > 1.2


@pytest.mark.parametrize(
    ("machine", "noise"),
    [(dear, 0.02), (cheap, 0.02), (milliseconds, 0.12)],
    ids=["never", "always", "noisy"],
)
def test_ours_is_behind_plain_and_fixed_by_probes_at_most_whatever_the_machine(
    tmp_path, machine, noise
):
    """Where drafting never or always pays, plain decoding or a fixed length is the best there
    is.
    """
    path = write_table(tmp_path / "table.csv", machine=machine, noise=noise)
    found = benchmark.document(benchmark.read_table(path), asked_of(path, "--acceptance=0.6"))
    case = found["acceptance"]["0.6"]
    assert (
        case["ours_to_plain"] >= 1 - SELECTOR_SETTINGS.probe_share
        and case["ours_to_best_fixed"] >= 1 - SELECTOR_SETTINGS.probe_share
    )
    assert case["ours_to_oracle"] >= 0.97


def test_the_table_is_read_without_its_averages(tmp_path):
    points = benchmark.read_table(write_table(tmp_path / "table.csv"))
    assert len(points.mode) == 7 * len(BATCHES) * len(SEQS)
    assert points.batch.min() == 1
    one = (
        (points.mode == benchmark.VERIFY)
        & (points.nodes == 4)
        & (points.batch == 8)
        & (points.seq == 512)
    )
    assert points.seconds[one] == pytest.approx(
        milliseconds(benchmark.VERIFY, 8, 512, 3) / 1e3, rel=0.1
    )


def test_without_drafter_calls_drafting_is_free(tmp_path):
    path = write_table(
        tmp_path / "table.csv", (f"{benchmark.DECODE}_sd", benchmark.DECODE, benchmark.VERIFY)
    )
    found = benchmark.document(benchmark.read_table(path), asked_of(path, "--acceptance=0.5"))
    assert found["drafter"] == "free"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows of mode target_decode and target_verify"),
        ("a,b\n1,2\n", "is no latency table.*columns batch, seq, gamma, mode"),
        (
            "batch,seq,gamma,mode,median_ms\n1,64,0,target_decode,5\n",
            "no rows of mode target_verify",
        ),
        ("batch,seq,gamma,mode,median_ms\n1,64,0,target_decode,five\n", "is no latency table"),
        (
            "model,batch,seq,gamma,mode,median_ms\na,1,64,0,target_decode,5\nb,1,64,2,target_verify,5\n",
            "several models",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        benchmark.read_table(str(path))


def test_the_machine_takes_measured_times_where_there_are_some_and_lines_between(tmp_path):
    path = write_table(tmp_path / "table.csv")
    points = benchmark.read_table(path)
    machine = benchmark.machine_of(points, 0.5, asked_of(path))
    assert machine.lengths.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]

    def took(mode, nodes):
        part = points[
            (points.mode == mode)
            & (points.nodes == nodes)
            & (points.batch == 4)
            & (points.seq == 512)
        ]
        return np.median(part.seconds)

    seconds = machine.seconds(4, 4 * 512.0)
    draft = took(benchmark.DRAFT, 0)
    for length, mode in (
        (0, benchmark.DECODE),
        (1, benchmark.VERIFY),
        (3, benchmark.VERIFY),
        (8, benchmark.VERIFY),
    ):
        assert seconds[length] == pytest.approx(took(mode, length + 1) + length * draft)
    assert seconds[2] == pytest.approx((seconds[1] + seconds[3]) / 2)
    assert machine.seconds(1, 1.0)[0] == pytest.approx(machine.seconds(1, 128.0)[0])  # clamped


def test_every_policy_decodes_the_same_text(tmp_path):
    path = write_table(tmp_path / "table.csv")
    asked = asked_of(path)
    machine = benchmark.machine_of(benchmark.read_table(path), 0.7, asked)
    batches = benchmark.batches_of(machine, asked)
    plain, drafted = (
        benchmark.drain(machine, batches, benchmark.fixed(choice), False, 0) for choice in (0, 3)
    )
    for ends, one, other in zip(batches, plain, drafted, strict=True):
        assert one.rounds == ends.max()
        assert other.rounds == np.ceil(ends.max() / (1 + 0.7 + 0.49 + 0.343))
        assert one.tokens == other.tokens == ends.sum()


def test_what_policies_see_is_drawn_around_what_rows_gain(tmp_path):
    path = write_table(tmp_path / "table.csv")
    machine = benchmark.machine_of(benchmark.read_table(path), 0.7, asked_of(path))
    luck = np.random.default_rng(0)
    left = np.full(4000, 50.0)
    drafted = benchmark.seen(machine, 3, left, 0.0, 1.0, False, luck)
    assert drafted.tokens / 4000 == pytest.approx(machine.tokens[3], rel=0.03)
    assert drafted.accepted.sum() / drafted.tried.sum() == pytest.approx(0.7, abs=0.02)
    assert drafted.observations.offered.sum() == drafted.tried.sum()
    assert benchmark.seen(machine, 3, np.full(9, 0.2), 0.0, 1.0, False, luck).tokens == 9
    for retrospect in (False, True):
        plain = benchmark.seen(machine, 0, left, 0.0, 1.0, retrospect, luck)
        assert plain.tokens == 4000 and plain.observations.offered.any() == retrospect


def test_observations_end_with_the_first_miss_and_with_the_text():
    right = np.array(
        [[True, True, False, True], [True, True, True, True], [False, True, True, True]]
    )
    found = benchmark.observations_of(right, np.array([9, 2, 9]))
    assert found.offered[:, :4].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert found.ranks[:, :4].tolist() == [[0, 0, -1, -1], [0, 0, -1, -1], [-1, -1, -1, -1]]
    assert not found.offered[:, 4:].any()


def test_expected_tokens_are_the_geometric_sum():
    lengths = np.array([0, 1, 4])
    np.testing.assert_allclose(expected(0.5, lengths), [1, 1.5, (1 - 0.5**5) / 0.5])
    np.testing.assert_allclose(expected(1.0, lengths), [1, 2, 5])
