"""Reward models: scores equal transformers', padding and batches change nothing, folders survive a
round trip.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDEN

from rlhf_jax import mesh as meshes
from rlhf_jax.mesh import Layout
from rlhf_jax.models import transformer
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import Source, open_source
from rlhf_jax.models.shardings import model_shardings
from rlhf_jax.rewards.combination import Response
from rlhf_jax.rewards.models import RewardModel, model_scorer
from rlhf_jax.types import Model, ModelConfig

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/scores.json"))
TOLERANCE = 2e-5
SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


def golden(name: str) -> tuple[list[list[dict]], np.ndarray]:
    cases = json.loads((GOLDEN / name / "scores.json").read_text())
    return [case["messages"] for case in cases], np.array(
        [case["score"] for case in cases], np.float32
    )


def answer(chat: list[dict]) -> Response:
    return Response(chat[-2]["content"], chat[:-1], {}, chat[-1]["content"])


def scored(source: Source, chats: list[list[dict]], rows: int = 3, bucket: int = 16, **options):
    model = source.load(jnp.float32)
    return model_scorer(RewardModel(source, model, rows, bucket), **options)(
        [answer(chat) for chat in chats]
    )


def live_scores(folder: Path, chats: list[list[dict]]) -> list[float]:
    """What transformers gives, each conversation alone, then all in one padded batch, which must
    agree.
    """
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: only golden files are compared"
    )
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    with torch.no_grad():
        alone = [
            model(**tokenizer.apply_chat_template([chat], **options)).logits.item()
            for chat in chats
        ]
        together = model(**tokenizer.apply_chat_template(chats, **options)).logits[:, 0].tolist()
    np.testing.assert_allclose(together, alone, atol=TOLERANCE)
    return together


@pytest.mark.parametrize("reference", ["golden", "live"])
@pytest.mark.parametrize("name", CASES)
def test_scores_equal_transformers(name: str, reference: str):
    chats, expected = golden(name)
    if reference == "live":
        expected = live_scores(GOLDEN / name, chats)
    scores = scored(open_source(GOLDEN / name), chats)
    assert scores.values.dtype == np.float32 and not scores.failures
    np.testing.assert_allclose(scores.values, expected, atol=TOLERANCE, rtol=0)


def test_the_token_that_is_read_is_the_last_that_is_no_padding():
    """With <|end|> as padding the final one is not read, without any padding token it is."""
    source = open_source(GOLDEN / "qwen2_reward")
    model = source.load(jnp.float32)
    tokens = source.tokenizer.encode_chat(SHORT, add_generation_prompt=False)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    every = transformer.logits(
        model, transformer.forward(model, jnp.array([tokens]), positions)[0]
    )[0, :, 0]
    assert source.tokenizer.backend.decode(tokens[-2:], skip_special_tokens=False) == "!<|end|>"
    np.testing.assert_allclose(scored(source, [SHORT]).values, every[-2:-1], atol=TOLERANCE)
    assert abs(float(every[-1] - every[-2])) > 0.01


def test_without_a_padding_token_the_very_last_is_read(tmp_path: Path):
    folder = copied(tmp_path, GOLDEN / "llama_reward", pad_token_id=None)
    np.testing.assert_allclose(
        scored(open_source(folder), [SHORT]).values, golden("llama_reward")[1][:1], atol=1e-5
    )


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (4, 64), (8, 16)])
def test_batches_and_padding_change_nothing(rows: int, bucket: int):
    chats, expected = golden("llama_reward")
    scores = scored(open_source(GOLDEN / "llama_reward"), chats, rows, bucket)
    np.testing.assert_allclose(scores.values, expected, atol=TOLERANCE, rtol=0)


def test_scores_on_a_mesh():
    source = open_source(GOLDEN / "llama_reward")
    layout = Layout(meshes.make_mesh(1, 2, 2, jax.devices()[:4]))
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), source.config))
    model = source.load(jnp.float32, model_shardings(shapes, layout))
    chats, expected = golden("llama_reward")
    scores = model_scorer(RewardModel(source, model, 4, 16), layout)(
        [answer(chat) for chat in chats]
    )
    np.testing.assert_allclose(scores.values, expected, atol=TOLERANCE, rtol=0)


def test_few_programs_serve_many_calls(compilations):
    source = open_source(GOLDEN / "llama_reward")
    score = model_scorer(RewardModel(source, source.load(jnp.float32), 2, 64))
    score([answer(SHORT)])
    with compilations() as seen:
        score([answer(chat) for chat in golden("llama_reward")[0]])
    assert not seen


def test_a_conversation_beyond_the_context_fails_alone():
    chats, expected = golden("llama_reward")
    long = [SHORT[0], {"role": "assistant", "content": "a" * 64}]
    scores = scored(open_source(GOLDEN / "llama_reward"), [long, chats[0]])
    assert scores.failures == {0: "has 70 tokens, the context is 1 to 64"}
    assert np.isnan(scores.values[0]) and scores.values[1] == pytest.approx(
        expected[0], abs=TOLERANCE
    )


def test_only_a_model_that_never_scored_may_not_fail_on_all():
    source = open_source(GOLDEN / "llama_reward")
    score = model_scorer(RewardModel(source, source.load(jnp.float32), 1, 16))
    short = answer(SHORT)
    long = answer([SHORT[0], {"role": "assistant", "content": "a" * 64}])
    with pytest.raises(
        ValueError, match="llama_reward failed on all 1 answers; the first one has 70 tokens"
    ):
        score([long])
    assert not score([short]).failures
    scores = score([long, long])
    assert list(scores.failures) == [0, 1] and np.isnan(scores.values).all()


def test_a_chat_that_the_template_refuses_fails_alone(tmp_path: Path):
    folder = copied(tmp_path, GOLDEN / "llama_reward")
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    template = folder / "chat_template.jinja"
    template.write_text(strict + template.read_text())
    chats, expected = golden("llama_reward")
    scores = scored(open_source(folder), chats)
    assert list(scores.failures) == [1] and "no system here" in scores.failures[1]
    np.testing.assert_allclose(scores.values[[0, 2, 3]], expected[[0, 2, 3]], atol=TOLERANCE)


def test_without_a_template_texts_stand_one_after_the_other(tmp_path: Path):
    folder = copied(tmp_path, GOLDEN / "llama_reward")
    (folder / "chat_template.jinja").unlink()
    source = open_source(folder)
    model = source.load(jnp.float32)
    tokens = jnp.array([source.tokenizer.encode("HiHello!")])
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    expected = transformer.logits(model, transformer.forward(model, tokens, positions)[0])[0, -1]
    np.testing.assert_allclose(scored(source, [SHORT]).values, expected, atol=TOLERANCE)


def test_a_language_model_is_no_reward_model():
    source = open_source(GOLDEN / "llama_reward")
    source = dataclasses.replace(
        source, config=dataclasses.replace(source.config, scalar_head=False)
    )
    with pytest.raises(
        ValueError, match="llama_reward is a language model; a reward model is a folder of"
    ):
        RewardModel(source, source.load(jnp.float32), 1, 1)


def saved(folder: Path, family: str, tiny: ModelConfig) -> Model:
    """A random reward model, written to a folder."""
    config = dataclasses.replace(tiny, family=family, tied=False, scalar_head=True)
    model = transformer.init(jax.random.key(1), config)
    tokenizer = open_source(GOLDEN / "llama_reward").tokenizer
    huggingface.save(folder, model, tokenizer, (257,), jnp.float32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_classifier_loads_again(family: str, tmp_path: Path, tiny: ModelConfig):
    model = saved(tmp_path / "saved", family, tiny)
    source = open_source(tmp_path / "saved")
    assert source.config == model.config
    jax.tree.map(np.testing.assert_array_equal, source.load(jnp.float32), model)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["architectures"] == [f"{FAMILIES[family].class_prefix}ForSequenceClassification"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_classifier_scores_the_same_in_transformers(
    family: str, tmp_path: Path, tiny: ModelConfig
):
    saved(tmp_path / "saved", family, tiny)
    folder = copied(tmp_path, tmp_path / "saved", pad_token_id=256)
    chats = golden("llama_reward")[0]
    expected = live_scores(folder, chats)
    np.testing.assert_allclose(
        scored(open_source(folder), chats).values, expected, atol=TOLERANCE, rtol=0
    )


def copied(tmp_path: Path, original: Path, **changes) -> Path:
    """A copy of a model's folder with keys of config.json changed."""
    folder = tmp_path / "copy"
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
