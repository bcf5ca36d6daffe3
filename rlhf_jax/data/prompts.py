"""Prompts from JSONL and Parquet files to token arrays, on the host."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_jax.runtime import messages as wire

ROLES = ("system", "user", "assistant", "tool")


class Tokenizer(Protocol):
    """What this file needs of a tokenizer."""

    @property
    def template(self) -> str | None: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts that passed the length filter; entry i of each list speaks of the same prompt."""

    tokens: list[np.ndarray]  # each [P] int32, rendered through the chat template
    texts: list[str]  # what the user said, for rewards and tables of samples
    messages: list[list[dict[str, Any]]]  # the chats that were rendered, system messages included
    rows: list[dict[str, Any]]  # the whole rows of the file
    dropped: dict[str, int]  # why prompts were left out, and how many

    def __len__(self) -> int:
        return len(self.tokens)


def read(path: str | pathlib.Path, prompt_key: str = "prompt") -> list[dict[str, Any]]:
    """Rows of a .jsonl or .parquet file, with the prompt of each under "prompt".

    A prompt is a string or a list of chat messages `{"role", "content"}`. Anything else, a missing
    or empty file, broken JSON or a missing key raises one sentence that names the file and the
    line.
    """
    path = pathlib.Path(path).expanduser()
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(
            f"Prompt file {path} must end in .jsonl or .parquet, not {path.suffix or 'nothing'!r}."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"Prompt file {path} does not exist; give the path of a .jsonl or .parquet file."
        )
    rows = [_checked(row, prompt_key, where) for where, row in readers[path.suffix](path)]
    if not rows:
        raise ValueError(
            f"Prompt file {path} is empty; it needs at least one row with a {prompt_key!r}."
        )
    return rows


def tokenize(
    rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, system: str, max_prompt_tokens: int
) -> Prompts:
    """Renders each row's prompt through the chat template and keeps those of at most
    `max_prompt_tokens`.

    A string prompt becomes one user message. `system`, where not empty, is put before prompts that
    bring no system message of their own. If nothing is left, one sentence says why.
    """
    kept: list[tuple[np.ndarray, str, list[dict[str, Any]], dict[str, Any]]] = []
    dropped: collections.Counter[str] = collections.Counter()
    for row in rows:
        messages = _messages(row["prompt"], system)
        text = str(messages[-1]["content"])
        tokens = np.asarray(_encode(row["prompt"], messages, tokenizer), np.int32)
        if not text.strip():
            dropped["empty"] += 1
        elif len(tokens) > max_prompt_tokens:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        else:
            kept.append((tokens, text, messages, row))
    if not kept:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "there were none"
        )
        raise ValueError(
            f"No prompt is left after the length filter ({reasons}); raise max_prompt_tokens."
        )
    tokens, texts, chats, rows_kept = (list(column) for column in zip(*kept, strict=True))
    return Prompts(tokens, texts, chats, rows_kept, dict(dropped))


def _encode(prompt: str | list, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Through the chat template; where a base model has none, a plain string stands for itself."""
    if tokenizer.template is None and isinstance(prompt, str) and len(messages) == 1:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat(messages)


def _messages(prompt: str | list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _read_jsonl(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each line that is not blank."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"Line {number} of {path}"
        try:
            text = line.decode("utf-8-sig").strip()
            if text:
                yield where, json.loads(text)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text; save the file as UTF-8.") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON ({error.msg} at column {error.colno})."
            ) from error


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row); pyarrow is loaded here, so that JSONL needs none of it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"Reading {path} needs pyarrow; install it (pip install pyarrow) or use JSONL."
        ) from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} is not a readable Parquet file ({str(error).splitlines()[0]})."
        ) from error
    for number, row in enumerate(rows, start=1):
        where = f"Row {number} of {path}"
        for column, value in row.items():
            try:
                wire.encode(value)
            except ValueError as error:
                raise ValueError(
                    f"{where}: the column {column!r} cannot be given to a reward, which runs in a"
                    f" process of its own ({str(error).rstrip('.')}); leave it out of the file."
                ) from error
        yield where, row


def _checked(row: Any, prompt_key: str, where: str) -> dict[str, Any]:
    """The row with its prompt, checked, under "prompt"."""
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} must be an object with a {prompt_key!r}, not {type(row).__name__}."
        )
    if prompt_key not in row:
        raise ValueError(
            f"{where} has no {prompt_key!r}; its keys are {', '.join(map(repr, row)) or 'none'}."
        )
    prompt = row[prompt_key]
    if isinstance(prompt, list):
        prompt = [_checked_message(message, where) for message in prompt]
        if not prompt or prompt[-1]["role"] in ("system", "assistant"):
            raise ValueError(
                f"{where}: the last message must come from the user, for the model to answer it."
            )
    elif not isinstance(prompt, str):
        raise ValueError(
            f"{where}: {prompt_key!r} must be a string or a list of chat messages, not"
            f" {type(prompt).__name__}."
        )
    return {**row, "prompt": prompt}


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    """The message without the empty fields that Parquet gives to every struct."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise ValueError(
            f'{where}: each chat message must be {{"role": ..., "content": text}}, '
            f"not {message!r:.60}."
        )
    if message.get("role") not in ROLES:
        raise ValueError(
            f"{where}: the role {message.get('role')!r:.40} is none of {', '.join(ROLES)}."
        )
    return {key: value for key, value in message.items() if value is not None}
