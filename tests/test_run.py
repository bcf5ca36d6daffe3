"""The whole program: a run on a tiny model, its files, its devices, its mistakes."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rlhf_jax import command_line
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.metrics import REQUIRED
from rlhf_jax.model import huggingface
from rlhf_jax.model.source import open_source
from rlhf_jax.model.transformer import init
from rlhf_jax.types import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
STOPS = tuple(range(24))  # many, so that rows finish at different times
launch = runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of bytes, with its tokenizer."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    config = ModelConfig("llama", 320, 32, 64, 2, 4, 2, 8, 128, tied=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    model = init(jax.random.key(0), config)
    huggingface.save(place, model, Tokenizer(backend, TEMPLATE, {}, settings, place), STOPS, jnp.float32)
    return place


@pytest.fixture
def arguments(folder, tmp_path):
    """A command line that runs three small steps."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {word}"}) + "\n" for word in "abcdefgh"))
    reward = tmp_path / "reward.py"
    reward.write_text("def vowels(prompt, response, row):\n    return sum(c in 'aeiou' for c in response)\n")
    config = tmp_path / "config.py"
    config.write_text("from rlhf_jax.config import default as get_config\n")
    values = {
        "workdir": tmp_path / "run",
        "steps": 3,
        "model.path": folder,
        "compilation_cache": "",
        "data.train": prompts,
        "data.eval": prompts,
        "data.max_prompt_tokens": 24,
        "reward.function": f"{reward}:vowels",
        "generation.prompts_per_step": 4,
        "generation.samples_per_prompt": 4,
        "generation.max_new_tokens": 12,
        "generation.rows": 8,
        "generation.strategy": "lookup-chain-2",
        "generation.history_tokens": 32,
        "evaluation.every": 2,
        "training.learning_rate": 1e-3,
        "training.microbatch_rows": 8,
        "training.length_bucket": 36,
        "mesh.data": 1,
        "mesh.fsdp": 1,
    }

    def build(**changes) -> list[str]:
        merged = values | {name.replace("__", "."): value for name, value in changes.items()}
        return ["train.py", "--config", str(config), *(f"--config.{k}={v}" for k, v in merged.items())]

    return build


@pytest.fixture
def one_device(monkeypatch):
    """Only the first of the virtual devices."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_its_files(arguments, tmp_path, one_device, capsys):
    assert launch["main"](arguments()) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    steps = lines(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2] and all(set(REQUIRED) <= set(line) for line in steps)
    assert len(lines(run / "samples.jsonl")) == 3 * 16
    assert [line["step"] for line in lines(run / "evaluations.jsonl")] == [0, 2, 3]
    assert all(line["mismatch/max"] < 1e-4 and line["ratio/max"] == pytest.approx(1, abs=1e-4) for line in steps)
    assert steps[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and steps[2]["kl/mean"] > 1e-6
    trained = open_source(run / "policy").load(jnp.float32)
    assert not np.allclose(trained.embed, init(jax.random.key(0), trained.config).embed)


def test_the_same_seed_gives_the_same_run(arguments, tmp_path, one_device):
    texts = []
    for name in ("a", "b"):
        assert launch["main"](arguments(workdir=tmp_path / name)) == 0
        texts.append(lines(tmp_path / name / "samples.jsonl"))
    assert texts[0] == texts[1]


def test_a_strategy_changes_no_sample(arguments, folder, tmp_path, one_device):
    """The first step's samples are the same however they were drafted."""
    texts = []
    for name in ("plain", "lookup-tree-2x2", "model-chain-3"):
        changes = {"generation__strategy": name, "drafter__path": folder, "steps": 1, "evaluation__every": 0}
        assert launch["main"](arguments(workdir=tmp_path / name, **changes)) == 0
        texts.append([row["response"] for row in lines(tmp_path / name / "samples.jsonl")])
    assert texts[0] == texts[1] == texts[2]


def test_an_earlier_run_is_kept(arguments, tmp_path, one_device):
    for _ in range(2):
        assert launch["main"](arguments(steps=1, evaluation__every=0)) == 0
    earlier = tmp_path / "run" / "earlier-1"
    assert len(lines(earlier / "metrics.jsonl")) == 1 and (earlier / "policy" / "model.safetensors").exists()
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


def test_nothing_is_compiled_after_warm_up(arguments, tmp_path, one_device, monkeypatch, compilations):
    """Ten steps; what the first two compile is all."""
    seen_after, real = [], launch["rlhf"].step
    with compilations() as seen:

        def counted(*inputs, **options):
            out = real(*inputs, **options)
            seen_after.append(len(seen))
            return out

        monkeypatch.setattr(launch["rlhf"], "step", counted)
        assert launch["main"](arguments(steps=10, evaluation__every=0)) == 0
    assert seen_after[1] == seen_after[-1], seen_after


