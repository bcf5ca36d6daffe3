"""Which plans of calls are predicted to be best on machines that are not here, and by how much?

    python -m benchmarks.plans > benchmarks/results/plans.json

Prints a JSON document. All seconds are predicted by formulas but `cpu_seconds`, which the search
took here.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from typing import Any

import jax

from rlhf_jax.config import command_line
from rlhf_jax.config.schema import Config
from rlhf_jax.placement.presets import PRESETS
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.planned import plan_run
from rlhf_jax.planner.searched import Searched, search_plans, vary

LLAMA = "meta-llama/Llama-3.1-{}B"
RESPONSES = (1024, 2048, 4096, 8192, 16384)  # tokens at most


def config_of(**changes: Any) -> Config:
    """Return PPO with a policy, a reference, a critic and a reward model, of 8B unless changed.

    Its micro-batch is one row for each device or row shard, whatever the plan.
    """
    config = command_line.load("ppo_llama31_8b:tpu")
    config.reward.models = (LLAMA.format(8),)
    config.mesh.fsdp = -1
    config.training.minibatches = 1
    config.training.microbatch_rows = 1
    config.update_from_flattened_dict(changes)
    return config


def case(devices: str, config: Config, lag: int, varied: bool = True) -> dict[str, Any]:
    """Search plans, and compare the found one with the named ones."""
    planned = plan_run(config, parse_hardware(devices))
    began = time.process_time()
    searched = search_plans(config, planned, lag)
    seconds = time.process_time() - began
    found = searched.plans[-1]
    content: dict[str, Any] = {
        "devices": devices,
        "response": config.generation.max_new_tokens,
        "epochs": config.training.epochs,
        "lag": lag,
        "steps": {plan.name: round(plan.step, 3) for plan in searched.plans if plan.fits},
        "do_not_fit": [plan.name for plan in searched.plans if not plan.fits],
        "left_out": list(searched.left_out),
        "gap": round(searched.gap, 6),
        "cpu_seconds": round(seconds, 1),
        "gains": gains(predicted_steps(searched)),
        "found": found.plan.table(),
        "gigabytes": round(found.gigabytes, 1),
    }
    if varied:
        content["varied"] = {
            f"{one.constant} x {one.factor:g}": gains(one.steps) | {"better": round(one.better, 4)}
            for one in vary(config, planned, searched.plans)
        }
    return content


def predicted_steps(searched: Searched) -> dict[str, float]:
    """Return the seconds of a step of each plan that fits."""
    return {plan.name: plan.step for plan in searched.plans if plan.fits}


def gains(steps: dict[str, float]) -> dict[str, float]:
    """Return how many times as fast the found plan is as the best preset, one mesh, no lag."""
    found = steps["found"]
    presets = [steps[name] for name in PRESETS if name in steps]
    beside = {"preset": min(presets, default=None), "mesh": steps.get("mesh")}
    beside["synchronous"] = steps.get("synchronous")
    return {name: round(step / found, 3) for name, step in beside.items() if step}


def main() -> None:
    """Print what is found for each case."""
    small = "v5p:4x4x4"
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.plans",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "note": "predicted by formulas from data sheets and assumed shares; not measured",
    }
    document["four_models_of_8b"] = [
        case(small, config_of(**{"generation.max_new_tokens": tokens, "training.epochs": n}), lag)
        for n in (2, 1)
        for lag in (0, 1)
        for tokens in RESPONSES
    ]
    document["by_tensor_of_the_mesh"] = [
        {"tensor": tensor} | case(small, config_of(**of_tensor), lag=0, varied=False)
        for tensor in (1, 2, 4, 8)
        for tokens in (1024, 16384)
        for of_tensor in [{"mesh.tensor": tensor, "generation.max_new_tokens": tokens}]
    ]
    many = {"generation.prompts_per_step": 512, "generation.max_rows": 512}
    large = many | {"model.path": LLAMA.format(70), "critic.path": LLAMA.format(8)}
    document["policy_of_70b"] = [
        case("v5p:8x8x8", config_of(**large, **{"mesh.tensor": tensor}), lag)
        for tensor in (2, 8)
        for lag in (0, 1)
    ]
    plain = {"drafter.path": "", "generation.strategy": "plain"}
    document["a_slice_that_is_not_divided"] = [case("v5e:8x8", config_of(**plain), lag=0)]
    more = {"generation.prompts_per_step": 1024, "generation.max_rows": 1024}
    document["more_chips"] = [
        case("v5p:8x8x8", config_of(**many), lag=1, varied=False),
        case("v5p:8x8x16", config_of(**more), lag=1, varied=False),
    ]
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
