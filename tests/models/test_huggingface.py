"""Hugging Face folders: logits equal transformers', weights survive a round trip, bad folders are
refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from places import GOLDEN
from safetensors.numpy import load_file, save_file

from rlhf_jax.models import transformer
from rlhf_jax.models.families import FAMILIES, QWEN2, QWEN3
from rlhf_jax.models.families.family import LAYER_WEIGHTS, Family
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.huggingface_config import read_config
from rlhf_jax.models.files.source import open_source
from rlhf_jax.types import Model, ModelConfig, RopeScaling

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))
TOLERANCE = 2e-4


@jax.jit
def logits_of(model: Model, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return transformer.logits(model, transformer.forward(model, tokens, positions)[0])


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    stored = load_file(GOLDEN / name / "golden.safetensors")
    return stored["tokens"], stored["logits"]


def live_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: only golden files are compared"
    )
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def assert_same(one: Model, other: Model) -> None:
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("reference", ["golden", "live"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, reference: str):
    tokens, expected = golden(name)
    if reference == "live":
        expected = live_logits(GOLDEN / name, tokens)
    actual = logits_of(huggingface.load(GOLDEN / name, jnp.float32), jnp.asarray(tokens))
    np.testing.assert_allclose(np.asarray(actual), expected, atol=TOLERANCE, rtol=0)


def test_golden_models_cover_every_family_tied_and_untied():
    configs = [read_config(GOLDEN / name) for name in CASES]
    assert {(config.family, config.tied) for config in configs} == {
        (family, tied) for family in FAMILIES for tied in (False, True)
    }
    scalings = {config.rope_scaling.kind for config in configs if config.rope_scaling}
    assert scalings == {"llama3", "linear"}


@pytest.mark.parametrize("name", CASES)
def test_saved_folder_loads_again(name: str, tmp_path: Path):
    model = huggingface.load(GOLDEN / name, jnp.float32)
    ends = huggingface.end_tokens(GOLDEN / name)
    stops = ends["config.json"]
    huggingface.save(tmp_path / "saved", model, None, stops, jnp.float32)
    assert_same(huggingface.load(tmp_path / "saved", jnp.float32), model)
    assert huggingface.end_tokens(tmp_path / "saved") == ends


@pytest.mark.parametrize("name", CASES)
def test_saved_folder_gives_the_same_logits_in_transformers(name: str, tmp_path: Path):
    model = huggingface.load(GOLDEN / name, jnp.float32)
    huggingface.save(tmp_path / "saved", model, None, (2,), jnp.float32)
    tokens, expected = golden(name)
    np.testing.assert_allclose(
        live_logits(tmp_path / "saved", tokens), expected, atol=TOLERANCE, rtol=0
    )


def test_sharded_files_and_unrolled_layers_save_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    model = huggingface.load(GOLDEN / "qwen3", jnp.float32)
    huggingface.save(tmp_path / "sharded", transformer.unstack(model), None, (2,), jnp.float32)
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 3
    assert_same(huggingface.load(tmp_path / "sharded", jnp.float32), model)


def test_bfloat16_files_are_read_and_written_exactly(tmp_path: Path):
    model = huggingface.load(GOLDEN / "qwen2_tied", jnp.bfloat16)
    assert model.embed.dtype == jnp.bfloat16
    assert_same(
        transformer.cast(model, jnp.float32), huggingface.load(GOLDEN / "qwen2_tied", jnp.float32)
    )
    huggingface.save(tmp_path / "saved", model, None, (), jnp.bfloat16)
    assert_same(huggingface.load(tmp_path / "saved", jnp.bfloat16), model)
    assert huggingface.end_tokens(tmp_path / "saved") == {}


def test_saving_replaces_an_older_folder_whole(tmp_path: Path):
    for name in ("llama", "qwen2_tied"):
        huggingface.save(
            tmp_path / "saved",
            huggingface.load(GOLDEN / name, jnp.float32),
            None,
            (2,),
            jnp.float32,
        )
    assert read_config(tmp_path / "saved").family == "qwen2"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def shardings_of(config: ModelConfig, mesh: Mesh) -> Model:
    """Every weight split over all devices along its last axis that divides evenly, or kept
    whole.
    """

    def choose(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
        split = ["all" if axes and axis == axes[-1] else None for axis in range(leaf.ndim)]
        return NamedSharding(mesh, PartitionSpec(*split))

    return jax.tree.map(choose, transformer.abstract_weights(config))


def test_each_device_reads_only_its_own_part(monkeypatch: pytest.MonkeyPatch):
    config = read_config(GOLDEN / "llama")
    shardings = shardings_of(config, Mesh(np.array(jax.devices()[:4]), ("all",)))
    make = jax.make_array_from_callback
    parts = []

    def recording(shape, sharding, callback: Callable, dtype: np.dtype):
        def record(index):
            part = callback(index)
            parts.append((part.shape, sharding.shard_shape(shape)))
            return part

        return make(shape, sharding, record, dtype=dtype)

    monkeypatch.setattr(jax, "make_array_from_callback", recording)
    sharded = huggingface.load(GOLDEN / "llama", jnp.float32, shardings)
    assert parts and all(read == own for read, own in parts)
    assert isinstance(sharded.layers, dict) and isinstance(shardings.layers, dict)
    query = cast(jax.Array, sharded.layers["query"])
    assert query.sharding == shardings.layers["query"]
    assert not query.is_fully_replicated
    monkeypatch.undo()
    assert_same(sharded, huggingface.load(GOLDEN / "llama", jnp.float32))


def edited(tmp_path: Path, name: str, **changes) -> Path:
    """A copy of a golden folder with keys of config.json changed; None takes a key out."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    (folder / "golden.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["llama3", "linear"])