@pytest.mark.parametrize("strategy", ["lookup-chain-2", "model-tree-2x2"])
def test_eight_devices_give_the_text_and_losses_of_one(strategy, arguments, folder, tmp_path, monkeypatch):
    """Data x FSDP x tensor: the same samples while rows finish and shrink, losses within 1e-4, over two steps."""
    shapes = {"one": (1, 1, 1), "eight": (2, 2, 2)}
    devices, found = jax.devices(), {}
    for name, (data, fsdp, tensor) in shapes.items():
        used = devices[: data * fsdp * tensor]
        monkeypatch.setattr(jax, "devices", lambda *_, used=used: used)
        monkeypatch.setattr(jax, "device_count", lambda used=used: len(used))
        mesh = {"mesh__data": data, "mesh__fsdp": fsdp, "mesh__tensor": tensor}
        rows = {"generation__rows": 16, "generation__fewest_rows": 4, "generation__strategy": strategy}
        changes = {"workdir": tmp_path / name, "steps": 2, "drafter__path": folder}
        assert launch["main"](arguments(**mesh, **rows, **changes)) == 0
        run = tmp_path / name
        found[name] = [lines(run / f"{file}.jsonl") for file in ("samples", "evaluations", "metrics")]
    one, eight = found["one"], found["eight"]
    assert one[0] == eight[0] and [e["samples"] for e in one[1]] == [e["samples"] for e in eight[1]]
    for a, b in zip(one[2], eight[2], strict=True):
        assert b["generation/occupancy"] == a["generation/occupancy"] > 0.3
        for key in ("loss/policy", "kl/mean", "gradient/norm", "reward/mean"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


def test_top_k_is_renormalised_in_training(arguments, tmp_path, one_device):
    """The sampled sets travel into training: its law is the sampled one, so the ratio starts at 1."""
    assert launch["main"](arguments(generation__top_k=5, generation__temperature=0.8, evaluation__top_k=5)) == 0
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["mismatch/max"] < 1e-4 and line["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert 0 < line["entropy/estimate"] < np.log(5) + 0.3


BAD = {
    "missing model": ({"model__path": "/nowhere"}, "No model at /nowhere"),
    "unknown key": ({"generation__strategie": "plain"}, "did you mean 'generation.strategy'"),
    "wrong type": ({"steps": "many"}, "'steps' is of type int"),
    "unknown strategy": ({"generation__strategy": "chain"}, "Unknown strategy 'chain'"),
    "no drafter": ({"generation__strategy": "model-chain-2"}, "give drafter.path"),
    "top-p in training": ({"generation__top_p": 0.9}, "is for evaluation"),
    "top-k too large": ({"generation__top_k": 100}, "is for evaluation"),
    "batch not divisible": ({"training__minibatches": 3}, "cannot be split evenly"),
    "missing prompts": ({"data__train": "/nowhere.jsonl"}, "there is no file /nowhere.jsonl"),
    "missing reward": ({"reward__function": "nowhere.py:f"}, "there is no file nowhere.py"),
    "longer than the context": ({"generation__max_new_tokens": 300}, "the model's context is 128"),
    "devices that are not there": ({"mesh__data": 64}, "devices"),
    "a reward that cannot be imported": ({"reward__function": "no.such.module:f"}, "cannot be imported"),
    "too little memory": ({"mesh__device_memory_gb": 0.0001}, "A device needs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_before_long_work(case, arguments, one_device, capsys, tmp_path):
    changes, words = BAD[case]
    assert launch["main"](arguments(**changes)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("error: ")
    assert not (tmp_path / "run").exists(), "nothing is written before the checks"


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _other_architecture(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"gpt2"'))


def _ill_typed_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": null'))


def _larger_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["<extra>"] = 5000
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "model.safetensors"),
        (_other_architecture, "gpt2"),
        (_ill_typed_config, "is not a number"),
        (_larger_tokenizer, "Wrong tokenizer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_a_damaged_model_is_one_sentence(damage, words, arguments, folder, one_device, capsys, tmp_path):
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy)
    assert launch["main"](arguments(model__path=copy)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ('{"prompt": "a"}\n{oops\n', "Line 2"), ('{"question": "a"}\n', "has no 'prompt'")],
)
def test_a_broken_prompt_file_is_one_sentence(text, words, arguments, one_device, capsys, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(text)
    assert launch["main"](arguments(data__train=file)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_itself_fails_in_one_sentence():
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", "nowhere.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "There is no config file nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_own_loop_runs(folder, capsys):
    runpy.run_path(str(ROOT / "launch" / "own_loop.py"))["main"](str(folder), 2)
    printed = capsys.readouterr().out
    assert "step 0" in printed and "step 1" in printed
    assert len((ROOT / "launch" / "own_loop.py").read_text().splitlines()) <= 60


def test_the_generation_benchmark_prints_a_json_line_a_case(folder, monkeypatch, capsys):
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "generation.py"), run_name="benchmark")
    sizes = ["--batch", "1,4", "--prompt-tokens", "8", "--new-tokens", "8", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["generation.py", "--model", str(folder), "--strategy", "lookup-chain-2", *sizes])
    benchmark["main"]()
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case["batch"] for case in cases] == [1, 4]
    for case in cases:
        assert 1 <= case["tokens_per_round"] <= 3 and 8 / 3 <= case["rounds"] <= 8
        assert case["tokens_per_second"] > 0 and case["peak_memory_bytes"] > 0 and "compile_seconds" in case


def test_the_quickstart_config_is_valid():
    config = command_line.load(str(ROOT / "configs" / "quickstart.py"))
    assert config.reward.metrics.textblob and config.workdir and config.steps
