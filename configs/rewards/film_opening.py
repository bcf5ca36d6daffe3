"""What GRPO of configs/workflow.py asks beside praise: that a sentence begins as it was told to."""

from __future__ import annotations

import re
from typing import Any


def opening(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 for a sentence that begins with the words of its prompt, else 0."""
    words = re.search(r'Begin with "(.+)"\.', prompt)
    return float(words is not None and response.lower().lstrip(' "').startswith(words[1].lower()))
