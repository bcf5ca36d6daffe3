"""What compilers for TPUs and GPUs say of each kernel and of a whole round, for chips that are not
here. One JSON line a case.

    pip install -e ".[pod]" && python -m benchmarks.compiled > benchmarks/results/compiled.jsonl
    pip install -e ".[gpu-pod]" \\
      && python -m benchmarks.compiled --chips h100 > benchmarks/results/compiled_gpu.jsonl

The cases are those of `benchmarks/kernels.py`, by the reference and by the kernel, log-probs with
gradients too; then the round of a Llama-3 8B over eight chips, its first layers, without and with
all kernels. Bytes are one device's; of a loop the compiler counts the operations and moved bytes of
one turn. Received bytes are those of collectives, of all turns. Of a kernel for Hopper there are
registers, spilled bytes and shared memory of a thread block, of a round kernels and collectives a
layer. Nothing of this is a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks import kernels
from benchmarks.machine_code import compile_to_machine_code, launched
from benchmarks.shapes import SHAPES, SLOTS
from pallas_kernels import dispatch
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.shapes import Shape
from rlhf_jax import mesh as meshes
from rlhf_jax.generation import rows
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED
from rlhf_jax.mesh import Layout
from rlhf_jax.planner.hardware import parse_hardware
from rlhf_jax.planner.search.collectives import find_collectives
from rlhf_jax.planner.shapes import model_shapes, row_shapes
from rlhf_jax.planner.topology import compiler_version, topology_devices
from rlhf_jax.types import ModelConfig

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
EVERY = CHIPS | {"h100": "gpu:1:h100"}
EIGHT = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "h100": "gpu:8:h100"}  # of them
KERNELS = Kernels(tree_attention="tpu", verify_head="tpu", commit="tpu", logprobs="tpu")
GPU_KERNELS = Kernels(tree_attention="gpu", verify_head="gpu", commit="gpu", logprobs="gpu")
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192)


def main() -> None:
    """Print one JSON line a case."""
    for case in measure(arguments()):
        print(json.dumps(case), flush=True)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chips", default=",".join(CHIPS), help=f"some of {', '.join(EVERY)}, with commas"
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of benchmarks/shapes.py")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4, help="of the round's model; 0: no round")
    options = parser.parse_args(line)
    options.chips, options.shapes = options.chips.split(","), options.shapes.split(",")
    return options


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """The requested cases."""
    where = {
        "date": datetime.date.today().isoformat(),
        "rows": options.rows,
        "nodes": options.nodes,
    }
    for chip, name, kernel in itertools.product(options.chips, options.shapes, kernels.PROBLEMS):
        for how, program in programs(kernel, SHAPES[name], options.rows, options.nodes, one(chip)):
            case = {"what": kernel, "how": how, "shape": name, "topology": EVERY[chip]}
            yield case | figures(program) | where | versions(chip)
    for chip in options.chips if options.layers else ():
        for how, chosen in contenders(one(chip)):
            lower = functools.partial(
                lower_round, EIGHT[chip], chosen=chosen, row_count=options.rows, nodes=options.nodes
            )
            program = lower(options.layers)
            case = {"what": "round", "how": how, "shape": "llama3_8b", "layers": options.layers}
            if chip == "h100":
                fewer = lower(options.layers - 1)
                deep, shallow = (compile_to_machine_code(each)[0] for each in (program, fewer))
                counts = launched(deep).counts - launched(shallow).counts
                case |= {"of_a_layer": dict(counts)}
            yield case | {"topology": EIGHT[chip]} | figures(program) | where | versions(chip)


def versions(chip: str) -> dict[str, str]:
    """What compiled for a chip."""
    return {"compiler": compiler_version("gpu" if chip == "h100" else "tpu")}


def contenders(place: SingleDeviceSharding) -> list[tuple[str, Kernels]]:
    """The reference, and the kernels of the platform that a place is of."""
    (device,) = place.device_set
    return [
        ("reference", REFERENCE),
        ("pallas", GPU_KERNELS if device.platform == "gpu" else KERNELS),
    ]


def figures(lowered: Any) -> dict[str, Any]:
    """The compiler's own figures of one device, or why there are none, such as too little
    memory.
    """
    try:
        compiled, code = compile_to_machine_code(lowered)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).partition("\n")[0]}
    memory: Any = compiled.memory_analysis()
    text = str(compiled.as_text())
    cost = compiled.cost_analysis() or {}  # a GPU's says nothing without one
    sizes = {
        f"{part}_bytes": getattr(memory, f"{part}_size_in_bytes")
        for part in ("argument", "alias", "temp")
    }
    peak = memory.peak_memory_in_bytes
    moved = cost.get("bytes accessed")
    if moved is None and " while(" not in text:
        moved = launched(compiled).moved
    received = sum(one.received for one in find_collectives(text))
    figures = {"moved_bytes": moved, "received_bytes": received, "flops": cost.get("flops")}
    return sizes | {"peak_bytes": peak} | figures | ({"kernels": code} if code else {})


def programs(
    kernel: str, shape: Shape, row_count: int, nodes: int, place: Any
) -> Iterator[tuple[str, Any]]:
    """(name, lowered program) of the reference and of the kernel at one shape."""
    problem = abstract(
        functools.partial(
            kernels.PROBLEMS[kernel], shape, row_count, nodes, SLOTS, jnp.dtype("bfloat16")
        )
    )
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), problem.inputs
    )
    donated = (0,) if problem.in_place else ()
    for how, chosen in contenders(place):
        run = functools.partial(dispatch.implementation(kernel, chosen), **problem.options)
        yield how, jax.jit(run, donate_argnums=donated).lower(*inputs)
        if kernel == "logprobs":
            yield f"{how}, gradients", jax.jit(_gradients(run)).lower(*inputs)


def _gradients(law: Callable) -> Callable:
    """Of both outputs' sum, by hidden states and head."""
    return jax.grad(lambda *inputs: sum(part.sum() for part in law(*inputs)), argnums=(0, 1))


