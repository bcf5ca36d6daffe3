"""Samples that are given with their prompts: demonstrations, or pairs of which one is preferred."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.tokenizer import Tokenizer


def read_given(
    prompts: Prompts,
    fields: Sequence[str],
    tokenizer: Tokenizer,
    stop_tokens: Sequence[int],
    max_response_tokens: int,
) -> tuple[Prompts, list[list[np.ndarray]]]:
    """Encode the samples that rows give in some fields, and leave out rows where one is too long.

    Returns the prompts that are left, and of each its samples, [R] int32, in the fields' order. A
    sample is its text, then the token that the chat template writes after an answer; without one
    the first of `stop_tokens`. So it is as the policy would have generated it. Raises ValueError
    where a row lacks a field or its text, or nothing is left.
    """
    if not fields:
        return prompts, []
    turn = tokenizer.end_of_turn()
    end = [turn] if turn is not None else list(stop_tokens[:1])
    kept: list[int] = []
    found: list[list[np.ndarray]] = []
    dropped = collections.Counter(prompts.dropped)
    for number, row in enumerate(prompts.rows):
        texts = [row.get(field) for field in fields]
        for field, text in zip(fields, texts, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"data.train: the row of prompt {prompts.texts[number]!r:.60} must have a text"
                    f" in its field {field!r}, and has {text!r:.60}."
                )
        samples = [np.array([*tokenizer.encode(str(text)), *end], np.int32) for text in texts]
        if max(map(len, samples)) > max_response_tokens:
            dropped[f"with a sample longer than {max_response_tokens} tokens"] += 1
        else:
            kept.append(number)
            found.append(samples)
    if not kept:
        raise ValueError(
            f"No row of data.train is left: a sample of each is longer than {max_response_tokens}"
            " tokens; raise data.max_response_tokens."
        )
    return prompts.take(kept, dict(dropped)), found
