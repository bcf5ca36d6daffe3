"""Prompt files, the length filter and resumable batches."""

import collections
import itertools
import json
import sys
from collections.abc import Callable

import numpy as np
import pytest
from places import ROOT

from configs.rewards import extraction
from rlhf_jax.config import default
from rlhf_jax.data import batches as iterator
from rlhf_jax.data import prompts
from rlhf_jax.data.rows import read
from rlhf_jax.trainer import _keep_prompts

CONFIGS = ROOT / "configs" / "data"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

tokenize: Callable[..., prompts.Prompts] = prompts.tokenize  # by tokenizers of a test's own


class Words:
    """A tokenizer of one token a word."""

    template: str | None = "{{ messages }}"

    def encode(self, text):
        return [len(word) for word in text.split()]

    def encode_chats(self, chats, /, add_generation_prompt, **arguments):
        return [
            self.encode(
                " ".join(f"<{message['role']}> {message['content']}" for message in messages)
                + " <assistant>"
            )
            for messages in chats
        ]


def write(folder, text, name="prompts.jsonl"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl_rows_strings_and_chats(tmp_path):
    path = write(
        tmp_path, "\ufeff" + lines({"q": "Hi\u2028there", "id": 3}) + "\n" + lines({"q": CHAT})
    )
    rows = read(path, "q")
    assert [row["prompt"] for row in rows] == ["Hi\u2028there", CHAT]
    assert rows[0]["id"] == 3


def test_parquet_equals_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": [{"role": "user", "content": word}], "answer": word} for word in ("one", "two")
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == rows == read(write(tmp_path, lines(*rows)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "prompts.jsonl is empty"),
        ("\n\n", "prompts.jsonl is empty"),
        (lines({"prompt": "a"}) + '{"prompt": ', "Line 2 of .*prompts.jsonl is not JSON"),
        (
            lines({"prompt": "a"}) + lines({"text": "b"}),
            "Line 2 of .* has no 'prompt'; its keys are 'text'",
        ),
        (
            lines({"prompt": 3}),
            "Line 1 of .*: 'prompt' must be a string or a list of chat messages, not int",
        ),
        (lines(["a"]), "Line 1 of .* must be an object"),
        (lines({"prompt": []}), "Line 1 of .*: the last message must come from the user"),
        (
            lines({"prompt": [*CHAT, {"role": "assistant", "content": "Hi"}]}),
            "the last message must come from the user",
        ),
        (lines({"prompt": [{"role": "user"}]}), "Line 1 of .*: each chat message must be"),
        (lines({"prompt": [{"role": "human", "content": "Hi"}]}), "the role 'human' is none of"),
    ],
)
def test_bad_lines_end_in_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        read(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_used_are_left_out_where_that_is_asked(tmp_path):
    text = '{"prompt": "a"}\n{oops\n{"prompt": "\\ud800"}\n\n{"prompt": "b", "prompt": "c"}\n'
    told = []
    path = write(tmp_path, text + '{"prompt": "d", "answer": 1}\n')
    assert read(path, skip=told.append) == [{"prompt": "a"}, {"prompt": "d", "answer": 1}]
    assert [line.partition(" of ")[0] for line in told] == ["Line 2", "Line 3", "Line 5"]
    assert "the key 'prompt' is there twice" in told[2]
    with pytest.raises(ValueError, match="is empty"):
        read(write(tmp_path, "[]\n"), skip=told.append)


def test_bad_files_end_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.jsonl does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"must end in .jsonl or .parquet, not '.csv'"):
        read(write(tmp_path, "a,b", "rows.csv"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"Line 1 of .*latin.jsonl is not UTF-8"):
        read(tmp_path / "latin.jsonl")


def test_broken_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"rows.parquet is not a readable Parquet file"):
        read(write(tmp_path, "not parquet at all", "rows.parquet"))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs pyarrow"):
        read(write(tmp_path, "x", "rows.parquet"))


def test_columns_are_renamed_and_urls_are_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    text = lines({"question": "Hi", "answer": "4"})
    fsspec.filesystem("memory").pipe("/bucket/rows.jsonl", text.encode())
    columns = {"answer": "solution"}
    for place in (write(tmp_path, text), "memory://bucket/rows.jsonl"):
        (row,) = read(place, "question", columns=columns)
        assert row == {"question": "Hi", "prompt": "Hi", "solution": "4"}
    with pytest.raises(ValueError, match=r"Prompt file memory://bucket/none.jsonl cannot be read"):
        read("memory://bucket/none.jsonl")


