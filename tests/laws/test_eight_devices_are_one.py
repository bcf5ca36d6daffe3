"""A run on eight devices is the run on one."""

from __future__ import annotations

import jax
import pytest
import tiny_run
from tiny_run import PPO, lines

from rlhf_jax.command import train


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, method",
    [pytest.param("lookup-chain-2", PPO, marks=pytest.mark.long), ("model-tree-2x2", {})],
)
def test_eight_devices_give_the_text_and_losses_of_one(
    strategy, method, folder, tmp_path, monkeypatch
):
    """Data x FSDP x tensor: the same samples while rows finish and shrink, losses within 1e-4, over
    two steps.
    """
    tiny_run.make_files(tmp_path)
    shapes = {"one": (1, 1, 1), "eight": (2, 2, 2)}
    devices = jax.devices()
    found = {}
    for name, (data, fsdp, tensor) in shapes.items():
        used = devices[: data * fsdp * tensor]
        monkeypatch.setattr(jax, "devices", lambda *_, used=used: used)
        monkeypatch.setattr(jax, "device_count", lambda used=used: len(used))
        mesh = {"mesh__data": data, "mesh__fsdp": fsdp, "mesh__tensor": tensor}
        rows = {
            "generation__max_rows": 16,
            "generation__min_rows": 4,
            "generation__strategy": strategy,
        }
        changes = {"workdir": tmp_path / name, "steps": 2, "drafter__path": folder}
        words = tiny_run.arguments(tmp_path, folder, **mesh, **rows, **changes, **method)
        assert train.main(words) == 0
        run = tmp_path / name
        found[name] = [
            lines(run / f"{file}.jsonl") for file in ("samples", "evaluations", "metrics")
        ]
    one = found.pop("one")
    for other in found.values():
        assert one[0] == other[0]
        assert [e["samples"] for e in one[1]] == [e["samples"] for e in other[1]]
        for a, b in zip(one[2], other[2], strict=True):
            assert b["generation/occupancy"] == a["generation/occupancy"] > 0.3
            names = {"loss/policy", "kl/mean", "gradient/norm", "reward/mean", "loss/value"}
            for key in names & a.keys():
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key
