"""Measure what a device at hand can do, as a JSON document that `rlhf-jax plan --chip FILE` reads.

    python -m benchmarks.chip > chip.json

The rate of a large product, of reading and writing memory, and, with several devices, of what they
send each other; then the shares of these that a gradient, a forward pass and a round of decoding of
a small model reach. Figures that cannot be measured, as links of one device, stay the table's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.config import default, derived
from rlhf_jax.config.schema import Config
from rlhf_jax.memory import estimate
from rlhf_jax.memory.parts import GIGA
from rlhf_jax.placement.plan import Placement, Plan
from rlhf_jax.planner.chips import Chip
from rlhf_jax.planner.hardware import Hardware
from rlhf_jax.planner.placed_calls import CallProgram, PlacedCalls
from rlhf_jax.planner.programs import programs as programs_of
from rlhf_jax.types import ModelConfig, ModelConfigs

REPEATS = 5
# A model whose weights are in no cache: of a CPU, and of an accelerator.
MODELS = {
    "cpu": ModelConfig("llama", 8192, 512, 2048, 4, 8, 4, 64, 4096),
    "other": ModelConfig("llama", 32_768, 2048, 8192, 8, 16, 8, 128, 4096),
}


def main() -> None:
    """Print the figures of the first device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print(json.dumps(measure(jax.devices()), indent=1))


def measure(devices: Sequence[Any], model: ModelConfig | None = None) -> dict[str, Any]:
    """The document of these equal devices, by calls of a model; None: one of MODELS."""
    on_cpu = devices[0].platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    chip: dict[str, Any] = {
        "flops": product_rate(devices[0], dtype, size=1024 if on_cpu else 8192),
        "memory_bandwidth": memory_rate(devices[0], megabytes=256 if on_cpu else 2048),
    }
    known = estimate.memory_for_remat(default(), devices[0])
    if known:
        chip["gigabytes"] = known / GIGA
    if len(devices) > 1:
        chip["link_bandwidth"] = link_rate(devices, megabytes=16 if on_cpu else 256)
    if on_cpu:
        chip.setdefault("link_bandwidth", chip["memory_bandwidth"])
        chip["network_bandwidth"] = chip["link_bandwidth"]
    model = model or MODELS["cpu" if on_cpu else "other"]
    chip["efficiency"] = reached_shares(model, devices[0], chip, dtype=dtype.name)
    return {
        "chip": chip,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def median_seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call, the median of several after one that is not timed."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
        began = clock()
        jax.block_until_ready(run())
        seconds.append(clock() - began)
    return statistics.median(seconds)


def product_rate(device: Any, dtype: jnp.dtype, size: int) -> float:
    """FLOPs per second of a product of two square matrices."""
    matrix = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / median_seconds(lambda: product(matrix))


def memory_rate(device: Any, megabytes: int) -> float:
    """Bytes per second read and written."""
    array = jax.device_put(jnp.ones(megabytes << 18, jnp.float32), device)
    add = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / median_seconds(lambda: add(array))


def link_rate(devices: Sequence[Any], megabytes: int) -> float:
    """Bytes per second that each device receives if all gather an array."""
    places = Mesh(devices, ("all",))
    whole = NamedSharding(places, PartitionSpec())
    parts = NamedSharding(places, PartitionSpec("all"))
    array = jax.device_put(jnp.ones(len(devices) * (megabytes << 18) // len(devices)), parts)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    received = array.nbytes * (len(devices) - 1) / len(devices)
    return received / median_seconds(lambda: gather(array))


def reached_shares(
    model: ModelConfig, device: Any, chip: dict[str, Any], dtype: str
) -> dict[str, float]:
    """Shares of the chip's figures that calls of a model reach on one device."""
    calls = placed_calls(model, [device], rows=8, tokens=256, dtype=dtype)
    programs = {(one.call, one.name): one for one in programs_of(calls)}
    gradient = programs["policy_training", "gradient"]
    scores = programs["reference_inference", "scores"]
    decoding = run_seconds(programs["generation", "round of 1 node"])
    run = calls.run("generation")
    reads = run.weights(model, role="generation") + run.rows(estimate.decode_state(run))
    return {
        "training": gradient.predicted.flops / run_seconds(gradient) / chip["flops"],
        "inference": scores.predicted.flops / run_seconds(scores) / chip["flops"],
        "decoding": reads / decoding / chip["memory_bandwidth"],
    }


def placed_calls(
    model: ModelConfig,
    devices: Sequence[Any],
    rows: int,
    tokens: int,
    dtype: str = "float32",
    chip: Chip | None = None,
) -> PlacedCalls:
    """PPO's calls of a model over all devices: one micro-batch of texts that are half prompt."""
    config = ppo_config(rows, tokens)
    count = len(devices)
    plan = {call: Placement(0, count, fsdp=count, dtype=dtype) for call in derived.calls(config)}
    plan["generation"] = Placement(0, count, data=count, dtype=dtype)
    models = ModelConfigs(model, critics={"critic": model})
    platform = devices[0].platform
    hardware = Hardware(platform, devices[0].device_kind, count, 0.0, chip=chip)
    return PlacedCalls(config, models, Plan(count, plan), devices, hardware, remat=True)


def ppo_config(rows: int, tokens: int) -> Config:
    """A run of PPO without drafts, whose samples are one micro-batch."""
    config = default()
    config.algorithm.name = "ppo"
    config.kl.update(place="loss", estimator="k3", coefficient=0.1)
    config.data.max_prompt_tokens = tokens // 2
    config.generation.update(
        strategy="plain",
        prompts_per_step=rows,
        samples_per_prompt=1,
        max_rows=rows,
        max_new_tokens=tokens // 2,
        history_tokens=0,
    )
    config.training.microbatch_rows = rows
    return config


def run_seconds(program: CallProgram, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a program on zeros, which it may donate."""
    compiled = program.trace(program.depth).lower().compile()
    seconds = []
    for _ in range(1 + REPEATS):
        arguments, options = jax.tree.map(_zeros, compiled.args_info, compiled.input_shardings)
        jax.block_until_ready((arguments, options))
        began = clock()
        jax.block_until_ready(compiled(*arguments, **options))
        seconds.append(clock() - began)
    return statistics.median(seconds[1:])


def _zeros(info: Any, place: Any) -> jax.Array:
    """An argument of a compiled program."""
    return jnp.zeros(info.shape, info.dtype, device=place)


if __name__ == "__main__":
    main()
