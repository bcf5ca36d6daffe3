"""Decoding's products with weights that have their inputs first, or last: JSON, a line a number of
rows.

    python benchmarks/products.py --rows 1,2,4,8,16,32,64,128

Rows go through the two products of a feed-forward block, `--width` to `--ffn` and back, of 30
layers, whose weights fit no cache. The forms take turns; a time is the median of `--repeats`. It is
what `rlhf_jax.generation.decoding.INPUTS_LAST` was chosen by.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time

import jax
import jax.numpy as jnp

from rlhf_jax.models.weight import OutputFirst, product

LAYERS = 30


def main() -> None:
    """Time each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128", help="tokens of a step")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--ffn", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    keys = iter(jax.random.split(jax.random.key(0), 2 * LAYERS))
    shapes = ((options.width, options.ffn), (options.ffn, options.width)) * LAYERS
    weights = [jax.random.normal(next(keys), shape) * shape[0] ** -0.5 for shape in shapes]
    forms = {"first": weights, "last": [OutputFirst(weight.T) for weight in weights]}
    for rows in map(int, options.rows.split(",")):
        x = jnp.ones((rows, options.width))
        programs = {name: jax.jit(through).lower(x, form).compile() for name, form in forms.items()}
        times = {name: [] for name in forms}
        for turn in range(1 + options.repeats):
            for name, program in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(program(x, forms[name]))
                if turn:  # the first is not timed
                    times[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(found) for name, found in times.items()}
        line = {
            "rows": rows,
            "milliseconds": {name: round(1e3 * found, 2) for name, found in medians.items()},
            "first_over_last": round(medians["first"] / medians["last"], 3),
            "width": options.width,
            "ffn": options.ffn,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(line), flush=True)


def through(x: jax.Array, weights: list) -> jax.Array:
    """Multiply with one weight after the other."""
    for weight in weights:
        x = jnp.tanh(product(x, weight))
    return x


if __name__ == "__main__":
    main()
