"""Run the device's part of a round, or compile it on a thread of its own before it is needed."""

from __future__ import annotations

import concurrent.futures
import functools
import warnings
from collections.abc import Mapping

import numpy as np

from rlhf_jax.generation.requests import GenerationConfig
from rlhf_jax.generation.speculative import tree as trees
from rlhf_jax.generation.speculative.round import ModelPair, run_round, speculative_round
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.runtime.compilation import compile_only, shapes
from rlhf_jax.types import DecodeState, Model, Strategy

# Nodes that a device verifies in one call at most, where a strategy is chosen: their logits exist,
# but for a kernel.
VERIFIED = 1024

RoundKey = tuple[Strategy, int, GenerationConfig, Layout]  # what a round's programs depend on


def analysis(
    state: DecodeState, target: Model, decoding: GenerationConfig, layout: Layout = ONE_DEVICE
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
        truncation=decoding.sampling.truncation,
        stop_tokens=decoding.stop_tokens,
        rule=decoding.acceptance,
        layout=layout,
    )
    return lowered.compile().cost_analysis() or {}


class BackgroundCompiler:
    """Compile rounds before they are needed, one at a time, on a thread of its own."""

    def __init__(self):
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "compiling")
        self._compiled: set[RoundKey] = set()
        self._failed: set[RoundKey] = set()
        # compilations begun and ended: equal at two times if there was none between
        self.events: int = 0
        self.busy: bool = False

    def ready(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
    ) -> bool:
        """Say whether a round can be dispatched without compiling.

        The plain one always can, for it begins every stage.
        """
        key = _round_key(strategy, rows, decoding, layout=layout)
        return not strategy.parents or key in self._compiled

    def failed(self, rows: int, decoding: GenerationConfig, layout: Layout) -> set[Strategy]:
        """Return the strategies whose rounds of so many rows could not be compiled."""
        return {
            key[0]
            for key in tuple(self._failed)
            if key == _round_key(key[0], rows, decoding, layout=layout)
        }

    def can_submit(
        self, strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
    ) -> bool:
        """Say whether a round is to be compiled, and may be now: nothing else is being compiled."""
        key = _round_key(strategy, rows, decoding, layout=layout)
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
        layout: Layout,
    ) -> None:
        """Have a round of so many rows compiled, for a state like `state` but for its rows."""
        key = _round_key(strategy, rows, decoding, layout=layout)
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
            layout=layout,
            looks_back=True,
        )

        def compile_on_thread() -> None:
            try:
                compile_round()
                self._compiled.add(key)
            except Exception as error:
                # A strategy that cannot be compiled is not used; the run goes on.
                self._failed.add(key)
                warnings.warn(
                    f"A drafting strategy could not be compiled and is left out: {error}",
                    stacklevel=1,
                )
            self.events += 1
            self.busy = False

        self._worker.submit(compile_on_thread)

    def close(self) -> None:
        """Compile nothing more.

        What is being compiled holds up the process's end, and nothing before it.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)


def _round_key(
    strategy: Strategy, rows: int, decoding: GenerationConfig, layout: Layout
) -> RoundKey:
    """Identify a round's programs: they do not depend on what is data to them."""
    return strategy, rows, decoding.of_programs, layout
