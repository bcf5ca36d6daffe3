"""Describe the work of a round, and its time on a machine, as a roofline.

The roofline begins from work figures of the models and from rates of the platform; `cost` corrects
it by measured rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf_jax.models.flops import pair_flops, product_flops
from rlhf_jax.types import ModelConfig

CATCH_UP = 8  # The tokens of one draft-model call that only fills its cache.
FREE_LAG = 2  # The missing tokens that a draft's first call feeds anyway.

# Bytes and flops per second, seconds of a row and of a call: orders of magnitude, which `cost.fit`
# corrects.
RATES = {
    "cpu": (2e10, 1e11, 2e-4, 5e-4),
    "gpu": (1.5e12, 2.5e14, 2e-5, 1e-3),
    "tpu": (1.2e12, 2e14, 2e-5, 5e-4),
}

Figures = float | np.ndarray  # one figure, or [S] of S rounds


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """Hold the work of a model, independent of the machine."""

    weight_bytes: float  # read by a call
    context_bytes: float  # read by a call for each token of context
    token_flops: float  # of the matrix products, for each token fed
    context_flops: float  # of attention, for each token fed and token of context

    @classmethod
    def of(cls, model: ModelConfig, itemsize: int) -> ModelWork:
        """Return the necessary work of a call of a model, at `itemsize` bytes per number.

        Every weight but the embedding is read by a call, and multiplied with each token.
        """
        of_layers, _ = product_flops(model)
        weights = of_layers // 2 + model.width * model.vocab_size
        return cls(
            weight_bytes=weights * itemsize,
            context_bytes=2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize,
            token_flops=2 * weights,
            context_flops=pair_flops(model),
        )

    def times(self, more_bytes: float, more_flops: float) -> ModelWork:
        """Return the work with all bytes and all FLOPs multiplied by a factor each."""
        return ModelWork(
            weight_bytes=self.weight_bytes * more_bytes,
            context_bytes=self.context_bytes * more_bytes,
            token_flops=self.token_flops * more_flops,
            context_flops=self.context_flops * more_flops,
        )


class Call(NamedTuple):
    """Hold the work of a round."""

    nodes: int  # average tokens per row that the target verifies
    steps: int  # calls of the draft model before that, 0 without one
    fed: int  # total tokens per row fed to these
    grid: int  # tokens of a row that attention has room for: more than `nodes` in a packed round

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Return whether there are drafts, whether a model drafts, and whether it is packed."""
        nodes, steps, _, grid = self
        return nodes > 1, steps > 0, grid > nodes


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """Hold S calls: the figures of `Call`, [S] each, and what follows from them."""

    nodes: np.ndarray
    steps: np.ndarray
    fed: np.ndarray
    grid: np.ndarray

    @functools.cached_property
    def each(self) -> list[Call]:
        """Return the calls one by one."""
        figures = zip(self.nodes, self.steps, self.fed, self.grid, strict=True)
        return [Call(*map(int, one)) for one in figures]

    @functools.cached_property
    def kinds(self) -> list[tuple[bool, bool, bool]]:
        """Return each call's `Call.kind`."""
        return [call.kind for call in self.each]

    @functools.cached_property
    def verifies(self) -> np.ndarray:
        """Return [S] bool, whether the target is called at all."""
        return self.nodes > 0

    @functools.cached_property
    def looks_up(self) -> np.ndarray:
        """Return [S] bool, whether there are drafts that no model made."""
        return (self.nodes > 1) & (self.steps == 0)

    @functools.cached_property
    def by_model(self) -> np.ndarray:
        """Return [S] bool, whether a model drafts."""
        return self.steps > 0

    @functools.cached_property
    def fed_a_step(self) -> np.ndarray:
        """Return [S] tokens per row that each call of the draft model is fed."""
        return self.fed / np.maximum(self.steps, 1)


