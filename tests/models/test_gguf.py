"""GGUF files: the same model as the Hugging Face folder, and the greedy text that transformers
writes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import Kind, write_gguf
from places import GOLDEN

from rlhf_jax.models import transformer
from rlhf_jax.models.families import FAMILIES, QWEN3
from rlhf_jax.models.families.family import LAYER_WEIGHTS, Family
from rlhf_jax.models.files import gguf, gguf_file, huggingface
from rlhf_jax.models.files.source import find_ends, open_source
from rlhf_jax.types import Model, ModelConfig, RopeScaling

CASES = ["llama", "llama_tied", "llama3_tied", "linear", "qwen2", "qwen3_tied"]


def golden_model(name: str) -> Model:
    return huggingface.load(GOLDEN / name, jnp.float32)


def with_llama3_factors(model: Model) -> Model:
    """GGUF keeps no original context: only the published 8192 can be recognised."""
    scaling = model.config.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return model
    published = RopeScaling("llama3", scaling.factor)
    config = dataclasses.replace(model.config, rope_scaling=published, rope_theta=500_000.0)
    return dataclasses.replace(model, config=config)


@pytest.mark.parametrize("name", CASES)
def test_gguf_and_folder_give_the_same_model(name: str, tmp_path: Path):
    model = with_llama3_factors(golden_model(name))
    source = open_source(write_gguf(tmp_path / "model.gguf", model))
    assert source.config == model.config
    assert source.stop_tokens == (2, 5)
    jax.tree.map(np.testing.assert_array_equal, source.load(jnp.float32), model)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_weights_are_near(kind: Kind, tmp_path: Path):
    model = golden_model("llama")
    loaded = open_source(write_gguf(tmp_path / "model.gguf", model, kind)).load(jnp.float32)
    bound = {Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2}.get(kind, 0.2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=bound), loaded, model)


def test_bad_files_are_refused(tmp_path: Path):
    whole = write_gguf(tmp_path / "whole.gguf", golden_model("llama")).read_bytes()
    with pytest.raises(FileNotFoundError, match="is missing"):
        open_source(tmp_path / "nowhere.gguf")
    for size, message in [
        (0, "only the beginning"),
        (500, "only the beginning"),
        (-5000, "is truncated"),
    ]:
        (tmp_path / "part.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=message):
            open_source(tmp_path / "part.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        open_source(tmp_path / "other.gguf")


def test_other_architectures_and_tokenizers_are_refused(tmp_path: Path):
    model = golden_model("llama")
    with pytest.raises(
        ValueError, match="architecture 'gemma3' is not supported; supported are llama"
    ):
        open_source(write_gguf(tmp_path / "a.gguf", model, family="gemma3"))
    with pytest.raises(
        ValueError, match=r"'blk\.0\.attn_q_norm\.weight' \[8\] of a qwen3 model .* is missing"
    ):
        open_source(write_gguf(tmp_path / "b.gguf", model, family="qwen3"))
    with pytest.raises(ValueError, match="rope scaling 'yarn' is not supported"):
        open_source(write_gguf(tmp_path / "c.gguf", model, llama__rope__scaling__type="yarn"))


def test_a_family_is_one_entry_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A toy with an architecture of its own, and a name of its own for one weight."""
    gate = LAYER_WEIGHTS["gate"]._replace(gguf="blk.{layer}.ffn_w1.weight")
    toy = Family(
        name="toy",
        class_prefix="Toy",
        weights={**QWEN3.weights, "gate": gate},
        gguf_architecture="toy-architecture",
    )
    monkeypatch.setitem(FAMILIES, toy.name, toy)
    config = ModelConfig("toy", 40, 16, 24, 2, 2, 1, 8, 64)
    model = transformer.init(jax.random.key(0), config)
    path = write_gguf(tmp_path / "toy.gguf", model, family="toy-architecture")
    assert "blk.1.ffn_w1.weight" in gguf_file.open_file(path).tensors
    source = open_source(path)
    assert source.config == config
    jax.tree.map(np.testing.assert_array_equal, source.load(jnp.float32), model)


def changed(file: gguf_file.File, **metadata) -> gguf_file.File:
    renamed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return gguf_file.File(file.path, {**file.metadata, **renamed}, file.tensors)


