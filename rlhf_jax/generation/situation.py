"""Describe the state of a slice to the selector, before a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_jax.generation import precompile
from rlhf_jax.generation.precompile import BackgroundCompiler
from rlhf_jax.generation.requests import GenerationConfig, Sample
from rlhf_jax.generation.scheduler import SliceBatch
from rlhf_jax.generation.speculative.protocol import drafter_of
from rlhf_jax.generation.strategy.acceptance import BANDS, CLASSES, bands
from rlhf_jax.generation.strategy.predict import Situation


def draft_lag(batch: SliceBatch) -> int:
    """Return the most tokens by which the draft model is behind in a sample.

    A round of its own in flight reads all that the samples in it have by now.
    """
    fed = set()
    if batch.in_flight:
        before = batch.in_flight[-1]
        if drafter_of(before.strategy).needs_model:
            fed = {sample.sample_id for sample in before.samples if sample is not None}
    return max(0 if sample.sample_id in fed else sample.unfed for sample in batch.live)


def situation_of(
    batch: SliceBatch,
    context: int,
    lag: int,
    drains: bool,
    decoding: GenerationConfig,
    compiler: BackgroundCompiler | None,
) -> Situation:
    """Describe the next round of the slice to the selector.

    context: total tokens of its samples. drains: the slice gets no further samples.
    """
    layout = batch.layout
    live = batch.live
    rows = len(batch.rows)

    # [D, CLASSES] samples by confidence, on each of several devices with separate budgets.
    by_device = {}
    for name in (one.name for one in decoding.drafters if one.packs and layout.row_shards > 1):
        kinds = [one.confidence.get(name, 0) if one else CLASSES for one in batch.rows]
        on_device = np.array(kinds).reshape(layout.row_shards, -1, 1)
        by_device[name] = (on_device == np.arange(CLASSES)).sum(axis=1)

    # Only of drafters by an earlier text, as their classes last: a text that has diverged from its
    # earlier one rarely returns to it.
    left = {}
    last = drains and not batch.queue and not batch.prefilled
    for name in (one.name for one in decoding.drafters if last and one.needs_earlier):
        tokens = []
        for sample in live:
            most = sample.request.max_new_tokens
            earlier = len(sample.request.earlier.get(sample.sample_id, ()))
            tokens.append(max(1, min(earlier or most, most) - len(sample.tokens)))
        left[name] = _sum_by_class(live, name, tokens)

    return Situation(
        rows=rows,
        live=len(live),
        context=context,
        lag=lag,
        classes={
            one.name: _sum_by_class(live, one.name, [1] * len(live)).astype(np.int64)
            for one in decoding.drafters
        },
        ready=lambda one: compiler is None or compiler.ready(one, rows, decoding, layout=layout),
        most_nodes=precompile.VERIFIED * layout.row_shards // rows,
        failed=compiler.failed(rows, decoding, layout) if compiler else (),
        left=left,
        slice=batch.number,
        by_device=by_device,
        bands=np.bincount(bands(np.array([len(one.tokens) for one in live])), minlength=BANDS),
    )


def _sum_by_class(samples: Sequence[Sample], drafter: str, figures: list[int]) -> np.ndarray:
    """Sum figures of samples by whether the prompt was seen, and by confidence: [2, CLASSES]."""
    cells = [CLASSES * one.seen_prompt + one.confidence.get(drafter, 0) for one in samples]
    return np.bincount(cells, figures, 2 * CLASSES).reshape(2, CLASSES)