def test_old_rope_keys_mean_the_same(name: str, tmp_path: Path):
    rope = json.loads((GOLDEN / name / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    folder = edited(tmp_path, name, rope_parameters=None, rope_scaling=rope, rope_theta=theta)
    config = read_config(GOLDEN / name)
    assert isinstance(config.rope_scaling, RopeScaling)
    assert read_config(folder) == config


def test_contexts_stay_inside_a_sliding_window(tmp_path: Path):
    assert read_config(GOLDEN / "mistral").max_context == 32
    assert read_config(GOLDEN / "mistral_tied").max_context == 128
    unused = edited(tmp_path, "qwen2", sliding_window=16, use_sliding_window=False)
    assert read_config(unused).max_context == 128
    used = edited(tmp_path, "qwen3", sliding_window=16, use_sliding_window=True)
    assert read_config(used).max_context == 16


def test_llama_without_newer_keys_takes_their_defaults(tmp_path: Path):
    folder = edited(
        tmp_path, "llama", num_key_value_heads=None, head_dim=None, rope_parameters=None
    )
    assert read_config(folder) == read_config(GOLDEN / "llama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "mamba"]}, "mamba"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not supported",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks the key 'factor'"),
        ({"intermediate_size": None}, "the key 'intermediate_size' of a llama model is missing"),
        ({"num_attention_heads": 3}, "3 attention heads cannot share 4"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "a classifier of 2 labels is not supported",
        ),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    changes: dict, message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        read_config(edited(tmp_path, "llama", **changes))


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), rf"'{GATE}' \[64, 32\] of a llama model of 2 layers is missing"),
        (
            lambda t: t.update({GATE: t[GATE].T.copy()}),
            rf"'{GATE}' has shape \[32, 64\].* needs \[64, 32\]",
        ),
        (lambda t: t.update({"model.other": t[GATE]}), r"'model.other' \[64, 32\] has no place"),
        (
            lambda t: t.update({GATE: t[GATE].astype(np.int8)}),
            "is of type I8; only F64, F32, F16, BF16",
        ),
    ],
)
def test_wrong_tensors_are_named(change: Callable, message: str, tmp_path: Path):
    folder = edited(tmp_path, "llama")
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder, jnp.float32)


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "not a safetensors file"), (1000, "truncated"), (100_000, "needs 1614")],
)
def test_truncated_weights_are_refused(size: int, message: str, tmp_path: Path):
    folder = edited(tmp_path, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder, jnp.float32)


