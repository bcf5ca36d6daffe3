"""The inference stage: score finished sequences by models, one column each."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import CHUNK, head_logprobs, head_values, tempered_states
from rlhf_jax.mesh import ONE_DEVICE, Layout, place_rows
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.packed import read_packed
from rlhf_jax.models.transformer import cast
from rlhf_jax.monitoring.parts import PhaseParts
from rlhf_jax.placement.plan import CallLayouts
from rlhf_jax.placement.transfer import fetched, is_in_place, transfer
from rlhf_jax.runtime import messages, to_host
from rlhf_jax.runtime.compilation import Execute, run_now, zeros
from rlhf_jax.sequences.batch import PackedSequences, Sequences
from rlhf_jax.sequences.columns import score_column
from rlhf_jax.sequences.packing import Extent, Packed, pack, padding_share, unpack
from rlhf_jax.types import Model, Models

READ = ("top_k_ids", "temperatures")  # the columns that scoring reads


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
    """Hold the settings of scoring; constant from step to step."""

    # layout of each scoring role
    layouts: Mapping[str, Layout]
    # the sampling temperature
    temperature: float
    # the largest batch to score
    extent: Extent

    @classmethod
    def from_config(cls, config: Config, layouts: CallLayouts) -> ScoringSettings:
        """Build the settings of scoring."""
        return cls(
            {role: layouts[f"{role}_inference"] for role in derived.scorers(config)},
            derived.temperature(config),
            Extent(
                derived.microbatch_rows(config),
                derived.batch_tokens(config),
                derived.group_tokens(config),
                config.data.max_prompt_tokens,
            ),
        )

    def models_of(self, models: Models, frozen: Mapping[str, Model]) -> dict[str, Model]:
        """Return the scoring models by role, trained or frozen."""
        there = {**frozen, **{role: one.weights for role, one in models.items()}}
        return {role: there[role] for role in self.layouts}


@messages.register
@dataclasses.dataclass(frozen=True)
class Scored:
    """Hold one sample's scores on the host."""

    columns: Mapping[str, np.ndarray]  # by name, [T] float32 each
    # By name, of the reward models that could read the sample.
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PendingScores:
    """Hold pending scores of sequences, and their places."""

    # packed sequences, and the columns of their scores, [S, W] each
    parts: list[tuple[Packed, dict[str, jax.Array]]]
    shape: tuple[int, ...]  # of the sequences' tokens
    columns: tuple[str, ...]  # all columns, even if there is nothing to score

    @property
    def padding(self) -> float:
        """Return the share of the tokens that are padding; 0 if no model reads them."""
        return padding_share([part for part, _ in self.parts])

    def fetch(self, read: Callable[[Any], Any] = to_host.fetch) -> dict[str, np.ndarray]:
        """Wait for the scores: of each column [B, T] float32, 0 off the mask.

        read: to the host; by default all processes take part.
        """
        on_host = read([scores for _, scores in self.parts])
        packed = [part for part, _ in self.parts]
        columns = {}
        for name in self.columns:
            pairs = zip(packed, on_host, strict=True)
            own = [(part, scores[name]) for part, scores in pairs if name in scores]
            columns[name] = unpack(own, self.shape)
        return columns


