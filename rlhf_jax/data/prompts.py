"""Prompts, from files to token arrays on the host."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data.rendering import RenderingError
from rlhf_jax.data.tokenizer import Tokenizer

AT_ONE_TIME = 1024  # prompts whose texts and lists of tokens are in memory at a time
UNREADABLE = "rendered to no token"  # why a prompt is dropped: the policy would read nothing


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Hold the prompts that passed the length filter; entry i of each list is of prompt i."""

    tokens: list[np.ndarray]  # Each [P] int32, rendered through the chat template.
    texts: list[str]  # The user's text, for rewards and tables of samples.
    messages: list[list[dict[str, Any]]]  # The chats that were rendered, system messages included.
    rows: list[dict[str, Any]]  # The whole rows of the file.
    dropped: dict[str, int]  # The number of dropped prompts, by reason.

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, other: Prompts) -> Prompts:
        """Return these prompts and then the others."""
        dropped = collections.Counter(self.dropped) + collections.Counter(other.dropped)
        return Prompts(
            self.tokens + other.tokens,
            self.texts + other.texts,
            self.messages + other.messages,
            self.rows + other.rows,
            dict(dropped),
        )

    def take(self, chosen: Sequence[int], dropped: dict[str, int]) -> Prompts:
        """Return some of the prompts; `dropped` counts those dropped so far."""
        return Prompts(
            tokens=[self.tokens[one] for one in chosen],
            texts=[self.texts[one] for one in chosen],
            messages=[self.messages[one] for one in chosen],
            rows=[self.rows[one] for one in chosen],
            dropped=dropped,
        )


def tokenize(
    rows: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    system: str,
    max_prompt_tokens: int,
    raw: bool = False,
    template_arguments: Mapping[str, Any] = {},
) -> Prompts:
    """Render each row's prompt through the chat template; keep those that are not too long.

    A prompt has at most `max_prompt_tokens` tokens. A string prompt becomes one user message.
    `system`, if not empty, is put before prompts without a system message of their own. Without
    both system prompt and chat template, or if prompts are `raw`, a string is used unchanged.
    `template_arguments` are given to the chat template. Raises ValueError with the reason if
    nothing is left.
    """
    chats = []
    for row in rows:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        chats.append(messages)
    # A base model has no template for a plain string.
    plain = raw or tokenizer.template is None
    parts = [slice(start, start + AT_ONE_TIME) for start in range(0, len(rows), AT_ONE_TIME)]
    encoded = [
        tokens
        for part in parts
        for tokens in _encode(rows, chats, part, tokenizer, plain, template_arguments)
    ]

    texts = [str(messages[-1]["content"]) for messages in chats]
    kept: list[int] = []
    dropped: collections.Counter[str] = collections.Counter()
    for index, (text, tokens) in enumerate(zip(texts, encoded, strict=True)):
        if not text.strip():
            dropped["empty"] += 1
        elif not len(tokens):
            dropped[UNREADABLE] += 1
        elif len(tokens) > max_prompt_tokens:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        else:
            kept.append(index)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        hint = "raise max_prompt_tokens"
        if not dropped.keys() - {"empty", UNREADABLE}:
            hint = "give others, or correct the chat template"
        raise ValueError(
            f"No prompt is left after the length filter ({reasons or 'there were none'}); {hint}."
        )
    return Prompts(encoded, texts, chats, list(rows), {}).take(kept, dict(dropped))


def _encode(
    rows: Sequence[dict[str, Any]],
    chats: Sequence[list[dict[str, Any]]],
    part: slice,
    tokenizer: Tokenizer,
    plain: bool,
    template_arguments: Mapping[str, Any],
) -> list[np.ndarray]:
    """Return the token ids [P] int32 of each chat of a part.

    Where `plain`, a prompt that is one string is encoded as it is.
    """
    indices = range(*part.indices(len(rows)))
    rendered = [
        index
        for index in indices
        if not (plain and len(chats[index]) == 1 and isinstance(rows[index]["prompt"], str))
    ]
    ids_of_chats: dict[int, list[int]] = {}
    if rendered:
        rendered_chats = [chats[index] for index in rendered]
        try:
            ids = tokenizer.encode_chats(
                rendered_chats, add_generation_prompt=True, **template_arguments
            )
        except RenderingError as error:
            raise ValueError(f"Prompt {rendered[error.index] + 1}: {error}") from error
        ids_of_chats = dict(zip(rendered, ids, strict=True))
    encoded = [
        ids_of_chats[index] if index in ids_of_chats else tokenizer.encode(rows[index]["prompt"])
        for index in indices
    ]
    return [np.asarray(ids, np.int32) for ids in encoded]
