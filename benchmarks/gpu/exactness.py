"""Part f: the costs of replayable draws, rejection and deterministic operations."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.contest import Run, run, spread
from benchmarks.gpu import passes
from benchmarks.gpu.decoding import figures
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import Sizes, decoding_case, layouts, random_model
from benchmarks.gpu.step import OURS
from rlhf_jax.generation.speculative.sampling import draw

NODES = (1, 9)
CALLS = 10  # in a row, so that the start of a call does not count
REPEATS = 5
STRATEGIES = ("plain", "lookup-chain-4")


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield the draw alone, rounds by both rules of acceptance, and deterministic passes."""
    name = sizes.compared[0]
    vocabulary = sizes.models[name].vocab_size
    for nodes in NODES:
        rows = sizes.decoding.samples
        measure = functools.partial(time_draws, rows, nodes, vocabulary)
        yield Case(f"draw: {rows} rows, {nodes} nodes", measure)
    yield Case(f"{name}: acceptance", functools.partial(time_acceptance, sizes, name))
    yield Case(f"{name}: deterministic", functools.partial(time_deterministic, sizes, name))


def time_draws(rows: int, nodes: int, vocabulary: int) -> dict[str, Any]:
    """Let the replayable draw and jax's categorical sampling take turns on the same logits."""
    logits = jax.random.normal(jax.random.key(0), (rows, nodes, vocabulary), jnp.float32)
    keys = jnp.arange(2 * rows * nodes, dtype=jnp.uint32).reshape(rows, nodes, 2)
    positions = jnp.zeros((rows, nodes), jnp.int32)

    def categorical(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw tokens and their log-probs, as generation needs both."""
        token = jax.random.categorical(jax.random.key(1), logits).astype(jnp.int32)
        law = jax.nn.log_softmax(logits)
        return token, jnp.take_along_axis(law, token[..., None], axis=-1)

    contenders: dict[str, Callable] = {
        "replayable": jax.jit(lambda logits: draw(logits, keys, positions, 1.0)[:2]),
        "categorical": jax.jit(categorical),
        "greedy": jax.jit(lambda logits: jnp.argmax(logits, -1)),
    }
    for one in contenders.values():
        jax.block_until_ready(one(logits))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, name in itertools.product(range(REPEATS), contenders):
        seconds[name].append(seconds_of_calls(contenders[name], logits))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = median["replayable"] / median["categorical"]
    return {"vocabulary": vocabulary, "seconds": median, "of_categorical": ratio}


def seconds_of_calls(function: Callable, argument: jax.Array) -> float:
    """Return the seconds of a call, of several in a row."""
    began = time.perf_counter()
    jax.block_until_ready([function(argument) for _ in range(CALLS)])
    return (time.perf_counter() - began) / CALLS


def time_acceptance(sizes: Sizes, name: str) -> dict[str, Any]:
    """Let replayable acceptance and rejection take turns, plainly and with drafts.

    Drafts of random text are nearly all refused by both rules, so that rounds are alike.
    """
    config = sizes.models[name]
    model = random_model(config)
    layout = layouts(config)[0]["reference"]
    contenders = {
        f"{strategy}, {rule}": decoding_case(
            model, sizes.decoding, layout, strategy, acceptance=rule
        )
        for strategy, rule in itertools.product(STRATEGIES, ("replayable", "rejection"))
    }
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for case in contenders.values():
        run(case)
    for _, contender in itertools.product(range(sizes.decoding.repeats), contenders):
        runs[contender].append(run(contenders[contender]))
    itemsize = model.norm.dtype.itemsize
    return {
        contender: figures(done, config, itemsize)
        | {"round_seconds": spread([one.seconds / len(one.reports) for one in done])}
        for contender, done in runs.items()
    }


def time_deterministic(sizes: Sizes, name: str) -> dict[str, Any]:
    """Time forward and backward passes with sums in one order, an option that XLA reads at its
    start."""
    config = sizes.models[name]
    ours = OURS | {
        "rows": sizes.microbatch_rows,
        "tokens": sizes.step.slots,
        "kernels": "reference",
        "programs": passes.programs_folder(),
    }
    workers = {"free": ours, "deterministic": ours | {"deterministic": True}}
    found = passes.take_turns(config, workers, repeats=5)
    seconds = {name: figures["seconds"]["median"] for name, figures in found.items()}
    return {"workers": found, "of_free": seconds["deterministic"] / seconds["free"]}
