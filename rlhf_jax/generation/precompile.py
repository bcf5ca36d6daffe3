"""The device's part of a round, dispatched or compiled ahead of its use."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

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

Models = tuple[Model, Model | None]
Run = Callable[..., Any]  # of a jitted function and its arguments


class Results(NamedTuple):
    """What a round leaves for the host."""

    emission: Emission
    confidence: Array | None  # [B] the draft model's class of its own draft
    spent: budget.BudgetShare | None  # of a packed round
    # of the drafters without a model, where somebody wants to know
    signals: dict[str, hindsight.Hindsight]


def call(function: Run, *arguments, **options) -> Any:
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


def speculative_round(
    run: Run,
    state: DecodeState,
    models: Models,
    strategy: Strategy,
    siblings: np.ndarray,
    decoding: GenerationConfig,
    mesh=None,
    look: bool = False,
    worth: np.ndarray | None = None,
) -> tuple[DecodeState, Results]:
    """One round by `strategy`: draft, verify and, if asked, look; `run` is `call` or
    `compile_only`.

    worth [CLASSES, N or more] float32 ranks the drafts of a packed round (`packed.allocate_budget`).
    """
    window = None
    laws = None
    confidence = None
    spent = None
    drafts = np.zeros((len(siblings), 0), np.int32)
    on = dict(kernels=decoding.kernels, mesh=mesh)
    if strategy.drafter == "lookup":
        drafts = run(lookup.propose, state, siblings, strategy, mesh=mesh)
    elif strategy.drafter == "replay":
        drafts, kind = run(replay.propose, state, strategy, mesh=mesh)
        if strategy.packed:
            worth = UNMEASURED if worth is None else worth
            drafts, spent = run(
                budget.allocate_budget, state, drafts, kind, worth, strategy.packed, mesh=mesh
            )
    elif strategy.drafter == "model":
        if len(decoding.strategies) > 1:
            state = run(model_drafter.catch_up, models[1], state, **on)
        options = dict(with_laws=decoding.acceptance == "rejection", **on)
        proposed = run(
            model_drafter.propose, models[1], state, strategy, decoding.sampling, **options
        )
        drafts, laws, window, confidence = proposed
    tree = trees.as_data(strategy, len(siblings))
    nodes = dict(verified=strategy.packed)
    state, emission = run(
        run_round, models[0], state, drafts, laws, tree, **_law(decoding), **nodes, **on
    )
    if window is not None:
        state = run(
            model_drafter.commit, state, window, emission.path, emission.count, strategy, **on
        )
    free = tuple(name for name in hindsight.FREE if look and decoding.uses_drafter(name))
    seen = run(hindsight.look, state, siblings, free, mesh=mesh) if free else {}
    results = Results(emission, confidence, spent, seen)
    if mesh is not None and mesh.is_multi_process:  # each of its hosts reads all rows
        results = run(meshes.repeat, results, mesh=mesh)
    return state, results


def dispatch(*round_of) -> tuple[DecodeState, Results]:
    """Start a round, in the terms of `speculative_round`, and the copy of its results to the host."""
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
    options = dict(kernels=decoding.kernels, mesh=mesh, **_law(decoding))
    return run_round.lower(target, state, *rest, **options).compile().cost_analysis() or {}


def _law(decoding: GenerationConfig) -> dict[str, Any]:
    return dict(
        sampling=decoding.sampling, stop_tokens=decoding.stop_tokens, rule=decoding.acceptance
    )


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
