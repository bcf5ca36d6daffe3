"""Names of metrics as a tracker takes them: what it refuses is escaped, and can be read again."""

from __future__ import annotations

import hashlib
import re

from rlhf_jax.runtime.foreign import SURROGATE

# An underscore that would else read as the beginning of an escape.
AMBIGUOUS = "_(?=x[0-9A-F]{4})"


def escaped(name: str, refused: str, longest: int | None = None) -> str:
    r"""Return a name in which each character that a regular expression matches is _xHHHH_.

    H are the digits of its code point, four or eight, as .NET's `XmlConvert.EncodeName` has them;
    `_x([0-9A-F]{4}|[0-9A-F]{8})_` finds them again. A name of more than `longest` bytes is cut, and
    ends in a digest of the whole.
    """

    def code(found: re.Match[str]) -> str:
        point = ord(found[0])
        return f"_x{point:04X}_" if point < 1 << 16 else f"_x{point:08X}_"

    fitting = re.sub(f"{AMBIGUOUS}|{SURROGATE.pattern}|{refused}", code, name)
    data = fitting.encode()
    if longest is None or len(data) <= longest:
        return fitting
    digest = hashlib.sha256(data).hexdigest()[:16]
    return f"{data[: longest - len(digest) - 1].decode(errors='ignore')}_{digest}"
