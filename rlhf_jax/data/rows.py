"""Rows of prompts: JSONL and Parquet files, here or behind a URL, data sets, your own functions."""

from __future__ import annotations

import functools
import importlib
import io
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhf_jax.runtime import messages as wire
from rlhf_jax.runtime.extensions import is_of_file, load_named
from rlhf_jax.runtime.files import is_remote
from rlhf_jax.runtime.foreign import has_surrogate, one_line, parse_json

CHAT_ROLES = ("system", "user", "assistant", "tool")  # The roles that chat templates know.
FILE_TYPES = (".jsonl", ".parquet")
LONGEST_PROMPT = 500_000  # Characters.

UnreadRow = tuple[str, Callable[[], Any]]  # The position of a row, and the function that reads it.


def is_file_name(place: str | pathlib.Path) -> bool:
    """Return whether the name of a source of prompts is that of a file."""
    return pathlib.PurePath(place).suffix in FILE_TYPES


def is_dataset(place: str | pathlib.Path) -> bool:
    """Tell whether a place is a folder or a name of the Hub, for the package `datasets`."""
    known = is_file_name(place) or is_remote(place) or is_of_file(str(place))
    return not (known or pathlib.Path(place).is_file())


def read(
    place: str | pathlib.Path,
    prompt_key: str = "prompt",
    *,
    configuration: str = "",
    split: str = "train",
    columns: Mapping[str, str] = {},
    skip: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Read rows, with the prompt of each under "prompt".

    place: a .jsonl or .parquet file, or its URL for the package fsspec; or a folder or a name on
    the Hugging Face Hub, which the package `datasets` reads, in one of its configurations, '' for
    the only one; or FILE.py:NAME, a function that returns rows. columns: new names by old ones. A
    prompt is a string or a list of chat messages `{"role", "content"}`. skip: told why of each row
    that is left out as it cannot be used; without it such a row is an error. Raises ValueError at
    anything else, no rows, broken JSON or a missing key, in one sentence that names the file and
    the line; FileNotFoundError where there is no file.
    """
    where_from = str(place)
    suffix = pathlib.PurePath(place).suffix
    if is_of_file(where_from):
        numbered = _call(where_from)
    elif is_dataset(place):
        numbered = _read_dataset(where_from, configuration, split)
    elif not is_file_name(place):
        raise ValueError(
            f"Prompt file {place} must end in .jsonl or .parquet, not {suffix or 'nothing'!r}: each"
            f' line of a .jsonl file is a row, as {{"{prompt_key}": "What is 2 + 3?"}}.'
        )
    elif suffix == ".jsonl":
        numbered = _read_jsonl(where_from, _content(where_from))
    else:
        numbered = _read_parquet(where_from, _content(where_from))
    rows = []
    unused = set(columns)
    for where, load in numbered:
        try:
            row = load()
            if isinstance(row, dict):
                unused -= row.keys()
                row = with_prompt(_renamed(row, columns, where), prompt_key, where)
            rows.append(_check_row(row, prompt_key, where))
        except ValueError as error:
            if skip is None:
                raise
            skip(str(error))
    if not rows:
        raise ValueError(
            f"Prompt file {place} is empty; it needs at least one row with a {prompt_key!r}."
        )
    if unused:
        raise ValueError(
            f"{place} has no column {min(unused)!r:.60}, which data.columns renames; the columns of"
            f" its first row are {', '.join(map(repr, rows[0]))}."
        )
    return rows


def _renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the row with its columns renamed; ValueError if two would have one name."""
    renamed: dict[str, Any] = {}
    for name, value in row.items():
        new = columns.get(name, name)
        if new in renamed:
            raise ValueError(
                f"{where}: by data.columns two columns would be {new!r:.60}; rename the other one,"
                " too."
            )
        renamed[new] = value
    return renamed


def _content(place: str) -> bytes:
    """Return the bytes of a local file or URL."""
    if not is_remote(place):
        path = pathlib.Path(place).expanduser()
        if path.exists() and not path.is_file():
            raise ValueError(f"Prompt file {path} is not a file but a folder, a pipe or a device.")
        if not path.exists():
            raise FileNotFoundError(
                f"Prompt file {path} does not exist; give the path of a .jsonl or .parquet file."
            )
        return path.read_bytes()
    try:
        with importlib.import_module("fsspec").open(place, "rb") as file:
            return file.read()
    except Exception as error:  # the package for the URL's scheme may raise anything
        raise ValueError(f"Prompt file {place} cannot be read ({one_line(error)}).") from error


def _read_dataset(place: str, configuration: str, split: str) -> Iterator[UnreadRow]:
    """Yield each row of a data set; `datasets` is imported here, as few runs need it."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"Reading {place} as a data set needs datasets: pip install 'rlhf_jax[datasets]', or"
            " give a .jsonl or .parquet file."
        ) from error
    folder = pathlib.Path(place).expanduser()
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            dataset = datasets.load_from_disk(str(folder))
            dataset = dataset[split] if hasattr(dataset, "keys") else dataset
        else:
            name = str(folder) if folder.exists() else place
            dataset = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # of the package, the network or a file
        message = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(
            f"The data set {place} cannot be read, split {split!r}"
            f" ({type(error).__name__}: {message})."
        ) from error
    for number, row in enumerate(dataset, start=1):
        yield f"Row {number} of {place}", functools.partial(dict, row)


def _call(spec: str) -> Iterator[UnreadRow]:
    """Yield each row that a function of a file returns."""
    function: Any = load_named(spec, "The function of rows")
    if not callable(function):
        raise ValueError(
            f"{spec} is a {type(function).__name__}; name a function that returns rows."
        )
    try:
        returned: Any = function()
        rows = list(returned)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise ValueError(
            f"The function of rows {spec} raised {type(error).__name__}: {one_line(error)}."
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"Row {number} of {spec}", functools.partial(lambda row: row, row)


def _read_jsonl(path: str, content: bytes) -> Iterator[UnreadRow]:
    """Yield each line that is not blank."""

    def parse(where: str, line: bytes) -> Any:
        try:
            return parse_json(line.decode("utf-8-sig"), unique=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text; save the file as UTF-8.") from error
        except json.JSONDecodeError as error:
            place = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{where} is not JSON ({place}).") from error
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({one_line(error)}).") from error

    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip(b" \t\r\xef\xbb\xbf"):
            where = f"Line {number} of {path}"
            yield where, functools.partial(parse, where, line)


def _read_parquet(path: str, content: bytes) -> Iterator[UnreadRow]:
    """Yield each row; pyarrow is imported here, so that JSONL works without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"Reading {path} needs pyarrow; install it (pip install pyarrow) or use JSONL."
        ) from error
    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except Exception as error:  # pyarrow has many exception types
        raise ValueError(f"{path} is not a readable Parquet file ({one_line(error)}).") from error
    for number, row in enumerate(rows, start=1):
        yield f"Row {number} of {path}", functools.partial(dict, row)


