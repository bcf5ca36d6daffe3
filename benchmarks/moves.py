"""What moving a row costs, against a plain copy of as many bytes and against the prefill that it
replaces: JSON.

    # between two devices of this process
    python benchmarks/moves.py --shape smollm2-135m
    # between two processes on this machine
    python benchmarks/moves.py --shape llama-8b --layers 2 --across

On two hosts, each with its own number: `--coordinator HOST:PORT --processes 2 --process 0` in place
of `--across`.

A move is `pack_rows`, `send` (or `send_to_process`) and `unpack_rows` as in a run, from a
dispatched state that is there, after all programs are compiled. The link's own time is that of one
flat array of as many bytes by the plainest means: `jax.device_put` between two devices of a
process, one `ppermute` between two processes. Both in turn, medians; a prefill once. On a CPU the
link is memory, or gloo over loopback, and the move's copies on its two devices count as much as the
link; on an accelerator's link they should not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax import mesh as meshes
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.config import command_line
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.mesh import Layout
from rlhf_jax.models.transformer import init, unstack
from rlhf_jax.runtime import distributed, joining, signing
from rlhf_jax.types import ModelConfig

# Neither a cache nor a prefill depends on the vocabulary.
SHAPES = {
    "smollm2-135m": ModelConfig("llama", 256, 576, 1536, 30, 9, 3, 64, 8192),
    "llama-8b": ModelConfig("llama", 256, 4096, 14336, 32, 32, 8, 128, 8192),
}
ROWS = 4  # of each slice
ROW = np.array([1], np.int32)


def main() -> None:
    """Print the document."""
    place, words = command_line.place(sys.argv)
    options = arguments(words[1:])
    if options.send_to_process:
        return both(words[1:])
    joining.start(place)
    if place.size == 1:
        jax.config.update("jax_num_cpu_devices", 2)
    if jax.device_count() < 2:
        raise SystemExit(
            "A move needs two devices; run it where there are two, or with JAX_PLATFORMS=cpu."
        )
    found = [measured(options, slots) for slots in map(int, options.slots.split(","))]
    device = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "processes": distributed.count(),
    }
    if distributed.rank() == distributed.count() - 1:
        print(json.dumps(vars(options) | device | {"moves": found}, indent=1))
    joining.leave(0, "", place)


def arguments(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument(
        "--layers", type=int, default=0, help="of the model, from the first; 0: all"
    )
    parser.add_argument(
        "--slots", default="256,1024,4096", help="valid token slots of the row, with commas"
    )
    parser.add_argument("--times", type=int, default=30, help="that each is measured")
    parser.add_argument(
        "--across", action="store_true", help="between two processes that are started here"
    )
    return parser.parse_args(given)


def both(words: list[str]) -> None:
    """Two instances of this program, which find each other; the second prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = [
            "--coordinator",
            f"localhost:{free.getsockname()[1]}",
            "--processes",
            "2",
            "--process",
        ]
    own = [sys.executable, __file__, *(word for word in words if word != "--across")]
    environment = os.environ | {signing.KEY: secrets.token_hex()}
    begun = [subprocess.Popen([*own, *where, str(rank)], env=environment) for rank in range(2)]
    sys.exit(max(process.wait() for process in begun))


def measured(options: argparse.Namespace, slots: int) -> dict[str, Any]:
    """The figures of a row with so many valid slots."""
    config = SHAPES[options.shape]
    config = dataclasses.replace(config, num_layers=options.layers or config.num_layers)
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    mesh = meshes.make_mesh(1, 1, 1, [jax.devices()[0], jax.devices()[-1]], slices=2)
    source, target = Layout(mesh, "generation", dtype=dtype).split()
    ways = send_to_process if distributed.count() > 1 else inside
    state = functools.partial(row_verbs.empty, config, None, ROWS, slots, 0, 0)
    move, plain, count = ways(state, slots, source, target)
    seconds: dict[str, list[float]] = {"move": [], "plain": []}
    for _ in range(options.times + 2):
        for name, act in (("move", move), ("plain", plain)):
            seconds[name].append(timed(act))
    took = {name: statistics.median(found[2:]) for name, found in seconds.items()}
    took["prefill"] = prefill(config, slots, target)
    return {
        "slots": slots,
        "layers": config.num_layers,
        "megabytes": round(count / 1e6, 2),
        **{f"{name}_ms": round(1e3 * found, 3) for name, found in took.items()},
        "plain_gigabytes_a_second": round(count / took["plain"] / 1e9, 2),
        "move_to_plain": round(took["move"] / took["plain"], 3),
        "move_to_prefill": round(took["move"] / took["prefill"], 4),
    }


def timed(act: Callable[[], Any]) -> float:
    """Seconds until the result of an act is ready; all processes begin together."""
    distributed.gather(None)
    began = time.perf_counter()
    jax.block_until_ready(act())
    return time.perf_counter() - began


def inside(state: Callable[..., DecodeState], slots: int, source: Layout, target: Layout):
    """(a move, the plain copy, bytes) between two devices of this process."""
    here = state(source)
    there = [state(target)]
    count = row_transfer.pack_rows(here, ROW, slots, layout=source).nbytes
    flat = jax.device_put(np.zeros(count, np.uint8), source.devices.flat[0])

    def move() -> DecodeState:
        packet = row_transfer.send(row_transfer.pack_rows(here, ROW, slots, layout=source), target)
        there[0] = row_transfer.unpack_rows(there[0], packet, ROW, layout=target)
        return there[0]

    return move, lambda: jax.device_put(flat, target.devices.flat[0]), count


def send_to_process(state: Callable[..., DecodeState], slots: int, source: Layout, target: Layout):
    """(a move, the plain copy, bytes) from this process to the other, or from there to here."""
    own = source if source.is_here else target
    mine = [state(own)]
    pair = Mesh(np.concatenate([source.devices, target.devices]), meshes.AXES)
    count = row_transfer.pack_rows(mine[0], ROW, slots, layout=own).nbytes
    spread = NamedSharding(pair, PartitionSpec("slices"))
    part = jax.device_put(np.zeros((1, count), np.uint8), own.devices.flat[0])
    flat = jax.make_array_from_single_device_arrays((2, count), spread, [part])
    step = functools.partial(jax.lax.ppermute, axis_name="slices", perm=[(0, 1)])
    plain = jax.jit(jax.shard_map(step, mesh=pair, in_specs=spread.spec, out_specs=spread.spec))

    def move() -> DecodeState | row_transfer.RowPacket:
        packet = row_transfer.pack_rows(mine[0], ROW, slots, layout=own)
        passed = row_transfer.send_to_process([packet], own, source, target)
        if own is target:
            mine[0] = row_transfer.unpack_rows(mine[0], passed, ROW, layout=own)
        return mine[0] if own is target else passed

    return move, lambda: plain(flat), count


def prefill(config: ModelConfig, slots: int, layout: Layout) -> float:
    """Seconds of the prefill of so many tokens, on the slice that a row would come to."""
    if not layout.is_here:
        return float("nan")
    with jax.default_device(layout.devices.flat[0]):
        model = unstack(init(jax.random.key(0), config, layout.dtype))
        tokens = jnp.ones((1, slots), jnp.int32)
        length = jnp.full((1,), slots, jnp.int32)
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            jax.block_until_ready(row_verbs.prefill(model, None, tokens, length))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
