"""Samples that the data give: demonstrations, or pairs of a chosen and a rejected one."""

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
    """Give each step the samples of its rows; those of a row are a group."""

    stream: PromptStream
    given: list[list[Given]]  # of each prompt its samples
    labels: np.ndarray | None  # [prompts] 1 of a desirable sample and -1 of another, of one a row
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
        """Return the samples of the next rows, which are known."""
        rows, _ = self.stream.batches.take(host.position)
        return self._sequences(rows)

    def _sequences(self, rows: np.ndarray) -> Sequences:
        return sequences_of(self.stream.prompts, self.given, self.labels, rows, self.max_length)

    def _table(self, rows: np.ndarray) -> list[dict[str, str]]:
        """Return one row a sample, for people to read."""
        texts = self.stream.prompts.texts
        return [
            {"prompt": texts[row], "response": self.tokenizer.decode(sample.tokens)}
            for row in rows
            for sample in self.given[row]
        ]


def sequences_of(
    prompts: Prompts,
    given: list[list[Given]],
    labels: np.ndarray | None,
    rows: np.ndarray,
    max_length: int,
) -> Sequences:
    """Return the samples of some rows behind their prompts, those of a row as a group.

    Of pairs, `preference` is 1 for the chosen one, which is first, and -1 for the other. With
    labels [prompts] a row's sample has its own, and behind it stands the sample of the next row, of
    preference 0.
    """
    if labels is None:
        chosen = [(row, sample) for row in rows for sample in given[row]]
        signs = np.tile(np.array([1, -1], np.float32), len(rows))
    else:
        others = np.roll(rows, -1)
        pairs = zip(rows, others, strict=True)
        chosen = [(row, given[of][0]) for row, other in pairs for of in (row, other)]
        signs = np.stack([labels[rows], np.zeros(len(rows), np.float32)], axis=1).ravel()
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
    return batch if each == 1 else batch.with_columns(preference=signs)
