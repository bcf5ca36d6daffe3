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

CHAT_ROLES = ("system", "user", "assistant", "tool")  # The roles that chat templates know.


class ChatEncoder(Protocol):
    """Describe what this file needs of a tokenizer."""

    @property
    def template(self) -> str | None:
        """Return the chat template, None where a base model has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of messages in the chat template."""
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


def read(path: str | pathlib.Path, prompt_key: str = "prompt") -> list[dict[str, Any]]:
    """Read the rows of a .jsonl or .parquet file, with the prompt of each under "prompt".

    A prompt is a string or a list of chat messages `{"role", "content"}`. Raises ValueError at
    anything else, an empty file, broken JSON or a missing key, in one sentence that names the file
    and the line; FileNotFoundError where there is no file.
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
    rows = [_check_row(row, prompt_key, where) for where, row in readers[path.suffix](path)]
    if not rows:
        raise ValueError(
            f"Prompt file {path} is empty; it needs at least one row with a {prompt_key!r}."
        )
    return rows


def tokenize(
    rows: Sequence[dict[str, Any]], tokenizer: ChatEncoder, system: str, max_prompt_tokens: int
) -> Prompts:
    """Render each row's prompt through the chat template; keep those that are not too long.

    A prompt has at most `max_prompt_tokens` tokens. A string prompt becomes one user message.
    `system`, where not empty, is put before prompts that bring no system message of their own. With
    neither that nor a chat template, a string stands for itself. Raises ValueError, which says why,
    if nothing is left.
    """
    kept: list[tuple[np.ndarray, str, list[dict[str, Any]], dict[str, Any]]] = []
    dropped: collections.Counter[str] = collections.Counter()
    for row in rows:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        # A base model has no template to put one plain string into.
        plain = tokenizer.template is None and isinstance(prompt, str) and len(messages) == 1
        ids = tokenizer.encode(prompt) if plain else tokenizer.encode_chat(messages)
        tokens = np.asarray(ids, np.int32)
        text = str(messages[-1]["content"])
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


def _read_jsonl(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) for each line that is not blank."""
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
    """Yield (where, row) for each row; pyarrow is loaded here, so that JSONL needs none of it."""
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


def _check_row(row: Any, prompt_key: str, where: str) -> dict[str, Any]:
    """Return the row with its prompt under "prompt"; ValueError where it is not one."""
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
        chat = []
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise ValueError(
                    f'{where}: each chat message must be {{"role": ..., "content": text}}, '
                    f"not {message!r:.60}."
                )
            if message.get("role") not in CHAT_ROLES:
                raise ValueError(
                    f"{where}: the role {message.get('role')!r:.40} is none of"
                    f" {', '.join(CHAT_ROLES)}."
                )
            # Without the empty fields that Parquet gives to every struct.
            chat.append({key: value for key, value in message.items() if value is not None})
        prompt = chat
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