def test_pre_tokenizers_that_are_unknown_are_refused(tmp_path: Path):
    file = gguf_file.open_file(write_gguf(tmp_path / "model.gguf", golden_model("llama")))
    with pytest.raises(ValueError, match="pre-tokenizer 'tekken' is not supported"):
        gguf.read_tokenizer(changed(file, pre="tekken"))
    with pytest.raises(ValueError, match="tokenizer 'llama' is not supported; only byte-level BPE"):
        gguf.read_tokenizer(changed(file, model="llama"))
    assert gguf.read_tokenizer(changed(file, pre="llama-bpe", bos_token_id=1)).encode("")[:1] == [1]
    assert gguf.read_tokenizer(changed(file, pre="qwen2", bos_token_id=1)).encode("") == []


def test_every_end_of_the_metadata_ends_a_text(tmp_path: Path):
    file = gguf_file.open_file(write_gguf(tmp_path / "model.gguf", golden_model("llama")))
    more = changed(file, eom_token_id=7, bos_token_id=9, padding_token_id=4)
    assert gguf.end_tokens(more) == {"model.gguf": (2, 5, 7)}
    assert gguf.end_tokens(changed(file, eos_token_id=None, eot_token_id=2)) == {"model.gguf": (2,)}
    assert gguf.repeated(more)["config.json"] == {"bos_token_id": 9, "pad_token_id": 4}
    templated = changed(more, **{"eot_token_id": None, "eom_token_id": None})
    metadata = {**templated.metadata, gguf.TEMPLATE: "{{ messages[-1].content }}" + chr(256)}
    tokenizer = gguf.read_tokenizer(dataclasses.replace(templated, metadata=metadata))
    ends = find_ends(gguf.end_tokens(templated), tokenizer)
    assert ends.sources == {
        "model.gguf": (2,),
        "the tokenizer's eos_token": (2,),
        "the chat template": (0,),
    }
    assert ends.tokens == (2, 0)


@pytest.mark.parametrize("key", sorted(gguf.METADATA_KINDS))
def test_metadata_of_the_wrong_kind_is_a_sentence(key: str, tmp_path: Path):
    file = gguf_file.open_file(write_gguf(tmp_path / "model.gguf", golden_model("llama")))
    for value in (5, [1]):
        wrong = dataclasses.replace(file, metadata={**file.metadata, key: value})
        with pytest.raises(ValueError, match=rf"model\.gguf: {key} is .*; it must be"):
            gguf.read_tokenizer(wrong)


@jax.jit
def likeliest_next(model: Model, tokens: jax.Array, at: jax.Array) -> jax.Array:
    """The likeliest token [B, T] after each of the positions `at` [B, T] of tokens [B, Q]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = transformer.forward(model, tokens, positions)
    chosen = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
    return jnp.argmax(transformer.logits(model, chosen), axis=-1).astype(jnp.int32)


def test_smollm2_writes_the_same_greedy_text_as_transformers(smollm2: Path):
    """Each golden token is the likeliest after those before it: by induction the greedy texts are
    equal.
    """
    samples = json.loads((GOLDEN / "greedy.json").read_text())
    source = open_source(smollm2)
    prompts = [source.tokenizer.encode_chat(sample["chat"]) for sample in samples]
    assert prompts == [sample["prompt"] for sample in samples]
    rows = [prompt + sample["text"] for prompt, sample in zip(prompts, samples, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    at = np.zeros((len(rows), 24), np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        tokens[row, : len(ids)] = ids
        at[row] = np.arange(24) + len(prompt) - 1
    texts = np.asarray(
        likeliest_next(source.load(jnp.float32), tokens, np.minimum(at, tokens.shape[1] - 1))
    )
    for sample, text in zip(samples, texts.tolist(), strict=True):
        # Where the two best logits are this close, either is right.
        for expected, actual, gap in zip(sample["text"], text, sample["gaps"], strict=False):
            assert actual == expected or gap < 1e-3, sample["chat"]


@pytest.mark.slow
def test_smollm2_saved_as_a_folder_is_the_same_model(smollm2: Path, tmp_path: Path):
    source = open_source(smollm2)
    model = source.load(jnp.bfloat16)
    huggingface.save(tmp_path / "saved", model, source.tokenizer, source.stop_tokens, jnp.bfloat16)
    saved = open_source(tmp_path / "saved")
    assert saved.config == source.config and saved.stop_tokens == source.stop_tokens == (2,)
    jax.tree.map(np.testing.assert_array_equal, saved.load(jnp.bfloat16), model)
    chat = [{"role": "user", "content": "Write one sentence about the sea."}]
    assert saved.tokenizer.encode_chat(chat) == source.tokenizer.encode_chat(chat)