@functools.partial(jax.jit, static_argnames=("temperature", "chunk", "layout"))
def score_packed(
    model: Model,
    batch: PackedSequences,
    *,
    temperature: float,
    chunk: int = CHUNK,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Compute a model's scores of the predicted tokens of packed sequences: [S, W] float32.

    They are `token_logprobs`, within the top-k sets if there are any, or `head_values` for a scalar
    head; 0 where masked out.
    """
    hidden = read_packed(model, batch, layout)
    if model.config.scalar_head:
        return head_values(model, hidden, batch.mask)
    return head_logprobs(
        model,
        tempered_states(hidden, batch, temperature),
        batch.targets,
        batch.mask,
        top_k_ids=batch.columns.get("top_k_ids"),
        temperature=temperature,
        entropy=False,
        chunk=chunk,
        layout=layout,
    )[0]


def score_sequences(
    model: Model,
    batch: Sequences,
    *,
    rows: int,
    temperature: float = 1.0,
    layout: Layout = ONE_DEVICE,
) -> np.ndarray:
    """Compute the log-probabilities or values of the tokens under the mask: [B, T] float32.

    The result is a host array, 0 elsewhere. At most `rows` of the longest sequences go at a time:
    see `pack`. Order and shapes depend on the tokens alone, so the same tokens get the same scores,
    however they were generated.
    """
    pending = dispatch_scores({"policy": model}, batch.on_host(), temperature, Extent(rows), layout)
    (scores,) = pending.fetch().values()
    return scores


def score(
    batch: Sequences,
    models: Mapping[str, Model],
    settings: ScoringSettings,
    scored: Mapping[int, Scored] | None = None,
    observe: Callable[[PhaseParts], None] = lambda parts: None,
    execute: Execute = run_now,
) -> tuple[Sequences, float]:
    """Return host arrays with a column by each role's model, and the share of padding.

    Order and shapes follow from the tokens. Under top-k the reference, too, is renormalised on the
    sampled sets. `scored`, by sample id, are scores from idle slices during generation; only the
    rest is scored here. `observe` receives the parts of the work. `execute` calls jitted programs,
    or only compiles them: the models may then be shapes, and scores are 0.
    """
    scored = scored or {}
    ids = batch.columns["sample_ids"].tolist() if scored else range(len(batch.tokens))
    rest = [row for row, sample in enumerate(ids) if sample not in scored]
    observe(progress := PhaseParts(0))
    pending = _dispatch(batch.take(np.array(rest, int)), models, settings, progress, execute)
    progress.of = len(progress.handed)
    columns = {}
    for name, of_rest in pending.fetch(to_host.fetch if execute is run_now else zeros).items():
        whole = np.zeros(batch.mask.shape, np.float32)
        whole[rest] = of_rest
        for row, sample in enumerate(ids):
            if sample in scored:
                whole[row] = scored[sample].columns[name]
        columns[name] = whole
    return batch.with_columns(**columns), pending.padding


def _dispatch(
    batch: Sequences,
    models: Mapping[str, Model],
    settings: ScoringSettings,
    progress: PhaseParts,
    execute: Execute,
) -> PendingScores:
    """Start scoring by weights in inference's layouts, all models of a layout together."""
    brought: dict[Layout, dict[str, Model]] = {}
    for role, layout in settings.layouts.items():
        model = fetched(models[role])
        if not is_in_place(model, layout):
            model = transfer(model, layout, layout.dtype)
        elif not is_in_place(model, layout, layout.dtype):
            model = execute(_cast, model, layout.dtype)
        brought.setdefault(layout, {})[role] = model
    pending = [
        dispatch_scores(
            own, batch, settings.temperature, settings.extent, layout, execute, progress
        )
        for layout, own in brought.items()
    ]
    return PendingScores(
        [part for one in pending for part in one.parts],
        batch.mask.shape,
        tuple(name for one in pending for name in one.columns),
    )


def dispatch_scores(
    models: Mapping[str, Model],
    batch: Sequences,
    temperature: float,
    extent: Extent,
    layout: Layout,
    execute: Execute = run_now,
    progress: PhaseParts | None = None,
) -> PendingScores:
    """Start scoring the tokens under the mask of host arrays, without waiting.

    models: by role, each in the layout. `execute` calls jitted programs, or only compiles them.
    `progress` receives each pass.
    """
    columns = {role: score_column(role, model.config.scalar_head) for role, model in models.items()}
    parts = []
    if models:
        block = packed_block(layout)
        parts = pack(batch.reading(*READ), extent, block, layout.row_shards)
    pending = []
    for part in parts:
        placed = place_rows(part.batch, layout)
        scores = {}
        for role, model in models.items():
            began = time.perf_counter()
            result = execute(score_packed, model, placed, temperature=temperature, layout=layout)
            scores[columns[role]] = result
            if progress is not None:
                progress.hand(f"{role}_inference", began, result, part.batch)
        pending.append((part, scores))
    return PendingScores(pending, batch.mask.shape, tuple(columns.values()))


_cast = jax.jit(cast, static_argnums=1)
