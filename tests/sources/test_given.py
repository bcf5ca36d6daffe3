"""Samples that rows give: texts, and chats in TRL's columns, of which answers are learned."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from rlhf_jax.data import prompts, rows
from rlhf_jax.data.given import Given, check_labels, read_given
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.models.files.source import open_source
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.models import RewardModel, _conversation

USER = {"role": "user", "content": "Say a"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "a, of course"}
MORE = {"role": "user", "content": "And b?"}
LAST = {"role": "assistant", "content": "b"}


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Of bytes, with a chat template."""
    source = open_source(tiny_run.make_model(tmp_path_factory.mktemp("tiny")))
    return dataclasses.replace(source.tokenizer, template=CHATML)


def given(
    tokenizer: Tokenizer, tmp_path: Path, *fields: str, **row: Any
) -> tuple[list[str], list[Given]]:
    """The rendered prompt of one row and its samples."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = rows.read(tmp_path / "rows.jsonl")
    asked = prompts.tokenize(found, tokenizer, "", 100)
    kept, samples = read_given(asked, fields, tokenizer, (1,), max_response_tokens=200)
    return [tokenizer.decode_whole(one.tolist()) for one in kept.tokens], samples[0]


def learned(tokenizer: Tokenizer, sample: Given) -> str:
    """The text that is learned from."""
    return tokenizer.decode_whole(sample.tokens[sample.learned].tolist())


def test_a_chat_is_what_the_template_makes_of_it(tokenizer, tmp_path):
    chat = [SYSTEM, USER, ANSWER, MORE, LAST]
    (prompt,), (sample,) = given(tokenizer, tmp_path, "completion", messages=chat)
    whole = tokenizer.render(chat, add_generation_prompt=False)
    assert prompt + tokenizer.decode_whole(sample.tokens.tolist()) == whole
    assert MORE["content"] in whole and MORE["content"] not in learned(tokenizer, sample)
    for answer in (ANSWER, LAST):
        assert answer["content"] in learned(tokenizer, sample)


MARKED_ANSWERS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_marks_answers_says_what_is_learned(tokenizer, tmp_path):
    """Marked are whole answers; unmarked, what prefixes add, which here is the same."""
    chat = [SYSTEM, USER, ANSWER, MORE, LAST]
    marking = dataclasses.replace(tokenizer, template=MARKED_ANSWERS)
    (prompt,), (sample,) = given(marking, tmp_path, "completion", messages=chat)
    assert prompt + tokenizer.decode_whole(sample.tokens.tolist()) == marking.render(chat, False)
    assert learned(tokenizer, sample) == "a, of course</s>b</s>"
    half = dataclasses.replace(
        tokenizer, template=MARKED_ANSWERS.replace("</s>{% endgen", "{% endgen")
    )
    _, (sample,) = given(half, tmp_path, "completion", messages=chat)
    assert learned(tokenizer, sample) == "a, of courseb"
    with pytest.raises(ValueError, match="private use"):
        given(
            marking,
            tmp_path,
            "completion",
            messages=[*chat, MORE, {"role": "assistant", "content": "\ue0fe"}],
        )


def test_a_chat_of_one_answer_is_its_text(tokenizer, tmp_path):
    as_text = given(tokenizer, tmp_path, "completion", prompt="Say a", completion="a, of course")
    as_chat = given(tokenizer, tmp_path, "completion", prompt=[USER], completion=[ANSWER])
    as_messages = given(tokenizer, tmp_path, "completion", messages=[USER, ANSWER])
    for prompt, (sample,) in (as_chat, as_messages):
        assert prompt == as_text[0]
        assert sample.tokens.tolist() == as_text[1][0].tokens.tolist() and sample.learned.all()


def test_pairs_hold_their_prompt(tokenizer, tmp_path):
    """As `prompt` and two texts, as two chats that begin alike, or as both."""
    texts = {"chosen": "a, of course", "rejected": "b"}
    apart = given(tokenizer, tmp_path, *texts, prompt="Say a", **texts)
    chats = {"chosen": [USER, ANSWER], "rejected": [USER, LAST]}
    inside = given(tokenizer, tmp_path, *texts, **chats)
    repeated = given(tokenizer, tmp_path, *texts, prompt="Say a", **chats)
    assert apart[0] == inside[0] == repeated[0]
    for one, *others in zip(apart[1], inside[1], repeated[1], strict=True):
        assert all(one.tokens.tolist() == other.tokens.tolist() for other in others)


def test_columns_of_another_use_stay(tmp_path):
    """Lists that are no chats, and answers alone beside their prompt."""
    given = [
        {"prompt": "Say a", "chosen": ["a"], "rejected": ["b"]},
        {"prompt": "Say a", "chosen": [ANSWER], "rejected": [LAST]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [LAST]},
        {"prompt": "Say a", "messages": [USER, ANSWER]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    assert rows.read(tmp_path / "rows.jsonl") == given


@pytest.mark.parametrize(
    ("fields", "row", "sentence"),
    [
        (
            ["completion"],
            {"prompt": "a"},
            "must have a text in its field 'completion', and has None",
        ),
        (["completion"], {"messages": [USER]}, "'messages' without an answer of the assistant"),
        (
            ["completion"],
            {"messages": [USER, ANSWER, MORE]},
            "a chat in 'completion' that does not end with the assistant",
        ),
        (
            ["chosen", "rejected"],
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "the same text in 'chosen' and 'rejected', so none is preferred",
        ),
        (["chosen", "rejected"], {"chosen": "a", "rejected": "b"}, "has no 'prompt'; its keys are"),
        (
            ["chosen", "rejected"],
            {"chosen": [USER, ANSWER], "rejected": [MORE, LAST]},
            "'chosen' and 'rejected' begin with no common message, which would be their prompt",
        ),
        (
            ["completion"],
            {"prompt": "a", "completion": "\ud800"},
            "half a character (a lone surrogate) in its field 'completion'",
        ),
        (
            ["completion"],
            {"messages": [USER, ANSWER, MORE, {"role": "assistant", "content": "\ud800"}]},
            "half a character (a lone surrogate) in its field 'completion'",
        ),
        (
            ["completion"],
            {"prompt": "a", "completion": 300 * "b"},
            "longer than 200 tokens; raise data.max_response_tokens",
        ),
    ],
)
def test_what_a_row_cannot_be_is_one_sentence(tokenizer, tmp_path, fields, row, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        given(tokenizer, tmp_path, *fields, **row)
    assert "\n" not in str(raised.value)


def test_a_pair_may_have_a_margin_of_its_own(tokenizer, tmp_path):
    def read(**more) -> list[Given]:
        row = {"prompt": "a", "chosen": "b", "rejected": "c", **more}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        asked = prompts.tokenize(rows.read(tmp_path / "rows.jsonl"), tokenizer, "", 100)
        return read_given(asked, ["chosen", "rejected"], tokenizer, (1,), 10, margins=True)[1][0]

    assert [one.margin for one in read(margin=2)] == [2.0, 0.0]
    assert [one.margin for one in read()] == [0.0, 0.0]
    with pytest.raises(ValueError, match="must have a number in its field 'margin', and has 'b'"):
        read(margin="b")


def test_a_pair_with_a_long_answer_is_dropped_and_counted(tokenizer, tmp_path):
    """Whichever of the two it is; an answer of as many tokens as there may be stays."""
    found = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "b", "chosen": 9 * "b", "rejected": "c"},
        {"prompt": "c", "chosen": "b", "rejected": 10 * "c"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    asked = prompts.tokenize(rows.read(tmp_path / "rows.jsonl"), tokenizer, "", 100)
    kept, samples = read_given(asked, ["chosen", "rejected"], tokenizer, (1,), 10)
    assert kept.texts == ["a", "b"] and [len(pair) for pair in samples] == [2, 2]
    assert kept.dropped == {"with a sample longer than 10 tokens": 1}


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path):
    forgets = dataclasses.replace(
        tokenizer, template="{{ messages[-1]['role'] }}: {{ messages[-1]['content'] }}"
    )
    with pytest.raises(ValueError, match="writes earlier ones otherwise once there are later ones"):
        given(forgets, tmp_path, "completion", messages=[USER, ANSWER, MORE, LAST])


def test_a_template_that_begins_given_answers_otherwise_is_refused(tokenizer, tmp_path):
    """As one that opens the thinking of an answer that is to be generated."""
    thinks = CHATML.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
    thinking = dataclasses.replace(tokenizer, template=thinks)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    asked = prompts.tokenize(rows.read(tmp_path / "rows.jsonl"), thinking, "", 100)
    with pytest.raises(ValueError, match="begins a given answer otherwise than one that is to be"):
        read_given(asked, ["chosen", "rejected"], thinking, (1,), 200, whole=True)


def test_labels_of_one_kind_are_refused(tokenizer, tmp_path):
    row = json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n"
    (tmp_path / "rows.jsonl").write_text(2 * row)
    asked = prompts.tokenize(rows.read(tmp_path / "rows.jsonl"), tokenizer, "", 100)
    _, given = read_given(
        asked, ["completion"], tokenizer, (1,), max_response_tokens=200, label="label"
    )
    with pytest.raises(ValueError, match="the same 'label' in every row; learning from labels"):
        check_labels(given, "label", "data.train")


@pytest.mark.parametrize(
    ("template", "padding"),
    [(CHATML, None), (CHATML.replace("\\n", ""), None), (CHATML, 10), (None, None)],
)
def test_a_reward_model_learns_at_the_token_where_it_is_read(
    tokenizer, tmp_path, template, padding
):
    tokenizer = dataclasses.replace(tokenizer, template=template)
    row = {"prompt": "Hi", "chosen": "Good day!", "rejected": "No."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = prompts.tokenize(rows.read(tmp_path / "rows.jsonl"), tokenizer, "", 100)
    kept, ((chosen, _),) = read_given(
        asked,
        ["chosen", "rejected"],
        tokenizer,
        (1,),
        max_response_tokens=200,
        whole=True,
        padding=padding,
    )
    folder = tiny_run.make_model(tmp_path / "judge", scalar_head=True, tied=False)
    source = dataclasses.replace(open_source(folder), tokenizer=tokenizer)
    model = RewardModel(source, source.load(np.float32), rows=1)
    model.__dict__["padding"] = padding
    response = Response("Hi", asked.messages[0], {}, row["chosen"])
    assert [*kept.tokens[0].tolist(), *chosen.tokens.tolist()] == _conversation(model, response)
    assert chosen.learned.all()