ROW = {"question": "Hi", "answer": "4", "level": 1}


@pytest.mark.parametrize("order", itertools.permutations(ROW), ids="-".join)
@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"answer": "level"}, "two columns would be 'level'"),
        ({"level": "question"}, "two columns would be 'question'"),
        ({"anwser": "solution"}, "has no column 'anwser', which data.columns renames"),
        ({"answer": "solution", "Level": "x"}, "has no column 'Level'"),
        ({"answer": "level", "level": "answer"}, {"level": "4", "answer": 1}),
        ({"answer": "level", "level": "depth"}, {"level": "4", "depth": 1}),
        ({"answer": "answer"}, {"answer": "4", "level": 1}),
    ],
)
def test_a_rename_does_not_depend_on_the_order_of_keys(tmp_path, order, columns, wanted):
    path = write(tmp_path, lines({key: ROW[key] for key in order}))
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted) as caught:
            read(path, "question", columns=columns)
        assert "prompts.jsonl" in str(caught.value)
    else:
        (row,) = read(path, "question", columns=columns)
        assert row == {"question": "Hi", "prompt": "Hi", **wanted}


def test_an_old_name_may_be_missing_in_some_rows(tmp_path):
    path = write(tmp_path, lines({"prompt": "a"}, {"prompt": "b", "answer": 1}))
    assert read(path, columns={"answer": "x"})[1] == {"prompt": "b", "x": 1}


@pytest.mark.parametrize(
    "message",
    [
        {"name": "\ud800"},
        {"\udfff": 1},
        {"tool_calls": [{"function": {"arguments": "a\ud800"}}]},
        {"content": "\ud800"},
    ],
    ids=str,
)
def test_half_a_character_anywhere_in_a_message_is_a_sentence(tmp_path, message):
    path = write(tmp_path, lines({"prompt": [{"role": "user", "content": "Hi"} | message]}))
    with pytest.raises(ValueError, match=r"Line 1 of .* half a character"):
        read(path)


def test_prompts_of_a_program_are_refused_as_those_of_a_file(tmp_path):
    config = default()
    config.workdir = str(tmp_path)
    kept = _keep_prompts(config, ["é", {"prompt": "b", "answer": 1}])
    assert [row["prompt"] for row in read(kept)] == ["é", "b"]
    with pytest.raises(ValueError, match=r"Line 2 of .*prompts.jsonl has half a character"):
        read(_keep_prompts(config, ["a", "b\ud800"]))
    with pytest.raises(ValueError, match="prompts: a row has what no JSON file can hold"):
        _keep_prompts(config, [{"prompt": "a", "answer": object()}])


def test_data_sets_of_a_folder_by_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, lines({"prompt": "one"}, {"prompt": "two"}), "train.jsonl")
    write(folder, lines({"prompt": "three"}), "test.jsonl")
    assert [row["prompt"] for row in read(folder)] == ["one", "two"]
    assert [row["prompt"] for row in read(folder, split="test")] == ["three"]
    chats = datasets.Dataset.from_list([{"prompt": CHAT, "answer": "5"}])
    datasets.DatasetDict({"train": chats}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == [{"prompt": CHAT, "answer": "5"}]
    with pytest.raises(ValueError, match=r"The data set .* cannot be read, split 'none'") as caught:
        read(folder, split="none")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="as a data set needs datasets: pip install"):
        read(folder)


def test_tokenize_renders_and_counts_what_it_drops():
    rows = [{"prompt": "one two"}, {"prompt": "w " * 9}, {"prompt": " "}, {"prompt": CHAT, "id": 4}]
    kept = tokenize(rows, Words(), system="Rhyme.", max_prompt_tokens=8)
    assert kept.texts == ["one two", "Hello"] and len(kept) == 2 and kept.rows[1] is rows[3]
    # <system> Rhyme. <user> one two <assistant>; the chat brings a system message of its own
    assert [tokens.tolist() for tokens in kept.tokens] == [[8, 6, 6, 3, 3, 11], [8, 2, 6, 6, 5, 11]]
    assert all(tokens.dtype == np.int32 for tokens in kept.tokens)
    assert kept.messages == [
        [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "one two"}],
        CHAT,
    ]
    assert kept.dropped == {"longer than 8 tokens": 1, "empty": 1}


