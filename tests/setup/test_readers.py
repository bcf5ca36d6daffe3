"""Models that read the policy's tokens: their tokenizers, and the padding of a classifier."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import tiny_run

from rlhf_jax.config import command_line
from rlhf_jax.models.files.source import open_source
from rlhf_jax.setup.run_spec import prepare
from rlhf_jax.setup.sample_checks import check_tokenizers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model, a classifier, and one whose tokens have other ids."""
    place = tmp_path_factory.mktemp("models")
    tiny_run.make_files(place)
    tiny_run.make_model(place / "tiny")
    tiny_run.make_model(place / "classifier", scalar_head=True, tied=False)
    shutil.copytree(place / "classifier", place / "other")
    document = json.loads((place / "other" / "tokenizer.json").read_text())
    ids = document["model"]["vocab"]
    document["model"]["vocab"] = dict(zip(ids, [*list(ids.values())[1:], 0], strict=True))
    (place / "other" / "tokenizer.json").write_text(json.dumps(document))
    return place


def read(place, **changes):
    return command_line.read(tiny_run.arguments(place, place / "tiny", **changes))


def test_a_critic_of_another_tokenizer_is_refused(folders, one_device):
    prepare(read(folders, critic__path=folders / "classifier", **tiny_run.PPO))
    with pytest.raises(ValueError, match=r"critic\.path has another tokenizer .* of the critic;"):
        prepare(read(folders, critic__path=folders / "other", **tiny_run.PPO))


@pytest.mark.parametrize("key", ["kl.reference", "critic.path"])
def test_a_model_that_cannot_read_every_token_is_refused(folders, one_device, key):
    """As a policy may write the tokens that pad its vocabulary."""
    kind = {"scalar_head": key == "critic.path", "tied": False}
    small, large = (
        tiny_run.make_model(folders / f"{key}-{size}", vocab_size=size, **kind)
        for size in (320, 384)
    )
    policy = tiny_run.make_model(folders / "padded", vocab_size=384)

    def prepared(model, other):
        changes = tiny_run.PPO | {key.replace(".", "__"): other}
        prepare(command_line.read(tiny_run.arguments(folders, model, **changes)))

    with pytest.raises(ValueError, match=rf"{key} has a vocabulary of 320, .* write 384 tokens;"):
        prepared(policy, small)
    prepared(folders / "tiny", large)


def test_only_a_critic_may_lack_an_added_token(folders):
    plain = open_source(folders / "tiny").tokenizer
    backend = copy.deepcopy(plain.backend)
    backend.add_special_tokens(["<|padding|>"])
    policy = dataclasses.replace(plain, backend=backend)
    check_tokenizers(policy, policy, plain)
    with pytest.raises(ValueError, match=r"kl\.reference has another tokenizer .*'<\|padding\|>'"):
        check_tokenizers(policy, plain, policy)


def test_a_classifier_learns_before_its_own_padding(folders, one_device):
    """Where it is read later, as its folder names that token; the language model names none."""
    row = {"prompt": "Say a", "chosen": "a", "rejected": "b"}
    (folders / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    changes = {
        "algorithm__name": "reward_model",
        "data__train": folders / "pairs.jsonl",
        "data__rows_per_step": 1,
        "data__max_response_tokens": 16,
        "reward__functions": "()",
        "evaluation__every": 0,
    }
    ((first, _),) = prepare(read(folders, **changes)).given
    file = folders / "classifier" / "config.json"
    document = json.loads(file.read_text()) | {"pad_token_id": int(first.tokens[-1])}
    file.write_text(json.dumps(document))
    ((own, _),) = prepare(read(folders, critic__path=file.parent, **changes)).given
    assert own.tokens.tolist() == first.tokens[:-1].tolist()
