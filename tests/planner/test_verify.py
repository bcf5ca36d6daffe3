"""`rlhf-jax plan --verify`: programs of a plan, compiled for TPUs not here; and `--chip`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re

import jax
import pytest
from compilers import needs_libtpu

from benchmarks.chip import placed_calls
from benchmarks.placement_costs import SHAPES, chip_of, measured_pairs, rank_correlation
from benchmarks.plans import config_of
from rlhf_jax import command
from rlhf_jax.placement.plan import Placement, Plan
from rlhf_jax.planner import topology
from rlhf_jax.planner.chips import GPUS
from rlhf_jax.planner.generation_programs import arrivals
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.placed_calls import PlacedCalls
from rlhf_jax.planner.planned import plan_run
from rlhf_jax.planner.programs import programs as programs_of
from rlhf_jax.planner.verified import CachingCompiler, CompilerFigures, compile_figures
from rlhf_jax.runtime.jax_internals import cuda_plugin
from rlhf_jax.training.distill import student_config

pytestmark = pytest.mark.usefixtures("compiled_well")

SMALL = SHAPES[0]._replace(layers=4)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("cpu:4", "nothing here compiles for 4 x cpu"),
        ("v5p-8", "needs the topology of the 4 chips"),
        pytest.param("v5p:3x5x7", "it knows v5p:2x2x1", marks=needs_libtpu),
        pytest.param("v7x:2x2x1", "sees 8 devices in tpu7x:2x2x1", marks=needs_libtpu),
    ],
)
def test_what_nothing_compiles_for_is_refused_in_one_sentence(devices, said, capsys):
    assert command.main(["plan", "quickstart", "--devices", devices, "--verify"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("devices", "extra"), [("v5p:2x2x1", "rlhf_jax[pod]"), ("gpu:8:h100", "rlhf_jax[gpu-pod]")]
)
def test_without_the_compiler_it_is_said_what_to_install(devices, extra, monkeypatch, capsys):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert command.main(["plan", "quickstart", "--devices", devices, "--verify"]) == 2
    error = capsys.readouterr().err
    assert f"pip install '{extra}'" in error and error.count("\n") == 1


def test_a_chip_without_a_target_is_refused_with_those_that_have_one(monkeypatch, tmp_path, capsys):
    (tmp_path / "h100.textproto").touch()
    monkeypatch.setattr(topology, "TARGETS", tmp_path)
    assert command.main(["plan", "quickstart", "--devices", "gpu:2x8:a100", "--verify"]) == 2
    error = capsys.readouterr().err
    assert "has no target for a A100" in error and "name one of h100" in error
    assert error.count("\n") == 1


def test_more_nodes_than_devices_may_be_are_refused(capsys):
    assert command.main(["plan", "quickstart", "--devices", "gpu:200000x8:h100", "--verify"]) == 2
    error = capsys.readouterr().err
    assert "more than 1,048,576 devices" in error and error.count("\n") == 1


def test_every_gpu_that_is_known_has_a_target():
    targets = {path.stem: path.read_text() for path in topology.TARGETS.iterdir()}
    assert targets.keys() == GPUS.keys()
    for name, chip in GPUS.items():
        capability = re.search(r"capability \{ major: (\d+) minor: (\d)", targets[name])
        assert capability and float(".".join(capability.groups())) == chip.compute_capability
        said = dict(re.findall(r"(\w+): ([\d.]+)\n", targets[name]))
        assert float(said["memory_bandwidth"]) == pytest.approx(chip.memory_bandwidth, rel=0.01)
        assert float(said["device_memory_size"]) == pytest.approx(chip.gigabytes * 1e9, rel=0.08)


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("name", ["prefill", "round of 1 node"])
def test_programs_of_one_and_two_layers_tell_what_one_of_four_is_given_and_multiplies(name):
    calls = placed_calls(SMALL.model, jax.devices(), SMALL.rows, SMALL.tokens)
    (program,) = (one for one in programs_of(calls) if one.compiled_layers and one.name == name)
    found = {}
    for depth in (1, 2, 4):
        traced = program.trace(depth)
        found[depth] = compile_figures(traced.lower(), program.flops(traced))
    whole = found[1].extended(found[2], 3)
    assert whole.arguments == found[4].arguments
    assert whole.flops == found[4].flops
    assert whole.flops > 2 * found[1].flops


def test_formulas_of_each_program_are_near_its_jaxpr():
    calls = placed_calls(SMALL.model, jax.devices(), SMALL.rows, SMALL.tokens)
    counted = 0
    for program in programs_of(calls):
        flops = program.flops(program.trace(program.depth))
        assert abs(program.predicted.flops - flops) <= 0.1 * flops, program.name
        counted += flops > 0
    assert counted >= 5


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
def test_programs_of_a_student_that_drafts_and_learns_are_foreseen():
    calls = placed_calls(SMALL.model, jax.devices(), SMALL.rows, SMALL.tokens)
    calls.config.drafter.update(layers=2, learning_rate=1e-3, samples=4 * SMALL.rows)
    calls.config.generation.strategy = "model-chain-2"
    student = student_config(SMALL.model, 2)
    calls = dataclasses.replace(calls, models=calls.models._replace(drafter=student))
    found = {one.name: one for one in programs_of(calls)}
    names = ("catching up", "drafts of 3 nodes", "student's text", "student's gradient")
    for name in (*names, "student's step"):
        program = found[name]
        traced = program.trace(program.depth)
        compiled = compile_figures(traced.lower(), program.flops(traced))
        foreseen = program.predicted
        assert foreseen.flops == pytest.approx(compiled.flops, rel=0.01), name
        assert foreseen.received == pytest.approx(compiled.received, rel=0.01, abs=3e4), name
        assert foreseen.bytes == pytest.approx(compiled.bytes, rel=0.25), name


def test_figures_are_kept_by_the_programs_text(tmp_path):
    calls = placed_calls(SMALL.model, jax.devices(), SMALL.rows, SMALL.tokens)
    program = next(one for one in programs_of(calls) if one.name == "scores")

    def figures(compiler_name: str = "one") -> tuple[CompilerFigures, int, int]:
        compiler = CachingCompiler(compiler_name, tmp_path, lambda line: None)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            twice = [compiler.submit(pool, program, 4) for _ in range(2)]
        assert twice[0] is twice[1]
        return twice[0].result(), compiler.compiled, compiler.kept

    first, *counts = figures()
    assert counts == [1, 0] and first.arguments > 0
    assert figures() == (first, 0, 1)
    (path,) = tmp_path.glob("*.json")
    path.write_text("{")
    assert figures()[1:] == (1, 0)
    assert figures("another")[1:] == (1, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a chip's figures in JSON"),
        ("{}", "has no map `chip`"),
        ('{"chip": {"speed": 1}}', "has 'speed', which is no figure"),
        ('{"chip": {"flops": -1}}', "has flops = -1; give a positive number"),
        ('{"chip": {"flops": 1e12}}', "lacks gigabytes, memory_bandwidth"),
    ],
)
def test_a_file_without_a_chips_figures_is_refused(tmp_path, text, said, capsys):
    path = tmp_path / "chip.json"
    path.write_text(text)
    words = ["plan", "quickstart", "--devices", "cpu:4", "--chip", str(path)]
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_measured_figures_stand_in_for_the_tables(tmp_path, capsys):
    path = tmp_path / "chip.json"
    words = ["plan", "grpo_llama31_8b:gpu", "--devices", "gpu:8:h100"]
    seconds = []
    for figures in ({}, {"flops": 989e11, "efficiency": {"decoding": 0.35}}):
        path.write_text(json.dumps({"chip": figures}))
        assert command.main([*words, "--chip", str(path)]) == 0
        said = capsys.readouterr().out
        found = re.findall(r"([\d.]+) s  (generation|policy_training) ", said)
        seconds.append({call: float(number) for number, call in found})
    assert seconds[1]["policy_training"] > 5 * seconds[0]["policy_training"]
    assert seconds[1]["generation"] > 1.5 * seconds[0]["generation"]


CPU = {
    "gigabytes": 1.0,
    "flops": 4e11,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 1e9,
    "network_bandwidth": 1e9,
    "efficiency": {"training": 0.55, "inference": 0.7, "decoding": 2.0},
}


@pytest.mark.long
@pytest.mark.parametrize("shapes", [SHAPES[::3], SHAPES], ids=["two", "all"])
def test_calls_are_ranked_as_the_cpu_seconds_that_they_take(shapes):
    pairs = list(measured_pairs(jax.devices(), chip_of({"chip": CPU}), shapes))
    print(pairs)
    assert len(pairs) >= 4 * len(shapes)
    assert rank_correlation(pairs) >= 0.9


LARGE = {
    "model.path": "meta-llama/Llama-3.1-70B-Instruct",
    "critic.path": "meta-llama/Llama-3.1-8B-Instruct",
    "mesh.fsdp": -1,
}
FOUND = {"mesh.fsdp": -1, "training.minibatches": 1, "training.microbatch_rows": 64}
STAGES = {"mesh.slices": 4, "mesh.fsdp": 8, "mesh.tensor": 1, "training.pipelined": True}
WHOLE = [
    pytest.param(
        "ppo_llama31_8b:tpu",
        "v5p:4x4x4",
        FOUND | {"generation.max_rows": 64},
        "--search",
        marks=needs_libtpu,
    ),
    ("grpo_llama31_8b:gpu", "gpu:8:h100", {}, ""),
    ("grpo_llama31_8b:gpu", "gpu:2x8:h100", {"mesh.fsdp": -1}, ""),
    ("ppo_llama31_8b:gpu", "gpu:8:h100", {}, ""),
    ("ppo_llama31_8b:gpu", "gpu:2x8:h100", {"mesh.fsdp": -1}, ""),
    ("ppo_llama31_8b:gpu", "gpu:4x8:h100", STAGES | {"training.microbatch_rows": 8}, ""),
    ("grpo_gsm8k", "gpu:1:h100", {}, ""),
    ("grpo_llama32_1b", "gpu:1:h100", {}, ""),
    ("ppo_llama31_8b:gpu", "gpu:8x8:h100", LARGE | {"mesh.tensor": 8}, ""),
]


@pytest.mark.long
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("config", "devices", "changes", "search"), WHOLE)
def test_the_memory_of_a_whole_config_is_foreseen(
    config, devices, changes, search, capsys, tmp_path
):
    if devices.startswith("gpu") and not cuda_plugin():
        pytest.skip("compiling for GPUs needs the extra `gpu-pod`")
    words = ["plan", config, "--devices", devices, "--verify", *filter(None, [search])]
    changes = changes | {"compilation_cache": str(tmp_path)}
    words += [f"--config.{key}={value}" for key, value in changes.items()]
    assert command.main(words) == 0
    said = capsys.readouterr().out
    print(said)
    assert "It fits, by the compiler's figures." in said
    memory = said.partition("a chip's GB")[2].partition("PFLOP  ")[0]
    pairs = re.findall(r"(\d+\.\d+) +(\d+\.\d+) +\d+\.\d+ *\n", memory)
    assert len(pairs) >= 8
    for compiled, foreseen in pairs:
        if float(compiled) >= 0.01:  # the table has three digits
            assert abs(float(foreseen) / float(compiled) - 1) <= 0.15, (compiled, foreseen)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("training", "generation"),
    [
        (dict(first=16, count=48, data=3, fsdp=16), dict(first=0, count=16, data=2, tensor=8)),
        (dict(first=0, count=16, fsdp=16), dict(first=16, count=48, data=3, tensor=16)),
        (dict(first=0, count=64, fsdp=64), dict(first=0, count=16, data=2, tensor=8)),
    ],
)
def test_what_brings_a_layer_from_three_quarters_to_a_quarter_is_foreseen(training, generation):
    config = config_of()
    planned = plan_run(config, parse_hardware("v5p:4x4x4"))
    there = Placement(**training, dtype="bfloat16")
    placements = dict.fromkeys(planned.plan.placements, there)
    placements["generation"] = Placement(**generation, dtype="bfloat16")
    plan = Plan(planned.hardware.count, placements)
    chips = topology.topology_devices(planned.hardware)
    calls = PlacedCalls(config, planned.models, plan, chips, planned.hardware, remat=True)
    found = list(arrivals(calls))
    assert {one.name for one in found} == {"a layer comes", "a layer is recut"}
    for program in found:
        needed = compile_figures(program.trace(program.depth).lower(), 0.0).bytes
        assert abs(program.predicted.bytes / needed - 1) <= 0.15, program.name