def test_tokenize_without_system_message():
    kept = tokenize([{"prompt": "one"}], Words(), system="", max_prompt_tokens=3)
    assert kept.tokens[0].tolist() == [6, 3, 11] and kept.dropped == {}


def test_raw_prompts_and_what_a_template_reads():
    rows = [{"prompt": "one two"}, {"prompt": CHAT}]
    kept = tokenize(rows, Words(), system="", max_prompt_tokens=8, raw=True)
    assert kept.tokens[0].tolist() == [3, 3], "as it is"
    assert kept.tokens[1].tolist() == [8, 2, 6, 6, 5, 11], "a chat has no other form"

    class Thinks(Words):
        def encode_chats(self, chats, /, add_generation_prompt, **arguments):
            return [[int(arguments["enable_thinking"]), int(add_generation_prompt)] for _ in chats]

    given = {"enable_thinking": False}
    kept = tokenize(rows, Thinks(), "", max_prompt_tokens=8, template_arguments=given)
    assert [tokens.tolist() for tokens in kept.tokens] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("rows", "raw", "sentence"),
    [
        (["a b"] * 2, False, r"\(2 longer than 3 tokens\); raise max_prompt_tokens\."),
        (["", " "], False, r"\(2 empty\); give others, or correct the chat template\."),
        (
            ["!", "!!"],
            True,
            r"\(2 rendered to no token\); give others, or correct the chat template",
        ),
        (["!", "a b c d"], True, r"\(1 rendered to no token, 1 longer than 3 tokens\); raise"),
    ],
)
def test_nothing_left_is_an_error(rows, raw, sentence):
    class Deaf(Words):
        def encode(self, text):
            return super().encode(text.replace("!", ""))

    with pytest.raises(ValueError, match="No prompt is left after the length filter " + sentence):
        tokenize([{"prompt": row} for row in rows], Deaf(), "", 3, raw=raw)


def test_a_prompt_without_a_token_is_dropped_and_counted():
    class Silent(Words):
        def encode_chats(self, chats, /, add_generation_prompt, **arguments):
            return [[] if chat[0]["content"] == "one" else [1] for chat in chats]

    rows = [{"prompt": "one"}, {"prompt": "two"}]
    kept = tokenize(rows, Silent(), "", 3)
    assert kept.texts == ["two"] and kept.dropped == {"rendered to no token": 1}


def test_nouns_are_disjoint_and_well_formed():
    train, held_out = (read(CONFIGS / f"nouns_{name}.jsonl") for name in ("train", "heldout"))
    nouns = [row["noun"] for row in train + held_out]
    assert len(train) >= 150 and len(held_out) == 128 and len(set(nouns)) == len(nouns)
    assert all(
        row["prompt"] == f"Write one sentence about the {row['noun']}." for row in train + held_out
    )


def test_people_are_disjoint_and_their_answers_stand_in_the_sentence():
    train, held_out = (read(CONFIGS / f"people_{name}.jsonl") for name in ("train", "heldout"))
    kinds = collections.Counter(row["kind"] for row in held_out)
    assert len(train) == 96 and {row["kind"] for row in train} == {"known_form"}
    assert kinds == {"known_form": 30, "new_form": 15, "other_keys": 12, "missing_value": 12}
    for key in ("name", "city"):
        trained, new = ({row["answer"].get(key) for row in rows} for rows in (train, held_out))
        assert not trained & new - {None}
    for row in train + held_out:
        assert row["prompt"].startswith(f"{row['sentence']}\nWrite this as JSON with the keys ")
        told = [str(value) for value in row["answer"].values() if value is not None]
        assert all(value in row["sentence"] for value in told)
        assert all(f'"{key}"' in row["prompt"] for key in row["answer"])
        perfect = json.dumps({key: one for key, one in row["answer"].items() if one is not None})
        assert extraction.exact("", perfect, row)[0] == 1


