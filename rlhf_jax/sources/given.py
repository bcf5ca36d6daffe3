"""Samples from the data: demonstrations, or pairs of a chosen and a rejected one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from contextlib import AbstractContextManager

import numpy as np

from rlhf_jax.data.batches import PromptStream
from rlhf_jax.data.given import Given
from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sources.drawn import Drawn
from rlhf_jax.state import HostState, Observer, RunState


@dataclasses.dataclass(frozen=True)
class GivenSamples:
    """Provide the samples given in the rows of each step; those of a row are a group."""

    stream: PromptStream
    given: list[list[Given]]  # the samples of each prompt
    max_length: int  # tokens of the longest prompt and sample
    tokenizer: Tokenizer

    def draw(self, state: RunState, observe: Observer) -> AbstractContextManager[Drawn]:
        """Take the samples of the next rows."""
        del observe
        began = time.perf_counter()
        rows, position = self.stream.batches.take(state.host.position)
        batch = self._sequences(rows)
        metrics = {
            "response/length_mean": float(batch.mask.sum(axis=1).mean()),
            "data/epoch": position["position"] / position["count"],
        }
        host = state.host.after_draw(position)
        return contextlib.nullcontext(Drawn(batch, host, metrics, self._table(rows), began))

    def longest(self, host: HostState) -> Sequences:
        """Return the samples of the next rows, whose sizes are known."""
        rows, _ = self.stream.batches.take(host.position)
        return self._sequences(rows)

    def _sequences(self, rows: np.ndarray) -> Sequences:
        return sequences_of(self.stream.prompts, self.given, rows, self.max_length)

    def _table(self, rows: np.ndarray) -> list[dict[str, str]]:
        """Return one row per sample, for display."""
        texts = self.stream.prompts.texts
        return [
            {"prompt": texts[row], "response": self.tokenizer.decode(sample.tokens)}
            for row in rows
            for sample in self.given[row]
        ]


def sequences_of(
    prompts: Prompts, given: list[list[Given]], rows: np.ndarray, max_length: int
) -> Sequences:
    """Return the samples of some rows after their prompts, those of a row as a group.

    A row's one labelled sample is followed by that of the next row, with preference 0.
    """
    chosen = []
    for row, other in zip(rows, np.roll(rows, -1), strict=True):
        chosen += [(row, sample) for sample in given[row]]
        if len(given[row]) == 1 and given[row][0].preference:
            chosen.append((row, given[other][0]._replace(preference=0.0)))
    signs = np.array([sample.preference for _, sample in chosen], np.float32)
    each = len(chosen) // len(rows)
    tokens = np.zeros((len(chosen), max_length), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for place, (row, sample) in enumerate(chosen):
        start = len(prompts.tokens[row])
        end = start + len(sample.tokens)
        tokens[place, :start] = prompts.tokens[row]
        tokens[place, start:end] = sample.tokens
        mask[place, start:end] = sample.learned
    batch = Sequences(tokens, mask, np.repeat(np.arange(len(rows), dtype=np.int32), each))
    ids = np.repeat(rows, each) * each + np.tile(np.arange(each), len(rows))
    batch = batch.with_columns(sample_ids=ids.astype(np.uint32))
    margins = np.array([sample.margin for _, sample in chosen], np.float32)
    return batch if each == 1 else batch.with_columns(preference=signs, margin=margins)