def test_missing_files_are_named(tmp_path: Path):
    folder = edited(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        huggingface.load(folder, jnp.float32)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="nothing is unpickled"):
        huggingface.load(folder, jnp.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        huggingface.load(folder, jnp.float32)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        huggingface.load(folder, jnp.float32)


def test_a_missing_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 50_000)
    model = huggingface.load(GOLDEN / "llama", jnp.float32)
    huggingface.save(tmp_path / "sharded", model, None, (), jnp.float32)
    shard = sorted((tmp_path / "sharded").glob("model-00002-*"))[0]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        huggingface.load(tmp_path / "sharded", jnp.float32)


def test_what_old_files_repeat_is_passed_over(tmp_path: Path):
    folder = edited(tmp_path, "llama3_tied")
    extra = {
        "lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert_same(
        huggingface.load(folder, jnp.float32), huggingface.load(GOLDEN / "llama3_tied", jnp.float32)
    )


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_saved_files_honour_the_umask(mask, tiny: ModelConfig, tmp_path: Path):
    before = os.umask(mask)
    try:
        model = transformer.init(jax.random.key(0), tiny)
        huggingface.save(tmp_path / "saved", model, None, (), jnp.float32)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask} and "model.safetensors" in modes


def test_a_head_that_the_configuration_does_not_know_is_not_saved(tmp_path: Path):
    model = huggingface.load(GOLDEN / "llama", jnp.float32)
    scalar = dataclasses.replace(model, head=jnp.zeros((32, 1), jnp.float32))
    with pytest.raises(ValueError, match="300 outputs are configured, the head has 1"):
        huggingface.save(tmp_path / "saved", scalar, None, (), jnp.float32)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("place", ["model.layers.1.mlp.up_proj.weight", "score.weight"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float, place: str):
    folder = tmp_path / "bad"
    shutil.copytree(GOLDEN / "llama_reward", folder)
    tensors = load_file(folder / "model.safetensors")
    open_source(folder).load(jnp.float32)
    tensors[place] = tensors[place].copy()
    tensors[place][0, 3] = bad
    save_file(tensors, folder / "model.safetensors")
    where = "'head'" if place == "score.weight" else "'up' of layer 1"
    with pytest.raises(ValueError, match=f"bad: weight {where} is not finite in float32"):
        open_source(folder).load(jnp.float32)


def test_source_errors(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="No model at"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        open_source(GOLDEN / "llama")


def test_a_hub_name_without_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match="No folder some/model, and the hub gave none: no route to host"
    ):
        open_source("some/model")


def test_init_has_the_layout_that_is_saved(tiny: ModelConfig, tmp_path: Path):
    config = dataclasses.replace(tiny, tied=False, norm_eps=1e-6)
    model = transformer.init(jax.random.key(0), config)
    assert isinstance(model.layers, dict)
    huggingface.save(tmp_path / "saved", model, None, (2,), jnp.float32)
    assert_same(huggingface.load(tmp_path / "saved", jnp.float32), model)


def test_a_family_is_one_entry_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A toy with both biases and norms, windows, and a name of its own for one weight."""
    gate = LAYER_WEIGHTS["gate"]._replace(huggingface="model.layers.{layer}.mlp.w1.weight")
    toy = Family(
        name="toy",
        class_prefix="Toy",
        models="Toy 1",
        required_keys=("head_dim",),
        always_windowed=True,
        weights={**QWEN2.weights, **QWEN3.weights, "gate": gate},
    )
    folder = tmp_path / "toy"
    config = ModelConfig("toy", 40, 16, 24, 2, 2, 1, 8, 64)
    monkeypatch.setitem(FAMILIES, toy.name, toy)
    model = transformer.init(jax.random.key(0), config)
    huggingface.save(folder, model, None, (2,), jnp.float32)
    assert_same(huggingface.load(folder, jnp.float32), model)
    assert "model.layers.1.mlp.w1.weight" in load_file(folder / "model.safetensors")

    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == "toy" and written["architectures"] == ["ToyForCausalLM"]
    (folder / "config.json").write_text(json.dumps(written | {"sliding_window": 8}))
    assert read_config(folder).max_context == 8
    del written["head_dim"]
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="the key 'head_dim' of a toy model is missing"):
        read_config(folder)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"'toy' is not supported; .* and qwen3"):
        read_config(folder)
