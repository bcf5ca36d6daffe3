"""Two answers to a prompt as one text, to which a preference model replies with a letter.

The text is that of RLHF Workflow (Dong et al. 2024), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = ("A", "B")  # the first answer is better, the second one

Chat = str | Sequence[Mapping[str, Any]]


def compare(prompt: Chat, first: Chat, second: Chat) -> str:
    """Return the text that asks which of two answers to a prompt is better."""
    return f"[CONTEXT] {_plain(prompt)} [RESPONSE A] {_plain(first)} [RESPONSE B] {_plain(second)}"


def _plain(chat: Chat) -> str:
    """Return a text, or a chat as one; a single message stands for itself."""
    if isinstance(chat, str):
        return chat
    if len(chat) == 1:
        return str(chat[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in chat)