def _check_row(row: Any, prompt_key: str, where: str) -> dict[str, Any]:
    """Return the row with its prompt under "prompt"; ValueError if it has no valid one."""
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} must be an object with a {prompt_key!r}, not {type(row).__name__}."
        )
    for column, value in row.items():
        try:
            wire.encode(value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{where}: the column {column!r:.60} cannot be given to a reward, which runs in a"
                f" process of its own ({one_line(error)}); leave it out of the file."
            ) from error
    if prompt_key not in row:
        raise ValueError(
            f"{where} has no {prompt_key!r}; its keys are {', '.join(map(repr, row)) or 'none'}:"
            " set data.prompt_key to that of the prompt."
        )
    prompt = row[prompt_key]
    if isinstance(prompt, list):
        prompt = check_messages(prompt, where)
        if not prompt or prompt[-1]["role"] in ("system", "assistant"):
            raise ValueError(
                f"{where}: the last message must come from the user, for the model to answer it."
            )
    elif not isinstance(prompt, str):
        raise ValueError(
            f"{where}: {prompt_key!r} must be a string or a list of chat messages, not"
            f" {type(prompt).__name__}."
        )
    _check_texts(prompt, f"its {prompt_key!r}", where)
    return {**row, "prompt": prompt}


def check_messages(messages: list[Any], where: str) -> list[dict[str, Any]]:
    """Return chat messages; ValueError for one without a text or with an unknown role."""
    chat = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(
                f'{where}: each chat message must be {{"role": ..., "content": text}}, '
                f"not {message!r:.60}."
            )
        if message.get("role") not in CHAT_ROLES:
            raise ValueError(
                f"{where}: the role {message.get('role')!r:.40} is none of {', '.join(CHAT_ROLES)}."
            )
        # Drop the empty fields that Parquet gives to every struct.
        chat.append({key: value for key, value in message.items() if value is not None})
    return chat


def with_prompt(row: dict[str, Any], prompt_key: str, where: str) -> dict[str, Any]:
    """Return a row whose chats contain their prompt, as in TRL, with the prompt split off.

    For `messages` the prompt is everything before the first answer, and the rest the `completion`;
    for `chosen` and `rejected` it is their common beginning, even if the row repeats it as a text.
    """
    given = [row.get(name) for name in ("chosen", "rejected")]
    if prompt_key in row:
        first = [chat[0] if isinstance(chat, list) and chat else None for chat in given]
        whole = all(
            isinstance(one, dict) and one.get("role") in ("system", "user") for one in first
        )
        if isinstance(row[prompt_key], str) and whole:
            return _without_prompt(row, prompt_key, where)
        return row
    if isinstance(chat := row.get("messages"), list):
        messages = check_messages(chat, where)
        answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        if not answers or not answers[0]:
            raise ValueError(
                f"{where} has 'messages' without an answer of the assistant to a message before it;"
                " leave the row out."
            )
        start = answers[0]
        return {**row, prompt_key: messages[:start], "completion": messages[start:]}
    if all(isinstance(chat, list) for chat in given):
        return _without_prompt(row, prompt_key, where)
    return row


def _without_prompt(row: dict[str, Any], prompt_key: str, where: str) -> dict[str, Any]:
    """Return a row of two chats with their common beginning as its prompt."""
    names = ("chosen", "rejected")
    sides = [check_messages(row[name], where) for name in names]
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    if not shared:
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' begin with no common message, which would be their"
            f" prompt; give answers alone, and a {prompt_key!r}."
        )
    answers = {name: side[shared:] for name, side in zip(names, sides, strict=True)}
    return {**row, prompt_key: sides[0][:shared], **answers}


def _check_texts(prompt: str | list[dict[str, Any]], what: str, where: str) -> None:
    """Raise ValueError if the texts of a prompt are too long or not valid Unicode."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if sum(map(len, texts)) > LONGEST_PROMPT:
        raise ValueError(f"{where} has over {LONGEST_PROMPT:,} characters; cut {what}.")
    if has_surrogate(prompt):
        raise ValueError(f"{where} has half a character (a lone surrogate) in {what}; take it out.")
    if any("\0" in text for text in texts):
        raise ValueError(f"{where} has a NUL character in {what}; take it out.")
