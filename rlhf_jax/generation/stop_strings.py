"""End a response where its text has a string that the config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Find the first of some strings in the text of a response's tokens."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]  # Special tokens included, as they are written.

    def end(self, tokens: Sequence[int], new: int) -> int | None:
        """Return how many tokens there are up to the first stop string; None where there is none.

        The last `new` tokens have not been looked at before. A token that goes on after the string
        stays whole, as the policy drew it.
        """
        # A token is of a byte at least, so that no string begins before these.
        longest = max(len(string.encode()) for string in self.strings)
        if not self._in(tokens[-(longest + new) :]):
            return None
        counts = range(len(tokens) - new + 1, len(tokens) + 1)
        found = (count for count in counts if self._in(tokens[max(0, count - longest) : count]))
        return next(found, None)

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(string in text for string in self.strings)
