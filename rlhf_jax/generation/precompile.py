"""The device's part of a round, dispatched or compiled ahead of its use."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.round import ModelPair as Models
from rlhf_jax.generation.speculative.round import Results, run_round, speculative_round
from rlhf_jax.types import DecodeState, Model, Strategy

# Nodes that a device verifies in one call at most, where a strategy is chosen: their logits exist,
# but for a kernel.
VERIFIED = 1024


def call(function: Callable[..., Any], *arguments, **options) -> Any:
    """Run a program: dispatch it, and wait for nothing."""
    return function(*arguments, **options)


def compile_only(function: Any, *arguments, **options) -> Any:
    """Compile a program for arguments given as shapes: what it would return, as shapes."""
    lowered = function.lower(*arguments, **options)
    places = lowered.compile().output_shardings
    # Results are held to a place only where arguments are: else another program would be compiled
    # for them.
    held = any(getattr(leaf, "sharding", None) is not None for leaf in jax.tree.leaves(arguments))

    def shape(info, place):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place if held else None)

    return jax.tree.map(shape, lowered.out_info, places)


def shapes(tree: Any) -> Any:
    """A tree of arrays as what `compile_only` wants: their shapes, where they lie if they are held
    there.
    """

    def shape(leaf):
        held = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=held)

    return jax.tree.map(shape, tree)


def shrunk(state: Any, rows: int) -> Any:
    """The shapes of a row-first tree with so many rows."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (rows, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding
        ),
        state,
    )


def dispatch(*round_of) -> tuple[DecodeState, Results]:
    """Start a round, as `speculative_round` has it, and the copy of its results to the host."""
    state, results = speculative_round(call, *round_of)
    for leaf in jax.tree.leaves(results):
        leaf.copy_to_host_async()
    return state, results


def analysis(
    state: DecodeState, target: Model, decoding: GenerationConfig, mesh=None
) -> Mapping[str, float]:
    """What XLA says that a plain round of `state` does: "flops", "bytes accessed" and more, or
    nothing.
    """
    rows = len(state.done)
    arguments = (
        shapes((target, state)),
        np.zeros((rows, 0), np.int32),
        None,
        trees.as_data(trees.PLAIN, rows),
    )
    (target, state), *rest = arguments
    options = dict(
        sampling=decoding.sampling,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        kernels=decoding.kernels,
        mesh=mesh,
    )
    return run_round.lower(target, state, *rest, **options).compile().cost_analysis() or {}


class BackgroundCompiler:
    """Compiles rounds before they are needed, one at a time, on a thread of its own."""

    def __init__(self):
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "compiling")
        self._compiled: set[tuple] = set()
        self._failed: set[tuple] = set()
        # compilations begun and ended: equal at two times if there was none between
        self.events = 0
        self.busy = False

    def ready(self, strategy: Strategy, rows: int, decoding: GenerationConfig, mesh) -> bool:
        """Whether a round can be played without compiling; the plain one always can, for it begins
        every stage.
        """
        return not strategy.parents or _key(strategy, rows, decoding, mesh) in self._compiled

    def failed(self, rows: int, decoding: GenerationConfig, mesh) -> set[Strategy]:
        """The strategies whose rounds could not be compiled."""
        return {key[0] for key in tuple(self._failed) if key == _key(key[0], rows, decoding, mesh)}

    def may(self, strategy: Strategy, rows: int, decoding: GenerationConfig, mesh) -> bool:
        """Whether a round is to be compiled now; while another is being so, ask again."""
        known = self.ready(strategy, rows, decoding, mesh) or strategy in self.failed(
            rows, decoding, mesh
        )
        return not self.busy and not known

    def want(
        self,
        state,
        models: Models,
        strategy: Strategy,
        rows: int,
        siblings,
        decoding: GenerationConfig,
        mesh,
    ) -> None:
        """Have a round of so many rows compiled, after those that were asked for before."""
        key = _key(strategy, rows, decoding, mesh)
        self.events = self.events + 1
        self.busy = True
        rowless = np.full((rows, siblings.shape[1]), -1, np.int32)
        arguments = (
            shrunk(shapes(state), rows),
            shapes(models),
            strategy,
            rowless,
            decoding,
            mesh,
            True,
        )
        self._worker.submit(
            self._compile, key, functools.partial(speculative_round, compile_only, *arguments)
        )

    def _compile(self, key: tuple, job: Callable[[], Any]) -> None:
        try:
            job()
            self._compiled.add(key)
        except Exception as error:
            # A strategy that cannot be compiled is not used; the run goes on.
            self._failed.add(key)
            warnings.warn(
                f"A drafting strategy could not be compiled and is left out: {error}", stacklevel=1
            )
        self.events += 1
        self.busy = False

    def close(self) -> None:
        """Compile nothing more; what is being compiled holds up the process's end, and nothing
        before it.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)


def _key(
    strategy: Strategy, rows: int, decoding: GenerationConfig, mesh
) -> tuple[Strategy, int, GenerationConfig, Any]:
    return strategy, rows, dataclasses.replace(decoding, seed=0), mesh
