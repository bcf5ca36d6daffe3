"""Plans: where presets and files place the calls of a run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
import tiny_run
from placed_runs import write_plan

from pallas_kernels.dispatch import Kernels
from rlhf_jax.config import default
from rlhf_jax.memory import estimate
from rlhf_jax.mesh import make_mesh
from rlhf_jax.placement.plan import Placement, Plan, read_plan
from rlhf_jax.placement.presets import plan_of
from rlhf_jax.setup import validation
from rlhf_jax.types import ModelConfigs


def planned(name: str | Path, **changes) -> Plan:
    """The plan of a PPO config on eight devices."""
    config = default()
    config.plan = str(name)
    config.algorithm.name = "ppo"
    config.update_from_flattened_dict(changes)
    return plan_of(config, num_devices=8)


def ranges(plan: Plan) -> dict[str, range]:
    return {call: placed.devices for call, placed in plan.placements.items()}


def shape(slices: int = 1, data: int = 1, fsdp: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"slices": slices, "data": data, "fsdp": fsdp, "tensor": tensor}


def test_without_a_plan_all_calls_have_the_mesh():
    plan = planned("", **{"mesh.tensor": 2})
    assert plan.is_uniform and plan.groups() == [list(plan.placements)]
    assert plan.placements["generation"].shape == shape(fsdp=4, tensor=2)
    layouts = plan.layouts(jax.devices())
    assert layouts.keys() == plan.placements.keys()
    assert {layout.mesh for layout in layouts.values()} == {make_mesh(1, 4, 2)}
    for call, layout in layouts.items():
        assert layout.role == (call if call == "generation" else "training")


def test_presets_place_calls_as_their_names_say():
    mesh = {"mesh.tensor": 2, "mesh.slices": 2}
    colocated = planned("colocated", **mesh)
    assert set(ranges(colocated).values()) == {range(8)}
    assert colocated.placements["generation"].shape == shape(slices=2, fsdp=2, tensor=2)
    assert colocated.placements["critic_training"].shape == shape(fsdp=8)

    apart = ranges(planned("interleaved", **mesh))
    assert apart["generation"] == range(8)
    assert apart["policy_training"] == apart["reference_inference"] == range(4)
    assert apart["critic_training"] == apart["critic_inference"] == range(4, 8)

    disaggregated = planned("disaggregated", **mesh)
    others = [call for call in disaggregated.placements if call != "generation"]
    assert ranges(disaggregated)["generation"] == range(4)
    assert {ranges(disaggregated)[call] for call in others} == {range(4, 8)}
    assert disaggregated.placements["generation"].shape == shape(slices=2, tensor=2)
    assert disaggregated.groups() == [["generation"], others]


def test_without_a_critic_the_policy_trains_on_all_devices():
    changes = {"algorithm.name": "grpo", "kl.coefficient": 0.1}
    apart = ranges(planned("interleaved", **changes))
    assert apart["policy_training"] == range(8)
    assert apart["reference_inference"] == range(4, 8)
    with pytest.raises(ValueError, match="has nothing to place beside the policy"):
        planned("interleaved", **changes | {"kl.coefficient": 0.0})


@pytest.mark.parametrize("name", ["", "colocated", "interleaved", "disaggregated"])
def test_a_plan_is_what_its_file_says(name, tmp_path):
    plan = planned(name)
    path = tmp_path / "plan.json"
    path.write_text(plan.text())
    assert read_plan(path, default=Placement(0, 1)) == plan
    assert planned(path) == plan


def test_a_plan_says_dtype_and_kernels_or_has_the_configs(tmp_path):
    own = {"first": 0, "count": 1, "dtype": "bfloat16", "kernels": {"commit": "interpret"}}
    calls = {"generation": own, "policy_training": {"first": 0, "count": 1}}
    path = write_plan(tmp_path / "plan.json", devices=1, calls=calls)
    kernels = Kernels(logprobs="interpret")
    found = read_plan(path, Placement(0, 1, dtype="float32", kernels=kernels)).placements
    both = Kernels(commit="interpret", logprobs="interpret")
    wanted = Placement(0, 1, dtype="bfloat16", kernels=both)
    assert found["generation"] == wanted
    assert found["policy_training"].kernels == kernels


def test_rows_that_generation_cannot_share_are_named_with_its_plan():
    config = default()
    config.plan = "disaggregated"
    config.generation.max_rows = 30
    config.kl.coefficient = 0.0
    plan = plan_of(config, num_devices=6)
    validation.check_rows(config, plan, config.plan)
    config.generation.max_rows = 31
    with pytest.raises(ValueError, match=r"generation's data x fsdp .* = 3; .* to 30 or 33\."):
        validation.check_rows(config, plan, config.plan)


def test_each_half_holds_what_its_calls_need():
    """Of a plan that gives generation devices of its own, neither half holds what the other does,
    and a device has to hold the larger.
    """
    config = default()
    config.plan = "disaggregated"
    models = ModelConfigs(tiny_run.CONFIG)
    plan = plan_of(config, 8)
    layouts = plan.layouts("cpu")
    halves = [
        estimate.plan(config, models, {call: layouts[call] for call in calls}, remat=True)
        for calls in plan.groups()
    ]
    generation, rest = [{part.name for part in parts} for parts in halves]
    assert not generation & rest
    assert {"policy, for generation", "key-value cache of the policy"} <= generation
    assert {"policy, float32", "reference", "gradients, float32"} <= rest
    assert estimate.fullest(config, models, plan, layouts, remat=True) in halves
