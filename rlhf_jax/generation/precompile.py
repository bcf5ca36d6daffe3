"""Compile the programs of decoding before they are needed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation import rows as row_verbs
from rlhf_jax.generation import scheduler
from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.round import ModelPair, run_round, speculative_round
from rlhf_jax.mesh import ONE_DEVICE, Layout, place_rows
from rlhf_jax.runtime.compilation import Programs, compile_only, shapes, trace_only
from rlhf_jax.types import Model, Strategy

# Most nodes that a device verifies in one call under an adaptive strategy: their logits exist
# unless a kernel avoids it.
VERIFIED = 1024

RoundKey = tuple[Strategy, int, GenerationConfig, Layout]  # identifies a round's programs


def first_programs(
    models: ModelPair,
    samples: int,
    prompts: Sequence[int],
    decoding: GenerationConfig,
    layout: Layout = ONE_DEVICE,
    looks_back: bool = False,
) -> tuple[list[Callable[[], object]], Callable[[], Mapping[str, float]]]:
    """Return the jobs that compile the first programs of decoding, the earliest needed first.

    They are rounds of the first strategy for all row buckets of a slice, and the programs that
    begin and end rows. prompts: tokens of each. `looks_back` is for a selector, which needs
    hindsight on its drafters, and the `analysis` of a round with the most rows, which is returned,
    too.
    """
    begin = []
    shrink = []
    batches = scheduler.begin_slices(models, samples, decoding, layout=layout)
    for batch in batches:
        model_shapes = shapes(batch.models)
        sizes = [len(batch.rows)]
        row_bucket = functools.partial(scheduler.row_bucket, decoding=decoding, layout=batch.layout)
        while (fewer := row_bucket(sizes[-1] // 2, sizes[-1])) < sizes[-1]:
            sizes.append(fewer)
        whole = shapes(batch.state)
        states = [whole, *(_of_rows(whole, rows, batch.layout) for rows in sizes[1:])]
        rounds = [
            functools.partial(
                speculative_round,
                compile_only,
                state,
                model_shapes,
                decoding.strategies[0],
                scheduler.sibling_rows([None] * rows, decoding),
                decoding,
                layout=batch.layout,
                looks_back=looks_back,
            )
            for rows, state in zip(sizes, states, strict=True)
        ]
        admission = functools.partial(
            _compile_admission, states[0], model_shapes, prompts, decoding, batch.layout
        )
        begin += [rounds[0], admission]
        shrink += rounds[1:]
        for state, rows in zip(states, sizes[1:], strict=False):
            shrink.append(functools.partial(_compile_shrinking, state, rows, batch.layout))
    most = shapes(batches[0].state)
    analyse = functools.partial(analysis, most, batches[0].models[0], decoding, batches[0].layout)
    return begin + shrink, analyse


def _compile_admission(
    state: DecodeState,
    models: ModelPair,
    prompts: Sequence[int],
    decoding: GenerationConfig,
    layout: Layout,
) -> None:
    """Compile the beginning of rows: prompts of a given length are prefilled and admitted."""
    shape = scheduler.prefill_shape(prompts, decoding, layout)
    placed = place_rows((np.zeros(shape, np.int32), np.ones(shape[0], np.int32)), layout)
    prefix = compile_only(row_verbs.prefill, *models, *placed, layout=layout)
    admission = row_verbs.Admission(**row_verbs.no_admission(state, scheduler.ADMITTED))
    compile_only(row_verbs.admit, state, prefix, admission, layout=layout)
    _compile_write_history(state, layout)


def _of_rows(state: DecodeState, rows: int, layout: Layout) -> DecodeState:
    """Return shapes like those of a state, with another number of rows."""
    taken = row_verbs.resize(state, np.zeros(rows, np.int32), layout, trace_only)
    return jax.tree.map(lambda old, new: old.update(shape=new.shape), state, taken)


def _compile_shrinking(state: DecodeState, rows: int, layout: Layout) -> None:
    """Compile the reduction of a state to a number of rows, and its history updates."""
    kept = np.arange(rows, dtype=np.int32)
    _compile_write_history(row_verbs.resize(state, kept, layout, compile_only), layout)


def _compile_write_history(state: DecodeState, layout: Layout) -> None:
    """Compile the update of rows' histories with texts that have ended, if they have any."""
    if state.history.size:
        admission = row_verbs.no_admission(state, scheduler.ADMITTED)
        compile_only(
            row_verbs.overwrite,
            state.history,
            admission["row"],
            admission["history"],
            layout=layout,
        )


def analysis(
    state: DecodeState, target: Model, decoding: GenerationConfig, layout: Layout = ONE_DEVICE
) -> Mapping[str, float]:
    """Return XLA's cost analysis of a plain round of `state`: "flops", "bytes accessed" and more.

    It is empty if XLA provides none.
    """
    rows = len(state.done)
    lowered = run_round.lower(
        *shapes((target, state)),
        np.zeros((rows, 0), np.int32),
        None,
        trees.as_data(trees.PLAIN, rows),
        truncation=decoding.sampling.truncation,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        verified=0,
        layout=layout,
    )
    return lowered.compile().cost_analysis() or {}


class BackgroundCompiler:
    """Compile rounds before they are needed, one at a time, once nothing else is compiling."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self._compiled: set[RoundKey] = set()
        self._failed: set[RoundKey] = set()

    def ready(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
    ) -> bool:
        """Return whether a round can be dispatched without compiling.

        A plain one always can, as it begins every stage.
        """
        key = _round_key(strategy, rows, decoding, layout=layout)
        return not strategy.parents or key in self._compiled

    def failed(self, rows: int, decoding: GenerationConfig, layout: Layout) -> set[Strategy]:
        """Return the strategies whose rounds with this many rows failed to compile."""
        return {
            key[0]
            for key in tuple(self._failed)
            if key == _round_key(key[0], rows, decoding, layout=layout)
        }

    def can_submit(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
    ) -> bool:
        """Return whether a round needs compiling and may start now: nothing else is compiling."""
        key = _round_key(strategy, rows, decoding, layout=layout)
        known = not strategy.parents or key in self._compiled or key in self._failed
        return not self.programs.left and not known

    def submit(
        self,
        strategy: Strategy,
        rows: int,
        state: DecodeState,
        models: ModelPair,
        siblings: np.ndarray,
        decoding: GenerationConfig,
        layout: Layout,
    ) -> None:
        """Submit a round for compilation, for a state like `state` with this many rows."""
        key = _round_key(strategy, rows, decoding, layout=layout)
        whole = shapes(state)  # `state` may be donated by the time the thread begins
        compile_round = functools.partial(
            speculative_round,
            compile_only,
            models=shapes(models),
            strategy=strategy,
            siblings=np.full((rows, siblings.shape[1]), -1, np.int32),
            decoding=decoding,
            layout=layout,
            looks_back=True,
        )

        def compile_on_thread() -> None:
            try:
                compile_round(state=_of_rows(whole, rows, layout))
                self._compiled.add(key)
            except Exception as error:
                # A strategy that cannot be compiled is not used; the run goes on.
                self._failed.add(key)
                warnings.warn(
                    f"A drafting strategy could not be compiled and is left out: {error}",
                    stacklevel=1,
                )

        self.programs.add(compile_on_thread)


def _round_key(
    strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
) -> RoundKey:
    """Return the key of a round's programs, without the parts that are data to them."""
    return strategy, rows, decoding.of_programs, layout