def abstract(make: Callable[[], kernels.Problem]) -> kernels.Problem:
    """A problem whose inputs are shapes."""
    made = []

    def inputs() -> tuple:
        made.append(make())
        return made[0].inputs

    shapes = jax.eval_shape(inputs)
    return made[0]._replace(inputs=shapes)


def devices(name: str) -> list:
    """The devices of a name such as v5p:2x2x1 or gpu:8:h100, the same ones each time."""
    return topology_devices(parse_hardware(name))


def one(chip: str) -> SingleDeviceSharding:
    """One chip, by a name of EVERY."""
    return SingleDeviceSharding(devices(EVERY[chip])[0])


def lower_round(topology: str, layers: int, chosen: Kernels, row_count: int, nodes: int) -> Any:
    """The round of the first layers of an 8B model, with heads and vocabulary split over the chips;
    2,048 slots.
    """
    chips = devices(topology)
    mesh = meshes.make_mesh(1, 1, len(chips), chips)
    layout = Layout(mesh, "generation", chosen, jnp.dtype(jnp.bfloat16))
    model = dataclasses.replace(LLAMA_8B, num_layers=layers)
    state = row_shapes(lambda: rows.empty(model, None, row_count, SLOTS, 0, 0, layout), layout)
    drafts = row_shapes(lambda: jnp.zeros((row_count, nodes - 1), jnp.int32), layout)
    chain = row_shapes(
        lambda: tree.as_data(tree.parse(f"lookup-chain-{nodes - 1}"), row_count), layout
    )
    return run_round.lower(
        model_shapes(model, layout),
        state,
        drafts,
        None,
        chain,
        truncation=UNTRUNCATED,
        stop_tokens=(0,),
        layout=layout,
    )


if __name__ == "__main__":
    main()
