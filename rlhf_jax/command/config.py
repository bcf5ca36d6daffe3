"""Print the keys of a config with their defaults, types and meanings."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import inspect
import io
import operator
import re
import tokenize
from typing import NamedTuple

from rlhf_jax.config import default, schema
from rlhf_jax.config.algorithms import named


class Key(NamedTuple):
    """Describe one key."""

    name: str  # dotted
    default: object
    comment: str


def keys(algorithm: str = "grpo") -> list[Key]:
    """Return every key in the order of the schema, with the options of an algorithm.

    The meanings are the comments of the schema. ValueError if there is no such algorithm.
    """
    comments = _comments(inspect.getsource(schema))
    for field in named(algorithm).fields():
        comments[f"algorithm.{field.name}"] = field.metadata["meaning"]
    defaults = default(algorithm)
    return [
        Key(name, operator.attrgetter(name)(defaults), comments.get(name, ""))
        for name in schema.flat(defaults)
    ]


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog=argv[0], description=__doc__)
    parser.add_argument(
        "pattern",
        nargs="?",
        default="*",
        help="keys to print: a part of their names, or as in 'generation.*'; all if none",
    )
    parser.add_argument(
        "--algorithm", default="grpo", help="whose options are keys, too: a name, or FILE.py:NAME"
    )
    options = parser.parse_args(argv[1:])
    pattern = options.pattern
    known = keys(options.algorithm)
    matches = [key for key in known if fnmatch.fnmatch(key.name, pattern)]
    matches = matches or [key for key in known if pattern in key.name]
    for key in matches:
        default = key.default.to_dict() if isinstance(key.default, schema.Config) else key.default
        print(f"{key.name} = {default!r}  ({type(default).__name__})")
        print(f"    {key.comment}")
    if not matches:
        near = difflib.get_close_matches(pattern, [key.name for key in known], cutoff=0.4)
        hint = f"; near it are {', '.join(near)}" if near else ""
        parser.error(f"no key is like {pattern!r}{hint}")
    return 0


def _comments(source: str) -> dict[str, str]:
    """Return the comment above each key of the table of defaults, by dotted name."""
    comments = {}
    above: list[str] = []
    section = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            above.append(token.string.lstrip("# "))
        elif match := re.match(r'\s*"(\w+)": (\{$)?', token.line):
            if token.type != tokenize.STRING or token.string.strip('"') != match[1]:
                continue
            if match[2]:
                section = f"{match[1]}."
            else:
                comments[section + match[1]] = " ".join(above)
            above = []
        elif token.line.strip() == "},":
            section = ""
        elif token.type == tokenize.NAME:  # the comment above belongs to other lines
            above = []
    return comments
