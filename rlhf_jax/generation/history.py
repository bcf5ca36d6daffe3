"""Keep earlier responses, which later roll-outs of a prompt look up and replay."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlhf_jax.generation.requests import Request, Sample


class History:
    """Keep the latest responses to each prompt, up to `size` tokens each with separators.

    Each keeps the id of its sample, and with it the noise that it was drawn with.
    """

    def __init__(self, size: int):
        self._size = size
        # by the prompt's tokens: (sample id, text), the latest last
        self._texts: dict[bytes, collections.deque[tuple[int, np.ndarray]]] = {}

    def of(self, prompt: np.ndarray) -> dict[int, np.ndarray]:
        """Return earlier responses to `prompt` by sample id, the latest last."""
        return dict(self._texts.get(prompt.tobytes(), ()))

    def add(self, samples: Iterable[Sample]) -> None:
        """Remember finished samples, of an id the latest text, and forget what no longer fits."""
        for sample in samples if self._size else ():
            known = self._texts.get(sample.prompt.tobytes(), ())
            texts = collections.deque(kept for kept in known if kept[0] != sample.sample_id)
            texts.append((sample.sample_id, np.array(sample.tokens, np.int32)))
            while len(texts) > 1 and sum(len(text) + 1 for _, text in texts) > self._size:
                texts.popleft()
            self._texts[sample.prompt.tobytes()] = texts

    def with_samples(self, samples: Iterable[Sample]) -> History:
        """Return the history after finished samples; this one stays as it is."""
        after = History(self._size)
        after._texts = dict(self._texts)
        after.add(samples)
        return after

    def state(self) -> dict[str, np.ndarray]:
        """Return all of it as arrays for a checkpoint.

        "tokens" are every prompt and its texts in a row, "lengths" theirs, "texts" how many a
        prompt has, and "ids" the samples of the texts.
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

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on where `state` was taken."""
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
    """Make one request a prompt, with consecutive sample ids from `first_id`.

    Of each prompt's samples up to `repeated` take the ids of its latest responses, and so their
    noise: they can be replayed, and are no fresh draws. Ids in `used` are not taken again, and
    those taken are added to it.
    """
    asked = []
    used = set() if used is None else used
    for index, prompt in enumerate(prompts):
        texts = history.of(prompt)
        unused = [sample_id for sample_id in texts if sample_id not in used]
        again = unused[-repeated:] if repeated else []
        used |= set(again)
        first = first_id + index * samples_per_prompt
        fresh = range(first + len(again), first + samples_per_prompt)
        ids = (*again, *fresh)
        asked.append(
            Request(prompt, ids, max_new_tokens, history=tuple(texts.values()), earlier=texts)
        )
    return asked
