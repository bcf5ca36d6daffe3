r"""A verifiable reward for mathematics: 1 if the final number equals that of the reference.

The final number is the first one after the last `####` or inside the last `\boxed{}`; if neither
has a number, it is the last one of the text. Numbers are compared by value: 1,000 equals 1000.0,
and currency and percent signs are ignored.
"""

from __future__ import annotations

import math
import re

FRACTION = re.compile(r"(?<!\d)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
CURRENCY = re.compile(r"(-?)\\?[$€£](-?)")
NUMBER = re.compile(
    r"((?<![\w)}\]])-)?"  # a sign, not a subtraction
    r"(?<!\w)(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"  # not the digits of H2O
    r"([eE][-+]?\d+)?"
    r"(?:\s*/\s*(\d+(?:\.\d+)?))?"
)


def gsm8k(prompt: str, response: str, row: dict) -> float:
    """1 if the response's final number equals that of row["answer"], else 0.

    row["answer"] is a number or a text that ends in "#### number", as in GSM8K (Cobbe et al. 2021).
    Raises ValueError if it has no number.
    """
    del prompt
    reference = final_number(str(row["answer"]))
    given = final_number(response)
    if reference is None:
        raise ValueError(f"the reference answer {row['answer']!r:.60} holds no number")
    return float(given is not None and math.isclose(given, reference, rel_tol=1e-9, abs_tol=1e-9))


def final_number(text: str) -> float | None:
    """The final number of a solution; None without one."""
    found = numbers(_marked(text))[:1] or numbers(text)[-1:]
    return found[0] if found else None


def numbers(text: str) -> list[float]:
    """All numbers of a text, in order, including simple LaTeX such as \\frac{1}{2}."""
    plain = text.replace("−", "-").replace("{,}", ",").replace("\\,", "")
    plain = CURRENCY.sub(r" \1\2", FRACTION.sub(r"\1/\2", plain))
    return [_value(*match.groups(default="")) for match in NUMBER.finditer(plain)]


def _value(sign: str, digits: str, exponent: str, divisor: str) -> float:
    value = float(sign + digits.replace(",", "") + exponent)
    if not divisor:
        return value
    return value / float(divisor) if float(divisor) else math.nan


def _marked(text: str) -> str:
    """The text after the last `####` or in the last `\\boxed{}`, whichever is later, or ''."""
    hashes = text.rfind("####")
    box = text.rfind("\\boxed{")
    if hashes > box:
        return text[hashes + len("####") :]
    return _braced(text[box + len("\\boxed{") :]) if box >= 0 else ""


def _braced(text: str) -> str:
    """The text up to its closing brace."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:place]
    return text
