r"""What the host does for a round of generation, in CPU seconds of the loop's thread: JSON.

    python benchmarks/host.py --slices 8 --rows 32 --tokens 200

Choosing, dispatching and landing a round of one slice, by `time.thread_time` between two rounds
that land. The rounds' programs take the arguments of the real ones, those of a model of `--layers`
layers, and do nothing: what is left is the host. "plain": nothing chooses; "adaptive": a selector
chooses among the drafts of look-up and replay. The samples' ends are drawn, so that rows are given
up and batches shrink as in a run. Median and 90th percentile over the rounds of `--repeats`
roll-outs, after one that compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import precompile, rounds
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import round as device_round
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.speculative.tree import PLAIN
from rlhf_jax.generation.strategy import candidates, cost
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.transformer import init
from rlhf_jax.runtime.compilation import Programs
from rlhf_jax.types import Emission, ModelConfig, ModelConfigs

PROMPT = 16  # tokens of every prompt
SAMPLES = 4  # of a prompt
DRAFTERS = ("lookup", "replay")


def main() -> None:
    """Print the document."""
    settings = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.slices)
    layout = Layout(make_mesh(1, 1, 1, jax.devices(), slices=settings.slices), "generation")
    config = ModelConfig("llama", 64, 8, 8, settings.layers, 1, 1, 8, 4096)
    target = decoding_weights(init(jax.random.key(0), config), layout)
    rounds.speculative_round = functools.partial(_without_work, device_round.speculative_round)
    # Background compilation finishes at once.
    precompile.speculative_round = lambda *arguments, **options: None
    document = vars(settings) | {"jax": jax.__version__, "thread_milliseconds": {}}
    for name in ("plain", "adaptive"):
        strategies = (PLAIN,) if name == "plain" else candidates.adaptive(DRAFTERS).strategies
        decoding = GenerationConfig(
            Sampling(1.0),
            strategies,
            (),
            settings.rows,
            PROMPT + settings.tokens,
            seed=0,
            history=0 if name == "plain" else 512,
            min_rows=8,
        )
        selector = compiler = None
        if name == "adaptive":
            costs = cost.prior_of_models(
                ModelConfigs(config), "cpu", 4, {}, settings.rows, settings.tokens
            )
            selector = Selector(candidates.adaptive(DRAFTERS), costs)
            compiler = BackgroundCompiler(Programs())
        each = []
        for repeat in range(settings.repeats + 1):
            wanted = requests(settings, name == "adaptive")
            times = roll_out(target, wanted, decoding, layout, selector, compiler)
            each += times if repeat else []
        document["thread_milliseconds"][name] = {
            "median": round(1e3 * float(np.median(each)), 3),
            "p90": round(1e3 * float(np.quantile(each, 0.9)), 3),
            "rounds": len(each),
        }
    print(json.dumps(document, indent=1))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="of a slice")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of the longest response")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def requests(options: argparse.Namespace, replays: bool) -> list[Request]:
    """Prompts of as many samples as there are rows; a prompt's samples end together."""
    random = np.random.default_rng(0)
    wanted = []
    for first in range(0, options.slices * options.rows, SAMPLES):
        ids = tuple(range(first, first + SAMPLES))
        text = random.integers(0, 64, options.tokens).astype(np.int32)
        earlier = {one: text for one in ids} if replays else {}
        length = int(random.integers(options.tokens // 2, options.tokens + 1))
        prompt = random.integers(0, 64, PROMPT).astype(np.int32)
        wanted.append(Request(prompt, ids, length, (text,) if replays else (), earlier))
    return wanted


def roll_out(
    target, wanted, decoding: GenerationConfig, layout: Layout, selector, compiler
) -> list[float]:
    """Seconds of the loop's thread for each round of one roll-out."""
    clock = [time.thread_time()]

    def observe(report) -> None:
        clock.append(time.thread_time())

    for _ in generate(target, None, wanted, decoding, layout, observe, selector, compiler):
        pass
    return np.diff(clock).tolist()


# ---- rounds that do nothing


def _without_work(speculative_round, execute, *arguments, **options):
    """Run a round by programs that take the same arguments and do nothing."""
    return speculative_round(_idle, *arguments, **options)


def _idle(function, *arguments, **options):
    """Replace a jitted function by one that takes its arguments and does nothing.

    Only the joining of the results is real, for they must have the new tokens of samples.
    """
    if function is device_round.run_round:
        return _idle_round(*arguments, **options)
    if function.__name__ == "as_words":
        return function(*arguments, **options)
    fixed = tuple(None if _is_data(one) else one for one in arguments)
    data = [one for one in arguments if _is_data(one)]
    return _idle_program(function, fixed, tuple(options.items()))(*data)


def _is_data(argument: object) -> bool:
    return isinstance(argument, (jax.Array, np.ndarray, DecodeState))


@functools.cache
def _idle_program(function, fixed: tuple, options: tuple):
    """A program without work, that has a function's arguments and results."""

    def idle(*data):
        left = iter(data)
        arguments = [next(left) if one is None else one for one in fixed]
        found = function.eval_shape(*arguments, **dict(options))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found)

    return jax.jit(idle)


@functools.partial(
    jax.jit,
    static_argnames=("truncation", "stop_tokens", "rule", "verified", "layout"),
    donate_argnames=("state",),
    keep_unused=True,
)
def _idle_round(
    target, state: DecodeState, drafts, draft_logits, tree, **options
) -> tuple[DecodeState, Emission]:
    """Accept one draft if there is one: the state is passed on, but for its lengths."""
    rows, drafted = drafts.shape
    accepted = jnp.full(rows, min(drafted, 1), jnp.int32)
    count = jnp.where(state.done, 0, jnp.minimum(1 + accepted, state.limit - state.length))
    done = state.done | (state.length + count >= state.limit)
    path = jnp.broadcast_to(jnp.arange(drafted + 1, dtype=jnp.int32), (rows, drafted + 1))
    emission = Emission(
        tokens=path,
        logprobs=jnp.zeros(path.shape, jnp.float32),
        top_k_ids=None,
        count=count,
        accepted=jnp.minimum(accepted, count),
        path=path,
        done=done,
    )
    return dataclasses.replace(state, length=state.length + count, done=done), emission


if __name__ == "__main__":
    main()
