"""What is kept of earlier responses, against lists, and whose noise a request repeats."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.generation.speculative.rules import RULES


def prompt_of(number: int) -> np.ndarray:
    return np.array([number], np.int32)


def finished(prompt: np.ndarray, sample_id: int, tokens: list[int]) -> Sample:
    request = Request(prompt, (sample_id,), 8)
    return Sample(sample_id, request, [], tokens=tokens, logprobs=[0.0] * len(tokens))


class Lists:
    """The same in lists: (prompt, [(sample id, text)]), the one that was answered last at the end.

    A text counts its tokens and a separator.
    """

    def __init__(self, size: int, most: int):
        self.size = size
        self.most = most
        self.kept: list[tuple[int, list[tuple[int, list[int]]]]] = []
        self.unused_id = 0

    def of(self, prompt: int) -> list[tuple[int, list[int]]]:
        return next((texts for own, texts in self.kept if own == prompt), [])

    def add(self, prompt: int, sample_id: int, text: list[int]) -> None:
        self.unused_id = max(self.unused_id, sample_id + 1)
        if not self.size:
            return
        texts = [one for one in self.of(prompt) if one[0] != sample_id] + [(sample_id, text)]
        while len(texts) > 1 and sum(len(one) + 1 for _, one in texts) > self.size:
            texts = texts[1:]
        self.kept = [one for one in self.kept if one[0] != prompt] + [(prompt, texts)]
        while sum(len(one) + 1 for _, of_prompt in self.kept for _, one in of_prompt) > self.most:
            self.kept = self.kept[1:]


def assert_same(history: History, lists: Lists, prompts: int) -> None:
    assert history.unused_id == lists.unused_id
    for prompt in range(prompts):
        found = history.of(prompt_of(prompt))
        assert [(i, text.tolist()) for i, text in found.items()] == lists.of(prompt)


@pytest.mark.parametrize(("size", "most"), [(0, 99), (1, 99), (8, 20), (9, 12), (99, 30), (6, 6)])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_that_of_lists(seed, size, most):
    """Also behind a checkpoint at any moment, and in a copy, which leaves the first as it was."""
    random = np.random.default_rng(seed)
    history = History(size, most)
    lists = Lists(size, most)
    for _ in range(40):
        prompt = int(random.integers(4))
        sample_id = int(random.integers(12))
        text = random.integers(0, 99, random.integers(0, 6)).tolist()
        before = history.state()
        after = history.with_samples([finished(prompt_of(prompt), sample_id, text)])
        for name, array in before.items():
            np.testing.assert_array_equal(history.state()[name], array)
        lists.add(prompt, sample_id, text)
        history = after
        if random.random() < 0.3:
            history = History(size, most)
            history.restore(after.state())
        assert_same(history, lists, 4)


@pytest.mark.parametrize(
    ("kept", "unused"),
    [
        ({}, 0),
        ({"ids": np.array([], np.int64)}, 0),
        ({"ids": np.array([4, 9, 2])}, 10),
        ({"ids": np.array([0])}, 1),
        ({"ids": np.array([4]), "unused_id": np.array(77)}, 77),
    ],
)
def test_a_checkpoint_of_an_earlier_version_says_which_ids_are_used(kept, unused):
    """By its texts, which are then forgotten, as is all that there was."""
    history = History(9)
    history.add([finished(prompt_of(1), 40, [1, 2])])
    history.restore(kept)
    assert history.unused_id == unused and history.of(prompt_of(1)) == {}


def test_a_checkpoint_holds_digests_of_prompts_and_texts_in_a_row():
    history = History(9)
    history.add(finished(prompt_of(one), 10 + i, [i] * i) for i, one in enumerate((4, 5, 4)))
    kept = history.state()
    shapes = {name: (str(array.dtype), array.shape) for name, array in kept.items()}
    assert shapes == {
        "prompts": ("uint8", (2, 16)),
        "texts": ("int32", (2,)),
        "tokens": ("int32", (3,)),
        "lengths": ("int32", (3,)),
        "ids": ("int64", (3,)),
        "unused_id": ("int64", ()),
    }
    assert kept["texts"].tolist() == [1, 2] and kept["lengths"].tolist() == [1, 0, 2]
    assert kept["ids"].tolist() == [11, 10, 12] and kept["tokens"].tolist() == [1, 2, 2]
    own = hashlib.blake2b(np.array([4], np.int32).tobytes(), digest_size=16).digest()
    assert kept["prompts"][1].tobytes() == own


def test_the_latest_answers_to_other_prompts_are_as_many_as_fit():
    """One of each prompt, the last that was answered last, after a checkpoint, too."""
    history = History(9)
    texts = {1: [1] * 4, 2: [2] * 5, 3: [3] * 2, 4: [4] * 3}
    history.add(finished(prompt_of(one), 10 + one, text) for one, text in texts.items())
    history.add([finished(prompt_of(2), 20, [5])])  # it is the latest now, and its text another
    resumed = History(9)
    resumed.restore(history.state())
    for known in (history, resumed):
        for prompt, wanted in ((9, [3, 4, 5]), (2, [1, 3, 4]), (4, [1, 3, 5])):
            found = known.of_others(prompt_of(prompt))
            assert [text[0] for text in found] == wanted, prompt
    (asked,) = requests([prompt_of(9)], 1, 7, 50, history, RULES["replayable"])
    assert [text.tolist() for text in asked.others] == [[3, 3], [4, 4, 4], [5]]
    assert not History(0).of_others(prompt_of(1)) and not asked.history


def test_a_history_that_keeps_nothing_still_knows_the_ids():
    full = History(9)
    full.add([finished(prompt_of(1), 40, [1, 2])])
    nothing = History(0)
    nothing.restore(full.state())
    assert nothing.unused_id == 41 and nothing.of(prompt_of(1)) == {}


def test_the_history_of_many_long_prompts_stays_small():
    """Of 17,000 prompts of 2,048 tokens, each with 256 tokens of answers."""
    history = History(size=256)
    text = [1] * 255
    history.add(finished(np.full(2048, number, np.int32), number, text) for number in range(17_000))
    kept = history.state()
    assert sum(array.nbytes for array in kept.values()) < 20e6
    assert len(kept["prompts"]) == 17_000
    large = History(size=1 << 16)
    large.add(finished(prompt_of(number), number, [0] * 65_535) for number in range(200))
    kept = large.state()
    assert kept["tokens"].nbytes < 34e6 and len(kept["prompts"]) == 128


@pytest.mark.parametrize(
    ("rule", "repeated", "used", "first", "wanted"),
    [
        ("replayable", 0, (), 50, [(50, 51, 52), (53, 54, 55)]),
        ("replayable", 1, (), 50, [(6, 51, 52), (8, 54, 55)]),
        ("replayable", 2, (), 50, [(4, 6, 52), (8, 54, 55)]),
        ("replayable", 3, (), 50, [(2, 4, 6), (8, 54, 55)]),
        ("replayable", 2, (6, 8), 50, [(2, 4, 52), (53, 54, 55)]),
        ("replayable", 2, (), 3, [(4, 6, 5), (8, 7, 8)]),  # whoever asks gives ids that are new
        ("rejection", 0, (), 50, [(50, 51, 52), (53, 54, 55)]),
        ("rejection", 0, (), 3, [(9, 10, 11), (12, 13, 14)]),
        ("rejection", 0, (), 9, [(9, 10, 11), (12, 13, 14)]),
        ("rejection", 2, (), 50, [(50, 51, 52), (53, 54, 55)]),
    ],
)
def test_noise_is_repeated_as_asked_and_never_where_texts_depend_on_drafts(
    rule, repeated, used, first, wanted
):
    history = History(99)
    history.add(finished(prompt_of(0), sample_id, [sample_id]) for sample_id in (2, 4, 6))
    history.add([finished(prompt_of(1), 8, [8])])
    given = set(used)
    prompts = [prompt_of(0), prompt_of(1)]
    options = {"repeated": repeated} if repeated else {}
    asked = requests(prompts, 3, 7, first, history, RULES[rule], used=given, **options)
    assert [one.sample_ids for one in asked] == wanted
    assert given - set(used) == {i for ids in wanted for i in ids} & {2, 4, 6, 8} - set(used)
    for prompt, one in zip(prompts, asked, strict=True):
        assert one.max_new_tokens == 7 and one.prompt is prompt
        assert list(one.earlier) == list(history.of(prompt))
        assert [text.tolist() for text in one.history] == [[i] for i in one.earlier]
