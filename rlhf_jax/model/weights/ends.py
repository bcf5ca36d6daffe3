"""Which tokens end a text: all that any source of a model names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from rlhf_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Ends:
    """Hold the ids of the tokens that end a text by the source that names them, none empty."""

    sources: Mapping[str, tuple[int, ...]]
    spelled: Mapping[int, str]

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the ids that any source names, in the order of the sources."""
        return tuple(dict.fromkeys(one for ids in self.sources.values() for one in ids))

    def lines(self) -> list[str]:
        """Say which sources name which tokens, a line for those that name the same."""
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, ids in self.sources.items():
            alike.setdefault(tuple(sorted(set(ids))), []).append(name)
        return [
            f"{', '.join(names)}: {', '.join(f'{self.spelled[one]!r} ({one})' for one in ids)}"
            for ids, names in alike.items()
        ]

    def warning(self, path: Path, has_stop_strings: bool) -> str:
        """Say that no token ends a text, or that sources disagree on which; '' where all is well.

        The first source is the one that other programs read first: it should name all.
        """
        if not self.tokens and not has_stop_strings:
            return (
                f"{path} names no token that ends a text, so every response is cut off: give"
                " eos_token_id in its generation_config.json, or set generation.stop_strings."
            )
        first = next(iter(self.sources.values()), ())
        if set(first) == set(self.tokens):
            return ""
        return (
            f"{path} has sources that disagree on which tokens end a text; all of them do, here and"
            f" in what is exported ({'; '.join(self.lines())})."
        )


def find_ends(named: Mapping[str, tuple[int, ...]], tokenizer: Tokenizer) -> Ends:
    """Decide what ends a text: what files name, the tokenizer's end token, the template's.

    named: ids by the source that names them, the one first that other programs read first. The
    template's end is the token that it writes after an answer.
    """
    eos = tokenizer.backend.token_to_id(tokenizer.special.get("eos_token", ""))
    own = {"the tokenizer's eos_token": eos, "the chat template": tokenizer.end_of_turn()}
    sources = {name: ids for name, ids in named.items() if ids}
    sources |= {name: (token,) for name, token in own.items() if token is not None}
    tokens = {token for ids in sources.values() for token in ids}
    return Ends(sources, {token: tokenizer.decode_whole([token]) for token in tokens})