def test_facts_are_read_as_text_and_rewards_are_partial():
    answer = {"name": "Ann", "age": 34, "city": None}
    row = {"answer": answer, "sentence": "Ann is 34.", "kind": "new_form"}
    told = 'Sure: {"name": "Ann", "age": "34", "city": "Rome"} !'
    assert extraction.values("", told, row) == (2 / 3, {"new_form": 2 / 3})
    assert extraction.only_json("", told, row) == 0
    assert extraction.from_sentence("", told, row) == 2 / 3
    assert extraction.exact("", ' {"name": "Ann", "age": 34, "city": ""}', row)[1]["new_form"] == 1
    for broken in ("", "{", "{" * 5000, "[1]", '{"name": "Ann", "age": 34'):
        assert extraction.values("", broken, row)[0] == 1 / 3, "the missing value alone is right"
        assert extraction.exact("", broken, row)[0] == extraction.only_json("", broken, row) == 0
    assert extraction.exact("", '{"name": "Ann", "age": 34, "job": "pilot"}', row)[0] == 0


def take(batches, count, position=None):
    """The indices of so many batches from a position on, and the position after them."""
    position = position or batches.start
    found = []
    for _ in range(count):
        indices, position = batches.take(position)
        found += indices.tolist()
    return found, position


@pytest.mark.parametrize(("count", "batch"), [(10, 4), (12, 4), (3, 7), (1, 2)])
def test_every_epoch_is_a_permutation(count, batch):
    stream, _ = take(iterator.Batches(count, batch, seed=1), 5 * count)
    epochs = [stream[start : start + count] for start in range(0, len(stream) - count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)


def test_epochs_and_seeds_differ_and_repeat():
    streams = [take(iterator.Batches(50, 50, seed), 4)[0] for seed in range(8)]
    orders = {
        tuple(stream[start : start + 50]) for stream in streams for start in range(0, 200, 50)
    }
    assert len(orders) == 32  # one order each of 8 seeds and 4 epochs
    assert take(iterator.Batches(50, 8, 3), 20) == take(iterator.Batches(50, 8, 3), 20)


# mid-epoch, at the boundary (5 of 4 = 2 of 10), across it
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 6])
def test_resume_neither_skips_nor_repeats(steps):
    whole, _ = take(iterator.Batches(10, 4, seed=7), 12)
    before, position = take(iterator.Batches(10, 4, seed=7), steps)
    second = iterator.Batches(10, 4, seed=7)
    second.take(second.start)  # what it gave before does not matter
    assert before + take(second, 12 - steps, json.loads(json.dumps(position)))[0] == whole


def test_resume_at_an_exact_epoch_boundary():
    first, second = (iterator.Batches(12, 4, seed=5) for _ in range(2))
    _, position = take(first, 3)
    assert position == {"position": 12, "count": 12, "seed": 5}
    assert sorted(take(second, 3, position)[0]) == list(range(12))


def test_resume_with_another_batch_size():
    whole, _ = take(iterator.Batches(10, 4, seed=7), 5)
    before, position = take(iterator.Batches(10, 4, seed=7), 3)
    assert before + take(iterator.Batches(10, 2, seed=7), 4, position)[0] == whole


def test_sources_are_mixed_by_weight_and_each_is_a_stream_of_its_own():
    mixed = iterator.Batches(9, 6, 3, sizes=(6, 3), weights=(1.0, 0.5))
    stream, position = take(mixed, 6)
    for start in range(0, 36, 9):  # any window has its shares
        assert sum(index >= 6 for index in stream[start : start + 9]) == 3
    first = [index for index in stream if index < 6]
    second = [index - 6 for index in stream if index >= 6]
    assert all(sorted(first[start : start + 6]) == list(range(6)) for start in range(0, 24, 6))
    assert all(sorted(second[start : start + 3]) == list(range(3)) for start in range(0, 12, 3))
    again = iterator.Batches(9, 6, 3, sizes=(6, 3), weights=(1.0, 0.5))
    assert take(again, 2, position) == take(mixed, 2, position)


def test_foreign_positions_and_empty_data_are_refused():
    with pytest.raises(ValueError, match="prompts with count 10, this run has count 11"):
        iterator.Batches(11, 4, 0).take(iterator.Batches(10, 4, 0).start)
    with pytest.raises(ValueError, match="seed 0, this run has seed 1"):
        iterator.Batches(10, 4, 1).take(iterator.Batches(10, 4, 0).start)
    with pytest.raises(ValueError, match="at least one prompt"):
        iterator.Batches(0, 4, 0)
