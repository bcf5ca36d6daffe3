"""Prompts from files to token arrays, on the host."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_jax.data.rendering import RenderingError

AT_ONE_TIME = 1024  # prompts whose texts and lists of tokens are in memory
UNREADABLE = "rendered to no token"  # why a prompt is dropped: the policy reads nothing


class ChatEncoder(Protocol):
    """Describe what this file needs of a tokenizer."""

    @property
    def template(self) -> str | None:
        """Return the chat template, None where a base model has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""
        ...

    def encode_chats(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        /,
        add_generation_prompt: bool,
        **arguments: Any,
    ) -> list[list[int]]:
        """Return the token ids of each chat in the chat template."""
        ...


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Hold the prompts that passed the length filter; entry i of each list is of prompt i."""

    tokens: list[np.ndarray]  # Each [P] int32, rendered through the chat template.
    texts: list[str]  # What the user said, for rewards and tables of samples.
    messages: list[list[dict[str, Any]]]  # The chats that were rendered, system messages included.
    rows: list[dict[str, Any]]  # The whole rows of the file.
    dropped: dict[str, int]  # How many prompts were left out, by the reason why.

    def __len__(self) -> int:
        return len(self.tokens)


def tokenize(
    rows: Sequence[dict[str, Any]],
    tokenizer: ChatEncoder,
    system: str,
    max_prompt_tokens: int,
    raw: bool = False,
    template_arguments: Mapping[str, Any] = {},
) -> Prompts:
    """Render each row's prompt through the chat template; keep those that are not too long.

    A prompt has at most `max_prompt_tokens` tokens. A string prompt becomes one user message.
    `system`, where not empty, is put before prompts that bring no system message of their own. With
    neither that nor a chat template, or where prompts are `raw`, a string stands for itself.
    `template_arguments` are given to the chat template. Raises ValueError, which says why, if
    nothing is left.
    """
    chats = []
    for row in rows:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        chats.append(messages)
    # A base model has no template to put one plain string into.
    plain = raw or tokenizer.template is None
    parts = [slice(start, start + AT_ONE_TIME) for start in range(0, len(rows), AT_ONE_TIME)]
    found = [
        tokens
        for part in parts
        for tokens in _encode(rows, chats, part, tokenizer, plain, template_arguments)
    ]

    kept: list[tuple[np.ndarray, str, list[dict[str, Any]], dict[str, Any]]] = []
    dropped: collections.Counter[str] = collections.Counter()
    for row, messages, tokens in zip(rows, chats, found, strict=True):
        text = str(messages[-1]["content"])
        if not text.strip():
            dropped["empty"] += 1
        elif not len(tokens):
            dropped[UNREADABLE] += 1
        elif len(tokens) > max_prompt_tokens:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        else:
            kept.append((tokens, text, messages, row))
    if not kept:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "there were none"
        )
        hint = "raise max_prompt_tokens"
        if not dropped.keys() - {"empty", UNREADABLE}:
            hint = "give others, or mend the chat template"
        raise ValueError(f"No prompt is left after the length filter ({reasons}); {hint}.")
    tokens, texts, chats, rows_kept = (list(column) for column in zip(*kept, strict=True))
    return Prompts(tokens, texts, chats, rows_kept, dict(dropped))


def _encode(
    rows: Sequence[dict[str, Any]],
    chats: Sequence[list[dict[str, Any]]],
    part: slice,
    tokenizer: ChatEncoder,
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
    found: dict[int, list[int]] = {}
    if rendered:
        asked = [chats[index] for index in rendered]
        try:
            ids = tokenizer.encode_chats(asked, add_generation_prompt=True, **template_arguments)
        except RenderingError as error:
            raise ValueError(f"Prompt {rendered[error.index] + 1}: {error}") from error
        found = dict(zip(rendered, ids, strict=True))
    encoded = [
        found[index] if index in found else tokenizer.encode(rows[index]["prompt"])
        for index in indices
    ]
    return [np.asarray(ids, np.int32) for ids in encoded]
