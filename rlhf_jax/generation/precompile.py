"""Run the device's part of a round, or compile it on a thread of its own before it is needed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import budget
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.drafters import hindsight, lookup, replay
from rlhf_jax.generation.speculative.drafters import model as model_drafter
from rlhf_jax.generation.speculative.round import run_round
from rlhf_jax.generation.strategy.expected_gain import UNMEASURED
from rlhf_jax.types import Array, DecodeState, Emission, Model, Strategy

# Nodes that a device verifies in one call at most, where a strategy is chosen: their logits exist,
# but for a kernel.
VERIFIED = 1024

ModelPair = tuple[Model, Model | None]  # the target and the draft model
Execute = Callable[..., Any]  # of a jitted function and its arguments
RoundKey = tuple[Strategy, int, GenerationConfig, Mesh | None]  # what a round's programs depend on


class Results(NamedTuple):
    """Hold what a round leaves for the host."""

    emission: Emission
    confidence: Array | None  # [B] the draft model's class of its own draft
    spent: budget.BudgetShare | None  # of a packed round
    # Of the drafters without a model, where a selector wants to know.
    signals: dict[str, hindsight.Hindsight]


def call(function: Callable[..., Any], *arguments, **options) -> Any:
    """Run a program: dispatch it, and wait for nothing."""
    return function(*arguments, **options)


def compile_only(function: Any, *arguments, **options) -> Any:
    """Compile a jitted function for arguments given as shapes, and return its results as shapes."""
    lowered = function.lower(*arguments, **options)
    places = lowered.compile().output_shardings
    # Results are held to a place only where arguments are: else another program would be compiled
    # for them.
    held = any(getattr(leaf, "sharding", None) is not None for leaf in jax.tree.leaves(arguments))

    def shape(info, place):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place if held else None)

    return jax.tree.map(shape, lowered.out_info, places)


def shapes(tree: Any, rows: int | None = None) -> Any:
    """Return a tree of arrays as `compile_only` wants it: shapes, and where they lie if held there.

    rows: the length of axis 0 of every leaf, where it is to be another.
    """

    def shape(leaf):
        held = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
        size = leaf.shape if rows is None else (rows, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(size, leaf.dtype, sharding=held)

    return jax.tree.map(shape, tree)


def speculative_round(
    execute: Execute,
    state: DecodeState,
    models: ModelPair,
    strategy: Strategy,
    siblings: np.ndarray,
    decoding: GenerationConfig,
    mesh: Mesh | None = None,
    look: bool = False,
    expected_gain: np.ndarray | None = None,
) -> tuple[DecodeState, Results]:
    """Draft and verify one round by `strategy`, and look back at the drafters if asked.

    `execute` is `call`, which gives up `state`, or `compile_only`, for a state and models of
    shapes. siblings [B, S] int32 are rows that lookups read; expected_gain [CLASSES, N or more]
    float32 ranks the drafts of a packed round (`budget.allocate_budget`).
    """
    window = None
    distributions = None
    confidence = None
    spent = None
    drafts = np.zeros((len(siblings), 0), np.int32)
    on = dict(kernels=decoding.kernels, mesh=mesh)

    if strategy.drafter == "lookup":
        drafts = execute(lookup.propose, state, siblings, strategy, mesh=mesh)
    elif strategy.drafter == "replay":
        drafts, kind = execute(replay.propose, state, strategy, mesh=mesh)
        if strategy.packed:
            gain = UNMEASURED if expected_gain is None else expected_gain
            drafts, spent = execute(
                budget.allocate_budget, state, drafts, kind, gain, strategy.packed, mesh=mesh
            )
    elif strategy.drafter == "model":
        if len(decoding.strategies) > 1:
            state = execute(model_drafter.catch_up, models[1], state, **on)
        options = dict(with_laws=decoding.acceptance == "rejection", **on)
        drafts, distributions, window, confidence = execute(
            model_drafter.propose, models[1], state, strategy, decoding.sampling, **options
        )

    state, emission = execute(
        run_round,
        models[0],
        state,
        drafts,
        distributions,
        trees.as_data(strategy, len(siblings)),
        sampling=decoding.sampling,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        verified=strategy.packed,
        **on,
    )
    if window is not None:
        committed = (state, window, emission.path, emission.count)
        state = execute(model_drafter.commit, *committed, strategy, **on)

    free = tuple(name for name in hindsight.FREE if look and decoding.uses_drafter(name))
    signals = execute(hindsight.look, state, siblings, free, mesh=mesh) if free else {}
    results = Results(emission, confidence, spent, signals)
    if mesh is not None and mesh.is_multi_process:  # each of its hosts reads all rows
        results = execute(meshes.repeat, results, mesh=mesh)
    return state, results


def analysis(
    state: DecodeState, target: Model, decoding: GenerationConfig, mesh: Mesh | None = None
) -> Mapping[str, float]:
    """Return what XLA says that a plain round of `state` does: "flops", "bytes accessed" and more.

    Where XLA says nothing, it is empty.
    """
    rows = len(state.done)
    lowered = run_round.lower(
        *shapes((target, state)),
        np.zeros((rows, 0), np.int32),
        None,
        trees.as_data(trees.PLAIN, rows),
        sampling=decoding.sampling,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        kernels=decoding.kernels,
        mesh=mesh,
    )
    return lowered.compile().cost_analysis() or {}


class BackgroundCompiler:
    """Compile rounds before they are needed, one at a time, on a thread of its own."""

    def __init__(self):
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "compiling")
        self._compiled: set[RoundKey] = set()
        self._failed: set[RoundKey] = set()
        # compilations begun and ended: equal at two times if there was none between
        self.events = 0
        self.busy = False

    def ready(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, mesh: Mesh | None
    ) -> bool:
        """Say whether a round can be dispatched without compiling.

        The plain one always can, for it begins every stage.
        """
        key = _round_key(strategy, rows, decoding, mesh=mesh)
        return not strategy.parents or key in self._compiled

    def failed(self, rows: int, decoding: GenerationConfig, mesh: Mesh | None) -> set[Strategy]:
        """Return the strategies whose rounds of so many rows could not be compiled."""
        return {
            key[0]
            for key in tuple(self._failed)
            if key == _round_key(key[0], rows, decoding, mesh=mesh)
        }

    def can_submit(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, mesh: Mesh | None
    ) -> bool:
        """Say whether a round is to be compiled, and may be now: nothing else is being compiled."""
        key = _round_key(strategy, rows, decoding, mesh=mesh)
        known = not strategy.parents or key in self._compiled or key in self._failed
        return not self.busy and not known

    def submit(
        self,
        strategy: Strategy,
        rows: int,
        state: DecodeState,
        models: ModelPair,
        siblings: np.ndarray,
        decoding: GenerationConfig,
        mesh: Mesh | None,
    ) -> None:
        """Have a round of so many rows compiled, for a state like `state` but for its rows."""
        key = _round_key(strategy, rows, decoding, mesh=mesh)
        self.events = self.events + 1
        self.busy = True
        compile_round = functools.partial(
            speculative_round,
            compile_only,
            shapes(state, rows),
            shapes(models),
            strategy,
            np.full((rows, siblings.shape[1]), -1, np.int32),
            decoding,
            mesh=mesh,
            look=True,
        )
        self._worker.submit(self._compile, key, compile_round)

    def _compile(self, key: RoundKey, compile_round: Callable[[], Any]) -> None:
        try:
            compile_round()
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
        """Compile nothing more.

        What is being compiled holds up the process's end, and nothing before it.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)


def _round_key(
    strategy: Strategy, rows: int, decoding: GenerationConfig, mesh: Mesh | None
) -> RoundKey:
    """Identify a round's programs: they do not depend on the seed, which is data."""
    return strategy, rows, dataclasses.replace(decoding, seed=0), mesh
