"""Check the keys of model and prompts, and the arguments of chat templates."""

from __future__ import annotations

import datetime
import importlib.util
import math

from rlhf_jax.config.checks import require, require_one_of, require_positive
from rlhf_jax.config.schema import Config
from rlhf_jax.data.rows import is_dataset, is_file_name
from rlhf_jax.runtime.files import find, is_remote

OWN_ARGUMENTS = ("messages", "add_generation_prompt")  # of a chat template, set by the run


def check_data(config: Config) -> None:
    """Check that model and prompts are named, with valid templates and columns."""
    require(
        bool(config.model.path),
        "model.path is empty; give --model a folder, a .gguf file or a hub name.",
    )
    require_positive(config, "data.max_prompt_tokens")
    require(
        not (config.data.raw and (config.data.system or config.data.template_arguments)),
        "data.raw leaves the chat template out, which data.system and data.template_arguments are"
        " for; give one or the other.",
    )
    require(
        bool(config.data.train),
        "data.train is empty; give a .jsonl or .parquet file of prompts, a data set, or a function"
        " that returns rows, FILE.py:NAME.",
    )
    require_one_of(config, "data.on_bad_row", ("error", "skip"))
    _check_date(config)
    _check_template_arguments(config)
    _check_columns(config)
    places = {f"data.{key}": config.data[key] for key in ("train", "eval")}
    places |= {f"data.mixture[{number}]": one for number, one in enumerate(config.data.mixture)}
    shares = config.data.shares
    require(
        len(shares) in (0, 1 + len(config.data.mixture)),
        f"data.shares is {tuple(shares)}; give one for data.train and each of data.mixture.",
    )
    require(
        all(isinstance(one, int | float) and 0 < one < math.inf for one in shares),
        f"data.shares is {tuple(shares)}; shares must be numbers above 0.",
    )
    for key, path in places.items():
        if is_file_name(path) and not is_remote(path) and not find(path).is_file():
            raise FileNotFoundError(f"{key}: there is no file {path}.")
        require(
            not path or not is_dataset(path) or importlib.util.find_spec("datasets") is not None,
            f"{key} is {path}, which is no .jsonl or .parquet file but a data set: pip install"
            " 'rlhf_jax[datasets]' to read it.",
        )


def _check_date(config: Config) -> None:
    """Check that the date for chat templates is a valid YYYY-MM-DD."""
    date = config.data.date
    try:
        fits = not date or datetime.date.fromisoformat(date).isoformat() == date
    except ValueError:
        fits = False
    require(fits, f"data.date is {date!r}; it must be a day as 2024-01-31, or ''.")


def _check_template_arguments(config: Config) -> None:
    """Check that a chat template can take the arguments, including tools and documents."""
    arguments = config.data.template_arguments.to_dict()
    taken = [name for name in OWN_ARGUMENTS if name in arguments]
    require(
        not taken, f"data.template_arguments has {', '.join(taken)}, which the run sets itself."
    )
    for name in ("tools", "documents"):
        given = arguments.get(name)
        fits = isinstance(given, list | tuple) and all(isinstance(one, dict) for one in given)
        require(
            given is None or fits,
            f"data.template_arguments: {name} is {given!r:.60}; it must be a list of objects.",
        )


def _check_columns(config: Config) -> None:
    """Check that new names of columns are texts, and that no two columns get the same."""
    columns = config.data.columns.to_dict()
    names = [*columns, *columns.values()]
    require(
        all(isinstance(name, str) and name for name in names),
        f"data.columns is {columns!r:.80}; it must hold old and new names, none empty.",
    )
    new = list(columns.values())
    twice = [name for name in new if new.count(name) > 1]
    require(not twice, f"data.columns renames two columns to {twice and twice[0]!r}; name each.")