class Roofline(NamedTuple):
    """Hold the seconds of one call of a model over `nodes` tokens per row, each figure at least 0.

    max(read + read_context * context, compute * rows * nodes + compute_context * context * grid) +
    row * rows + call, where `context` is the sum over rows (the form of EfficientRollout).
    """

    read: float  # all weights, once
    read_context: float  # keys and values of one context token
    compute: float  # matrix products of one token
    compute_context: float  # attention of one token to one context token
    row: float  # fixed cost of a row
    call: float  # fixed cost of a call

    @classmethod
    def of_work(cls, work: ModelWork, platform: str) -> Roofline:
        """Return the roofline of a model's work at the platform's `RATES`."""
        return cls.of_rates(work, *RATES[platform])

    @classmethod
    def of_rates(
        cls, work: ModelWork, bandwidth: float, speed: float, row: float, call: float
    ) -> Roofline:
        """Return the roofline of a model's work at rates in the order of `RATES`."""
        return cls(
            read=work.weight_bytes / bandwidth,
            read_context=work.context_bytes / bandwidth,
            compute=work.token_flops / speed,
            compute_context=work.context_flops / speed,
            row=row,
            call=call,
        )

    def seconds(self, nodes: Figures, grid: Figures, rows: Figures, context: Figures) -> Figures:
        """Return the seconds of one call, or [S] of each of S calls."""
        reading = self.read + self.read_context * context
        computing = self.compute * rows * nodes + self.compute_context * context * grid
        return np.maximum(reading, computing) + (self.row * rows + self.call)

    def terms(
        self, nodes: Figures, grid: Figures, rows: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Return [6, n] the contribution of each parameter to the seconds of n calls."""
        once = np.ones_like(rows)
        reading = np.array([self.read * once, self.read_context * context])
        computing = np.array([self.compute * rows * nodes, self.compute_context * context * grid])
        by_memory = reading.sum(axis=0) >= computing.sum(axis=0)
        besides = [self.row * rows, self.call * once]
        return np.concatenate([reading * by_memory, computing * ~by_memory, besides])


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hold the parameters of a round's seconds."""

    target: Roofline
    drafter: Roofline | None  # of one draft-model call
    look: float  # seconds of drafting without a model

    @classmethod
    def of_figures(cls, figures: Sequence[float]) -> Machine:
        """Return the machine of 7 or 13 figures, in the order of `figures`."""
        drafter = Roofline(*figures[7:]) if figures[7:] else None
        return cls(Roofline(*figures[:6]), drafter, look=figures[6])

    def figures(self) -> list[float]:
        """Return all parameters: the target's, `look`, and the drafter's if there is one."""
        return [*self.target, self.look, *(self.drafter or ())]

    def seconds(
        self, calls: Calls, rows: Figures, context: Figures, draft_lag: Figures
    ) -> np.ndarray:
        """Return [S] seconds of a round of each of S calls.

        rows: of the program, idle ones included; context: known tokens summed over rows; draft_lag:
        the most tokens that the draft cache lacks in a row. Each is one figure or [S].
        """
        total = self.target.seconds(calls.nodes, calls.grid, rows, context) * calls.verifies
        total += self.look * calls.looks_up
        if self.drafter is not None:
            fed = calls.fed_a_step
            total += calls.steps * self.drafter.seconds(fed, fed, rows, context)
            if not isinstance(draft_lag, int) or draft_lag > FREE_LAG:
                missing = np.ceil(draft_lag / CATCH_UP) * (draft_lag > FREE_LAG) * calls.by_model
                total += missing * self.drafter.seconds(CATCH_UP, CATCH_UP, rows, context)
        return np.asarray(total)

    def terms(
        self, calls: Calls, rows: np.ndarray, context: np.ndarray, draft_lag: np.ndarray
    ) -> np.ndarray:
        """Return [13 or 7, n] the contribution of each parameter to the seconds of n rounds.

        Their sum is `seconds`. Seconds are linear in the parameters except for the max of the
        roofline, so a term over the sum is d log seconds / d log parameter.
        """
        target = self.target.terms(calls.nodes, calls.grid, rows, context)
        terms = [target * calls.verifies, (self.look * calls.looks_up)[None]]
        if self.drafter is not None:
            fed = calls.fed_a_step
            missing = np.ceil(draft_lag / CATCH_UP) * ((draft_lag > FREE_LAG) & calls.by_model)
            draft = calls.steps * self.drafter.terms(fed, fed, rows, context)
            terms.append(draft + missing * self.drafter.terms(CATCH_UP, CATCH_UP, rows, context))
        return np.concatenate(terms)
