"""Samples that rows give with their prompts: demonstrations, or pairs of which one is preferred.

A sample is a text or the messages of a chat. What the assistant says is learned from, and the token
that the chat template writes after it: so it is as the policy would have generated it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data.prompts import Prompts
from rlhf_jax.data.rows import check_messages
from rlhf_jax.data.tokenizer import Tokenizer


class Given(NamedTuple):
    """Hold a sample that a row gives."""

    tokens: np.ndarray  # [R] int32
    learned: np.ndarray  # [R] bool, the tokens that are learned from
    # 1 of a chosen or desirable sample, -1 of a rejected or undesirable one, 0 of a demonstration
    preference: float = 0.0


def read_given(
    prompts: Prompts,
    fields: Sequence[str],
    tokenizer: Tokenizer,
    stop_tokens: Sequence[int],
    max_response_tokens: int,
    template_arguments: Mapping[str, Any] = {},
    name: str = "data.train",
    label: str = "",
) -> tuple[Prompts, list[list[Given]]]:
    """Encode the samples that rows give in some fields, and leave out rows where one is too long.

    Returns the prompts that are left, and of each its samples in the fields' order. A text ends
    with the token that the chat template writes after an answer; without one with the first of
    `stop_tokens`. label: the field that says of a row's one sample whether it is desirable. Raises
    ValueError, which begins with `name`, where a row lacks a sample or label, two samples of a row
    are equal, all labels are, or nothing is left.
    """
    if not fields:
        return prompts, []
    turn = tokenizer.end_of_turn()
    end = [turn] if turn is not None else list(stop_tokens[:1])
    kept: list[int] = []
    found: list[list[Given]] = []
    dropped = collections.Counter(prompts.dropped)
    for number, row in enumerate(prompts.rows):
        where = f"{name}: the row of prompt {prompts.texts[number]!r:.60}"
        samples = []
        for content in contents(row, fields, where):
            if isinstance(content, str):
                tokens = [*tokenizer.encode(content), *end]
                samples.append(Given(np.array(tokens, np.int32), np.ones(len(tokens), bool)))
            else:
                chat = prompts.messages[number]
                samples.append(_turns(tokenizer, chat, content, turn, template_arguments, where))
        signs = _preferences(row, len(fields), label, where)
        samples = [
            sample._replace(preference=sign) for sample, sign in zip(samples, signs, strict=True)
        ]
        if max(len(sample.tokens) for sample in samples) > max_response_tokens:
            dropped[f"with a sample longer than {max_response_tokens} tokens"] += 1
        else:
            kept.append(number)
            found.append(samples)
    if not kept:
        raise ValueError(
            f"No row of {name} is left: a sample of each is longer than {max_response_tokens}"
            " tokens; raise data.max_response_tokens."
        )
    if label and len({own.preference for (own,) in found}) < 2:
        raise ValueError(
            f"{name} has the same {label!r} in every row; learning from labels needs both kinds."
        )
    return prompts.take(kept, dict(dropped)), found


def _preferences(row: dict[str, Any], count: int, label: str, where: str) -> list[float]:
    """Return `Given.preference` of each of a row's samples."""
    if count > 1:
        return [1.0, -1.0]
    if not label:
        return [0.0]
    desirable = row.get(label)
    if not isinstance(desirable, bool):
        raise ValueError(
            f"{where} must have true or false in its field {label!r}, and has {desirable!r:.60}."
        )
    return [1.0 if desirable else -1.0]


def contents(
    row: Mapping[str, Any], fields: Sequence[str], where: str
) -> list[str | list[dict[str, Any]]]:
    """Return the samples of a row: each a text, or its messages where it has several.

    ValueError, which begins with `where`, where one is missing, or two are equal.
    """
    found = [_content(row.get(field), field, where) for field in fields]
    if len(found) > 1 and found[0] == found[1]:
        raise ValueError(
            f"{where} has the same text in {fields[0]!r} and {fields[1]!r}, so none is"
            " preferred; leave the row out."
        )
    return found


def _content(given: Any, field: str, where: str) -> str | list[dict[str, Any]]:
    """Return a sample's text, or its messages where it has several."""
    if isinstance(given, list):
        messages = check_messages(given, where)
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{where} has a chat in {field!r} that does not end with the assistant; what comes"
                " after its last message has no answer to learn."
            )
        if len(messages) > 1:
            return messages
        given = messages[0]["content"]
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{where} must have a text in its field {field!r}, and has {given!r:.60}.")
    return given


def _turns(
    tokenizer: Tokenizer,
    prompt: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    turn: int | None,
    arguments: Mapping[str, Any],
    where: str,
) -> Given:
    """Encode several messages behind a prompt: what each adds to the text of those before.

    Learned is what the template marks as generation, else each answer up to the end of its turn.
    ValueError where the template writes earlier messages otherwise once there are later ones.
    """
    before = tokenizer.render(prompt, add_generation_prompt=True, **arguments)
    if tokenizer.marks_answers:
        text, answers = tokenizer.render_marked([*prompt, *messages], **arguments)
        _check_begins(text, before, where)
        start = len(before)
        behind = [slice(one.start - start, one.stop - start) for one in answers]
        found = tokenizer.encode_marked(text[start:], behind)
        return Given(np.array(found[0], np.int32), np.array(found[1], bool))
    tokens: list[int] = []
    learned: list[bool] = []
    for index, message in enumerate(messages):
        answers = message["role"] == "assistant"
        asks = index + 1 < len(messages) and messages[index + 1]["role"] == "assistant"
        chat = [*prompt, *messages[: index + 1]]
        text = tokenizer.render(chat, add_generation_prompt=asks and not answers, **arguments)
        _check_begins(text, before, where)
        added = tokenizer.encode_rendered(text[len(before) :])
        # what the template writes behind the end of a turn is none of the assistant's
        last = len(added) - 1 - added[::-1].index(turn) if turn in added else len(added) - 1
        tokens += added
        learned += [answers and place <= last for place in range(len(added))]
        before = text
    return Given(np.array(tokens, np.int32), np.array(learned, bool))


def _check_begins(text: str, before: str, where: str) -> None:
    """Raise ValueError where the text of a chat does not begin as that of its earlier messages."""
    if not text.startswith(before):
        raise ValueError(
            f"{where} has several messages, and the chat template writes earlier ones otherwise"
            " once there are later ones; give chats of one answer each."
        )
