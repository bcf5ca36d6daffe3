"""Keep earlier responses, for lookup and replay in later roll-outs of a prompt.

`History` has those of earlier stages, `known_texts` all that the lookup of one sample reads.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.generation.speculative.rules import AcceptanceRule

MOST_TOKENS = 1 << 23  # of all texts together: 34 MB, and 45 MB of a checkpoint
DIGEST = 16  # bytes of a prompt's digest

Texts = collections.deque[tuple[int, np.ndarray]]  # (sample id, text), the latest last


class History:
    """Keep the latest responses to each prompt, up to `size` tokens each with separators.

    Each response keeps its sample id, and hence its noise. Beyond `most` tokens in total, the
    prompts that were answered longest ago are dropped.
    """

    def __init__(self, size: int, most: int = MOST_TOKENS):
        self._size = size
        self._most = most
        self._tokens = 0
        # beyond the ids of all samples ever added: unused noise
        self.unused_id = 0
        # by the prompt's digest, the latest answered one at the end
        self._texts: dict[bytes, Texts] = {}

    def of(self, prompt: np.ndarray) -> dict[int, np.ndarray]:
        """Return earlier responses to `prompt` by sample id, the latest last."""
        return dict(self._texts.get(_digest(prompt), ()))

    def of_others(self, prompt: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the latest response to each recently answered prompt other than `prompt`.

        They have up to `size` tokens in total, the latest last. Answers of one kind share
        boilerplate, such as the keys of JSON.
        """
        digest = _digest(prompt)
        latest = []
        tokens = 0
        for other, texts in reversed(self._texts.items()):
            if tokens >= self._size:
                break
            if other != digest:
                latest.append(texts[-1][1])
                tokens += len(texts[-1][1]) + 1
        return tuple(reversed(latest))

    def add(self, samples: Iterable[Sample]) -> None:
        """Add finished samples, of an id the latest text, and drop texts that no longer fit."""
        for sample in samples:
            self.unused_id = max(self.unused_id, sample.sample_id + 1)
            if not self._size:
                continue
            prompt = _digest(sample.prompt)
            known = self._texts.pop(prompt, ())
            texts = collections.deque(kept for kept in known if kept[0] != sample.sample_id)
            texts.append((sample.sample_id, np.array(sample.tokens, np.int32)))
            while len(texts) > 1 and _count(texts) > self._size:
                texts.popleft()
            self._texts[prompt] = texts
            self._tokens += _count(texts) - _count(known)
            while self._tokens > self._most:
                self._tokens -= _count(self._texts.pop(next(iter(self._texts))))

    def with_samples(self, samples: Iterable[Sample]) -> History:
        """Return the history after finished samples; this one is not changed."""
        after = History(self._size, self._most)
        after._texts = dict(self._texts)
        after._tokens = self._tokens
        after.unused_id = self.unused_id
        after.add(samples)
        return after

    def state(self) -> dict[str, np.ndarray]:
        """Return all of it as arrays for a checkpoint.

        "prompts" are their digests, "texts" the number of texts of each, "tokens" all texts
        concatenated, "lengths" their lengths, "ids" their samples, and "unused_id" is beyond all
        ids.
        """
        texts = [text for of_prompt in self._texts.values() for _, text in of_prompt]
        ids = [sample_id for of_prompt in self._texts.values() for sample_id, _ in of_prompt]
        return {
            "prompts": np.frombuffer(b"".join(self._texts), np.uint8).reshape(-1, DIGEST),
            "texts": np.array([len(of_prompt) for of_prompt in self._texts.values()], np.int32),
            "tokens": np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32),
            "lengths": np.array([len(text) for text in texts], np.int32),
            "ids": np.array(ids, np.int64),
            "unused_id": np.array(self.unused_id, np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` saved; without its texts if this history keeps none."""
        self._texts = {}
        self._tokens = 0
        ids = np.asarray(state.get("ids", ()), np.int64)
        # A checkpoint of an earlier version has no "unused_id".
        self.unused_id = int(state.get("unused_id", ids.max(initial=-1) + 1))
        # An earlier version kept prompts whole.
        if "prompts" not in state or not self._size:
            return
        ends = np.cumsum(np.asarray(state["lengths"], np.int64))
        texts = iter(np.split(np.asarray(state["tokens"], np.int32), ends)[:-1])
        ids = iter(ids.tolist())
        for prompt, count in zip(state["prompts"], state["texts"], strict=True):
            texts_of_prompt = collections.deque((next(ids), next(texts)) for _ in range(int(count)))
            self._texts[np.asarray(prompt, np.uint8).tobytes()] = texts_of_prompt
            self._tokens += _count(texts_of_prompt)


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=DIGEST).digest()


def _count(texts: Iterable[tuple[int, np.ndarray]]) -> int:
    """Count the tokens of texts, a separator with each."""
    return sum(len(text) + 1 for _, text in texts)


def requests(
    prompts: Sequence[np.ndarray],
    samples_per_prompt: int | Sequence[int],
    max_new_tokens: int,
    first_id: int,
    history: History,
    rule: AcceptanceRule,
    repeated: int = 0,
    used: set[int] | None = None,
    temperatures: Sequence[tuple[float, ...]] = (),
) -> list[Request]:
    """Make one request per prompt, with consecutive sample ids from `first_id`.

    Where the text depends on the drafts, the ids begin beyond those of all earlier samples, so that
    no draft stems from the noise that accepts it, and none is `repeated`. Else of each prompt's
    samples up to `repeated` take the ids of its latest responses, and so their noise: they can be
    replayed, and are no fresh draws. Ids in `used` are not taken again, and those taken are added
    to it. samples_per_prompt: of all prompts or of each. temperatures: of each prompt's samples,
    as a request has them.
    """
    if rule.depends_on_drafts:
        first_id = max(first_id, history.unused_id)
        repeated = 0
    requests_ = []
    used = set() if used is None else used
    counts = np.broadcast_to(samples_per_prompt, len(prompts)).tolist()
    firsts = first_id + np.cumsum([0, *counts])
    for index, prompt in enumerate(prompts):
        texts = history.of(prompt)
        unused = [sample_id for sample_id in texts if sample_id not in used]
        again = unused[-repeated:] if repeated else []
        used |= set(again)
        first = int(firsts[index])
        fresh = range(first + len(again), first + counts[index])
        ids = (*again, *fresh)
        requests_.append(
            Request(
                prompt,
                ids,
                max_new_tokens,
                history=tuple(texts.values()),
                earlier=texts,
                temperatures=temperatures[index] if temperatures else (),
                others=history.of_others(prompt),
            )
        )
    return requests_


def known_texts(sample: Sample, ended: Mapping[int, np.ndarray], size: int) -> np.ndarray:
    """Return the lookup corpus of a sample [size] int32, with -1 after each text.

    Texts of its own prompt come last, the latest at the end, as many as fit; before them texts of
    other prompts, those given with the request and those `ended` since, by request.
    """
    others = [text for request, text in ended.items() if request != sample.request.id]
    texts = (*sample.request.others, *others, *sample.texts)
    joined = np.full(size, -1, np.int32)
    separated = [np.append(text, -1) for text in texts]
    flat = np.concatenate([np.zeros(0, np.int32), *separated])
    kept = flat[max(0, len(flat) - size) :]
    joined[: len(kept)] = kept
    return joined


def keep_latest(ended: dict[int, np.ndarray], request: int, text: np.ndarray, size: int) -> None:
    """Keep a text as its request's latest, and of others as many as fit into `size` tokens."""
    ended.pop(request, None)
    ended[request] = text
    while sum(map(len, ended.values())) - len(next(iter(ended.values()))) >= size:
        del ended[next(iter(ended))]
