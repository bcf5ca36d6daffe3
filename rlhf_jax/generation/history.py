"""From finished samples to arrays, and what later roll-outs may look up."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rlhf_jax.generation.requests import Request, RoundReport, Sample
from rlhf_jax.runtime import messages
from rlhf_jax.types import Rollout


def as_rollout(samples: Sequence[Sample], slots: int) -> Rollout:
    """Host arrays [B, slots] of samples, in the order given."""
    shape = (len(samples), slots)
    tokens = np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    kept = [sample.support for sample in samples]
    support = np.full((*shape, len(kept[0][0])), -1, np.int32) if kept and kept[0] else None
    for row, sample in enumerate(samples):
        start = len(sample.prompt)
        end = len(sample.prompt) + len(sample.tokens)
        tokens[row, :start] = sample.prompt
        tokens[row, start:end] = sample.tokens
        mask[row, start:end] = True
        logprobs[row, start:end] = sample.logprobs
        if support is not None:
            support[row, start:end] = sample.support
    length = np.array([len(s.prompt) + len(s.tokens) for s in samples], np.int32)
    return Rollout(
        tokens, mask, logprobs, length, np.array([s.sample_id for s in samples], np.uint32), support
    )


@messages.register
@dataclasses.dataclass
class GenerationCounts:
    """Counts of one generation stage; `add` is what `generate` observes with."""

    rounds: int = 0
    row_slots: int = 0  # rows decoded, idle ones included
    live: int = 0  # rows that gained tokens
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    moves: int = 0  # of samples between slices
    moved_bytes: int = 0

    def add(self, report: RoundReport) -> None:
        """Count one round; a round that nobody took part in is not one."""
        self.rounds += report.live > 0
        self.row_slots += report.rows
        self.live += report.live
        self.tokens += report.tokens
        self.drafted += report.drafted
        self.accepted += report.accepted
        self.moves += report.moves
        self.moved_bytes += report.moved_bytes

    def __add__(self, other: GenerationCounts) -> GenerationCounts:
        counts = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return GenerationCounts(*(own + more for own, more in counts))

    def metrics(self, seconds: float) -> dict[str, float]:
        """The stage's figures by name; `tokens_per_round` is a row's, so plain decoding has 1."""
        return {
            "generation/seconds": seconds,
            "generation/tokens": self.tokens,
            "generation/rounds": self.rounds,
            "generation/tokens_per_second": self.tokens / max(seconds, 1e-9),
            "generation/tokens_per_round": self.tokens / max(self.live, 1),
            "generation/acceptance": self.accepted / max(self.drafted, 1),
            "generation/occupancy": self.live / max(self.row_slots, 1),
            "generation/moves": self.moves,
            "generation/moved_bytes": self.moved_bytes,
        }


class History:
    """The latest responses to each prompt, by the prompt's tokens, up to `size` tokens each with
    separators.

    Each keeps the id of its sample, and with it the noise that it was drawn with.
    """

    def __init__(self, size: int):
        self._size = size
        self._texts: dict[bytes, collections.deque[tuple[int, np.ndarray]]] = {}

    def of(self, prompt: np.ndarray) -> dict[int, np.ndarray]:
        """Earlier responses to `prompt` by sample id, the latest last."""
        return dict(self._texts.get(prompt.tobytes(), ()))

    def add(self, samples: Iterable[Sample]) -> None:
        """Remember finished samples, the latest text of an id only, and forget what no longer
        fits.
        """
        for sample in samples if self._size else ():
            known = self._texts.get(sample.prompt.tobytes(), ())
            texts = collections.deque(kept for kept in known if kept[0] != sample.sample_id)
            texts.append((sample.sample_id, np.array(sample.tokens, np.int32)))
            while len(texts) > 1 and sum(len(text) + 1 for _, text in texts) > self._size:
                texts.popleft()
            self._texts[sample.prompt.tobytes()] = texts

    def state(self) -> dict[str, np.ndarray]:
        """All of it as arrays for a checkpoint: every prompt and its texts in a row, the length and
        id of each.
        """
        runs = []
        counts = []
        ids = []
        for prompt, texts in self._texts.items():
            runs += [np.frombuffer(prompt, np.int32), *(text for _, text in texts)]
            ids += [sample_id for sample_id, _ in texts]
            counts.append(len(texts))
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *runs]).astype(np.int32),
            "lengths": np.array([len(run) for run in runs], np.int32),
            "texts": np.array(counts, np.int32),
            "ids": np.array(ids, np.int64),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Goes on where `state` was taken."""
        ends = np.cumsum(np.asarray(state["lengths"], np.int64))
        runs = iter(np.split(np.asarray(state["tokens"], np.int32), ends)[:-1])
        ids = iter(np.asarray(state["ids"]).tolist())
        self._texts = {}
        for count in state["texts"]:
            prompt = next(runs).tobytes()
            self._texts[prompt] = collections.deque(
                (next(ids), next(runs)) for _ in range(int(count))
            )


def requests(
    prompts: Sequence[np.ndarray],
    samples_per_prompt: int,
    max_new_tokens: int,
    first_id: int,
    history: History,
    repeated: int = 0,
    used: set[int] | None = None,
) -> list[Request]:
    """One request a prompt, with consecutive sample ids from `first_id`.

    Of each prompt's samples up to `repeated` take the ids of its latest responses, and so their
    noise: they can be replayed, and are no fresh draws. Ids in `used` are not taken again, and
    those taken are added to it.
    """
    asked = []
    used = set() if used is None else used
    for index, prompt in enumerate(prompts):
        texts = history.of(prompt)
        again = (
            [sample_id for sample_id in texts if sample_id not in used][-repeated:]
            if repeated
            else []
        )
        used |= set(again)
        fresh = range(
            first_id + index * samples_per_prompt + len(again),
            first_id + (index + 1) * samples_per_prompt,
        )
        asked.append(
            Request(prompt, (*again, *fresh), max_new_tokens, tuple(texts.values()), texts)
        )
    return asked
