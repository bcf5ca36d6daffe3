"""Mistakes in what a run is given: how each is made, and what the one sentence says of it."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy

# When a mistake is found: before anything is written or loaded, before weights are loaded, or at
# work.
CHECKS, OPENING, WORK = range(3)
PAGE = 4096  # bytes that a file on a disk of memory is a multiple of


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a case lives: `home` is shared and never changed, `folder` is its own, `run` the
    workdir in it.
    """

    home: Path
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def copy(self, name: str) -> Path:
        """A model of `home` that may be damaged."""
        return Path(shutil.copytree(self.home / name, self.folder / "damaged"))

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def finished(self) -> Path:
        """The workdir, with a run of one step in it."""
        return Path(shutil.copytree(self.home / "finished", self.run))


Prepare = Callable[[Place], dict[str, Any]]  # makes the mistake; gives changes of the command line


@dataclasses.dataclass(frozen=True)
class Case:
    words: str  # that the sentence has
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the command line
    prepare: Prepare = lambda place: {}
    found: int = CHECKS
    program: str = "train"


def config(text: str) -> Prepare:
    """The mistake is the config file."""
    begin = "from rlhf_jax.config import default\n"
    return lambda place: {"config_file": place.file("config.py", begin + text)}


def prompts(text: str, name: str = "bad.jsonl") -> Prepare:
    """The mistake is the file of prompts."""
    return lambda place: {"data__train": place.file(name, text)}


def model(
    damage: Callable[[Path], object], name: str = "tiny", key: str = "model__path"
) -> Prepare:
    """The mistake is in a model's folder."""

    def prepare(place: Place) -> dict[str, Any]:
        copy = place.copy(name)
        damage(copy)
        return {key: copy}

    return prepare


def at_home(**names: str) -> Prepare:
    """The mistake is to give a file of `home`."""
    return lambda place: {key: f"{place.home}/{name}" for key, name in names.items()}


def finished(damage: Callable[[Place], object] = lambda place: None) -> Prepare:
    """The mistake is in the workdir, or in another command for it."""

    def prepare(place: Place) -> dict[str, Any]:
        place.finished()
        damage(place)
        return {}

    return prepare


def truncate(file: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - 100)


def replace(file: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return change


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file(tensors | {name: change(tensors[name])}, file)

    return damage


def content(name: str, own: bytes) -> Prepare:
    """The mistake is what a file of a model's folder holds."""
    return model(lambda folder: (folder / name).write_bytes(own))


def template(text: str) -> Prepare:
    """The mistake is the model's chat template."""
    return content("chat_template.jinja", text.encode())


def header(change: Callable[[bytes], bytes]) -> Prepare:
    """The mistake is in the header of the weights, which has its length before it."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        file.write_bytes(change(whole[:end]) + whole[end:])

    return model(damage)


def with_length(own: bytes) -> bytes:
    return len(own).to_bytes(8, "little") + own


def gguf(own: bytes) -> Prepare:
    """The mistake is a GGUF file, whose kind and version are right."""

    def prepare(place: Place) -> dict[str, Any]:
        file = place.folder / "bad.gguf"
        file.write_bytes(b"GGUF\3\0\0\0" + own)
        return {"model__path": file}

    return prepare


def cut_parquet(place: Place) -> dict[str, Any]:
    file = place.folder / "cut.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000}), file)
    os.truncate(file, file.stat().st_size - 10)
    return {"data__train": file}


def reward(text: str, name: str = "f") -> Prepare:
    """The mistake is what the file of the reward does when it is imported, or the one named."""
    end = "\ndef f(prompt, response, row): return 1.0\n"
    return lambda place: {"reward__functions": f"{place.file('bad.py', text + end)}:{name}"}


def plan(**changes: Any) -> Prepare:
    """A plan for one device, of the calls that a run has, with changes of it or of its calls."""

    def prepare(place: Place) -> dict[str, Any]:
        calls = ("generation", "reference_inference", "policy_training")
        placed = {call: {"first": 0, "count": 1} for call in calls}
        own = {key: changes[key] for key in ("devices", "parameters") if key in changes}
        placed |= {call: one for call, one in changes.items() if call not in own}
        document = {"devices": 1, "calls": {c: p for c, p in placed.items() if p}} | own
        return {"plan": place.file("plan.json", json.dumps(document))}

    return prepare


def index(own: bytes) -> Callable[[Path], object]:
    """An index in place of the single file, which would count before it."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(own)

    return change


def larger_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<extra>"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(content))


def damage_checkpoints(place: Place) -> None:
    for file in (place.run / "checkpoints").rglob("document.json"):
        file.write_text(file.read_text().replace("batches", "botches"))


def damage_arrays(place: Place) -> None:
    """One bit in the middle of each large file of the arrays of all checkpoints."""
    for file in (place.run / "checkpoints").rglob("state/**/*"):
        if file.is_file() and file.stat().st_size > 1000:
            own = bytearray(file.read_bytes())
            own[len(own) // 2] ^= 1
            file.write_bytes(own)


def remove_documents(place: Place) -> None:
    for file in (place.run / "checkpoints").rglob("document.json"):
        file.unlink()


def full_disk(kilobytes: int) -> Prepare:
    """A finished run on a disk with so much room; where none can be mounted, no file may be larger
    than that.
    """

    def prepare(place: Place) -> dict[str, Any]:
        files = [path for path in (place.home / "finished").rglob("*") if path.is_file()]
        size = sum(-(-path.stat().st_size // PAGE) * PAGE for path in files) + 1024 * kilobytes
        place.run.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place.run)]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        shutil.copytree(place.home / "finished", place.run, dirs_exist_ok=True)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kilobytes, resource.RLIM_INFINITY))
        return {}

    return prepare


NORM = "model.layers.1.input_layernorm.weight"
LONG_CONTEXT = '"max_position_embeddings": 2000000000'
PPO = {"algorithm__name": "ppo"}
GO_ON = {"steps": 3, "checkpoint__allow_changes": True}

CASES = {
    # The command and its config file.
    "no config file is named": Case(
        "No config is named", prepare=lambda place: {"config_file": None}
    ),
    "config file missing": Case(
        "There is no config file nowhere.py", {"config_file": "nowhere.py"}
    ),
    "config file raises": Case(
        "ZeroDivisionError", prepare=config("def get_config(): return 1 / 0\n")
    ),
    "config file that exits": Case("SystemExit", prepare=config("import sys\nsys.exit(0)\n")),
    "config file is no Python": Case("SyntaxError", prepare=config("def get_config(:\n")),
    "config file without get_config": Case("it defines no get_config", prepare=config("")),
    "config file returns another thing": Case(
        "must return", prepare=config("def get_config(): return {}\n")
    ),
    "unknown key": Case("did you mean 'generation.strategy'", {"generation__strategie": "plain"}),
    "wrong type": Case("'steps' is of type int; 'many' is not", {"steps": "many"}),
    "no number": Case("training.learning_rate is nan", {"training__learning_rate": "nan"}),
    "negative steps": Case("steps is -1; it must be above 0", {"steps": -1}),
    # Options that contradict one another.
    "unknown strategy": Case("Unknown strategy 'chain'", {"generation__strategy": "chain"}),
    "unknown estimator": Case("it must be one of", {"algorithm__estimator": "ppo"}),
    "strategy without its drafter": Case(
        "give drafter.path", {"generation__strategy": "model-chain-2"}
    ),
    "top-p in training": Case("is for evaluation", {"generation__top_p": 0.9}),
    "top-k too large": Case("is for evaluation", {"generation__top_k": 100}),
    "critic without ppo": Case("choose 'ppo', or ''", {"critic__path": "org/critic"}),
    "k1 in the loss": Case("use k2 or k3", {"kl__estimator": "k1"}),
    "KL target without a coefficient": Case(
        "give a start above 0", {"kl__target": 0.1, "kl__coefficient": 0.0}
    ),
    "group of one": Case("compares two or more of a prompt", {"generation__samples_per_prompt": 1}),
    "resampling single samples": Case(
        "generation.resample is 2",
        PPO | {"generation__resample": 2, "generation__samples_per_prompt": 1},
    ),
    "weights of another number": Case("has 2 entries for 1", {"reward__weights": "(1.0,2.0)"}),
    "evaluation without prompts": Case(
        "data.eval is empty", {"evaluation__every": 2, "data__eval": ""}
    ),
    "batch not divisible": Case(
        "cannot be split evenly by training.minibatches = 3", {"training__minibatches": 3}
    ),
    "longer than the context": Case(
        "the model's context is 128", {"generation__max_new_tokens": 300}
    ),
    "more devices than there are": Case("does not fit 1 devices", {"mesh__data": 64}),
    "too little memory": Case("A device needs", {"mesh__device_memory_gb": 0.0001}),
    "rows that no host can hold": Case("The host needs", {"generation__max_rows": 10**9}),
    "history that no host can hold": Case(
        "lower generation.history_tokens", {"generation__history_tokens": 10**9}
    ),
    "samples that no host can hold": Case(
        "lower evaluation.samples_per_prompt",
        {"evaluation__every": 1, "evaluation__samples_per_prompt": 10**9},
    ),
    "more tokens to draw from than there are": Case(
        "evaluation.top_k is 321, but the model has 320", {"evaluation__top_k": 321}
    ),
    "slots that no host can hold": Case(
        "The host needs",
        {"generation__max_new_tokens": 10**9},
        model(replace("config.json", '"max_position_embeddings": 128', LONG_CONTEXT)),
    ),
    "number of 64 bits": Case(
        "generation.max_rows is 9223372036854775808; it must be below 2^31",
        {"generation__max_rows": 2**63},
    ),
    "strategy of a billion drafts": Case(
        "drafts 1000000000 tokens; the most is 32",
        {"generation__strategy": "lookup-chain-1000000000"},
    ),
    "strategy of more drafts than a number of 64 bits": Case(
        "the most is 32", {"generation__strategy": f"lookup-tree-{2**70}x{2**70}"}
    ),
    # The plan of calls.
    "plan of an unknown name": Case("it must be '', colocated", {"plan": "collocated"}),
    "plan missing": Case("/nowhere.json is missing", {"plan": "/nowhere.json"}),
    "plan that is no JSON": Case(
        "is not a plan in JSON", prepare=lambda p: {"plan": p.file("plan.json", "{")}
    ),
    "plan nested too deeply": Case(
        "is nested too deeply", prepare=lambda p: {"plan": p.file("plan.json", "[" * 100_000)}
    ),
    "plan with a call twice": Case(
        "'calls' is there twice",
        prepare=lambda p: {"plan": p.file("plan.json", '{"calls": {}, "calls": {}, "devices": 1}')},
    ),
    "plan without devices": Case(
        "lacks devices", prepare=lambda p: {"plan": p.file("plan.json", '{"calls": {}}')}
    ),
    "plan with a key that no plan has": Case(
        "has 'pipeline' of generation, which no plan has",
        prepare=plan(generation={"first": 0, "count": 1, "pipeline": 2}),
    ),
    "plan with a size that is no number": Case(
        "has fsdp = '1' for generation",
        prepare=plan(generation={"first": 0, "count": 1, "fsdp": "1"}),
    ),
    "plan with a dtype that is none": Case(
        "has dtype 'int4' for generation",
        prepare=plan(generation={"first": 0, "count": 1, "dtype": "int4"}),
    ),
    "plan with a kernel that is not here": Case(
        "has commit 'tpu' for generation, and here is a cpu",
        prepare=plan(generation={"first": 0, "count": 1, "kernels": {"commit": "tpu"}}),
        found=OPENING,
    ),
    "plan without a call that the run has": Case(
        "does not place policy_training, which this run has", prepare=plan(policy_training=None)
    ),
    "plan with a call that the run does not have": Case(
        "places critic_training, which this run does not have",
        prepare=plan(critic_training={"first": 0, "count": 1}),
    ),
    "plan with an unknown call": Case(
        "places 'scoring', which is no call", prepare=plan(scoring={"first": 0, "count": 1})
    ),
    "plan for another number of devices": Case(
        "is for 8 devices, and here are 1", prepare=plan(devices=8)
    ),
    "plan beyond the devices": Case(
        "places generation on devices 1 to 1, and the last one is 0",
        prepare=plan(generation={"first": 1, "count": 1}),
    ),
    "plan whose axes are not the layout's": Case(
        "data 1 x fsdp 2 x tensor 1 = 2, and gives it 1 devices",
        prepare=plan(generation={"first": 0, "count": 1, "fsdp": 2}),
    ),
    "plan for other models": Case(
        "is for a policy of 70 parameters", prepare=plan(parameters={"policy": 70}), found=OPENING
    ),
    "pipelines of one stage": Case(
        "pipelines policy_training over 1 slice", PPO | {"training__pipelined": True}
    ),
    "pipelines beside a plan": Case(
        "training.pipelined is for config.mesh, and plan is 'colocated'",
        {"training__pipelined": True, "plan": "colocated"},
    ),
    "plan that pipelines generation": Case(
        "has pipelined True for generation; true is for training alone",
        prepare=plan(generation={"first": 0, "count": 1, "pipelined": True}),
    ),
    "plan that halves one device": Case(
        "halves the devices, and 1 cannot be halved", {"plan": "disaggregated"}
    ),
    # The models.
    "model missing": Case("No model at /nowhere", {"model__path": "/nowhere"}),
    "model without config.json": Case(
        "config.json is missing", prepare=model(lambda f: (f / "config.json").unlink())
    ),
    "model's config.json is no JSON": Case(
        "is not valid JSON", prepare=model(truncate("config.json"))
    ),
    "model's size is no number": Case(
        "is not a number",
        prepare=model(
            replace("config.json", '"num_attention_heads": 4', '"num_attention_heads": null')
        ),
    ),
    "model nested too deeply": Case(
        "config.json is not valid JSON (it is nested too deeply)",
        prepare=model(lambda f: (f / "config.json").write_text("[" * 100_000)),
    ),
    "model of a billion layers": Case(
        "num_layers is 1000000000",
        prepare=model(
            replace("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1000000000')
        ),
    ),
    "pipe in place of a config.json": Case(
        "a pipe or a device",
        prepare=model(lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json"))),
    ),
    "index that names a file elsewhere": Case(
        "must name files of the folder",
        prepare=model(index(b'{"weight_map": {"lm_head.weight": "../tiny/model.safetensors"}}')),
    ),
    "stop token that the model lacks": Case(
        "the stop token 99999 is none of the model's 320",
        prepare=model(
            lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [3, 99999]}')
        ),
    ),
    "architecture not supported": Case(
        "'gpt2'", prepare=model(replace("config.json", '"llama"', '"gpt2"'))
    ),
    "weights missing": Case(
        "safetensors is missing", prepare=model(lambda f: (f / "model.safetensors").unlink())
    ),
    "weights truncated": Case(
        "model.safetensors is truncated", prepare=model(truncate("model.safetensors"))
    ),
    "weight of another shape": Case("has shape [31]", prepare=model(tensor(NORM, lambda x: x[1:]))),
    "weight is NaN": Case(
        "'attention_norm' of layer 1 is not finite",
        {},
        model(tensor(NORM, lambda x: x * np.nan)),
        WORK,
    ),
    "tokenizer missing": Case(
        "tokenizer.json is missing", prepare=model(lambda f: (f / "tokenizer.json").unlink())
    ),
    "tokenizer is no tokenizer": Case(
        "is not a tokenizer", prepare=model(truncate("tokenizer.json"))
    ),
    "tokenizer larger than the model": Case("Wrong tokenizer", prepare=model(larger_tokenizer)),
    "weights whose header is no JSON": Case(
        "model.safetensors", prepare=header(lambda _: with_length(b"{oops}"))
    ),
    "weights whose header is 2^60 bytes long": Case(
        "model.safetensors", prepare=header(lambda own: (1 << 60).to_bytes(8, "little") + own[8:])
    ),
    "weights that lie beyond their file": Case(
        "model.safetensors",
        prepare=header(lambda own: own.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)),
    ),
    "index that is no JSON": Case("index.json is not valid JSON", prepare=model(index(b"{oops"))),
    "tokenizer_config.json that is a list": Case(
        "tokenizer_config.json does not hold a JSON object",
        prepare=content("tokenizer_config.json", b"[1]"),
    ),
    "first token that is a number": Case(
        "bos_token is 7; it must be a text",
        prepare=content("tokenizer_config.json", b'{"bos_token": 7}'),
    ),
    "chat template that writes nothing": Case(
        "(8 rendered to no token); give others, or correct the chat template",
        prepare=template("{% if false %}a{% endif %}"),
    ),
    "chat template is broken": Case("chat template", prepare=template("{% for m in %}")),
    "chat template of no text": Case(
        "is not a chat template", prepare=content("chat_template.jinja", b"\xff\xfe\xfa")
    ),
    "chat template that never ends": Case(
        "Prompt 1: {place}/damaged: the chat template failed on the messages: it takes longer than",
        prepare=template("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3),
    ),
    "chat template that computes for ever": Case(
        "it takes longer than 2 s", prepare=template("{{ 10 ** (10 ** 10) }}")
    ),
    "chat template that writes gigabytes": Case(
        "it writes over 4,000,000 characters",
        prepare=template("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}"),
    ),
    "chat template that takes gigabytes": Case(
        "it needs more memory than there is", prepare=template("{{ 'a' * 10 ** 10 }}")
    ),
    "chat template that refuses a prompt": Case(
        "Prompt 3: {place}/damaged: the chat template failed on the messages: no c",
        prepare=template(
            "{% if 'c' in messages[0].content %}{{ raise_exception('no c') }}{% endif %}"
        ),
    ),
    "GGUF file that ends at once": Case("bad.gguf", prepare=gguf(b"")),
    "GGUF file of 2^60 tensors": Case(
        "bad.gguf", prepare=gguf((1 << 60).to_bytes(8, "little") + bytes(8))
    ),
    "GGUF file of zeros": Case("bad.gguf", prepare=gguf(bytes(1000))),
    "policy is a reward model": Case(
        "model.path is a reward model", prepare=at_home(model__path="classifier")
    ),
    "reward model is a language model": Case(
        "give a sequence classifier", prepare=at_home(reward__models="tiny")
    ),
    "reward model of two labels": Case(
        "a classifier of 2 labels",
        prepare=model(
            replace("config.json", '"0": "LABEL_0"', '"0": "BAD", "1": "GOOD"'),
            "classifier",
            "reward__models",
        ),
    ),
    "critic of fewer tokens than the policy": Case(
        "critic.path has a vocabulary of 320, and the model may write 384 tokens",
        PPO,
        at_home(model__path="larger", critic__path="tiny"),
    ),
    "rejection with another vocabulary": Case(
        "Rejection compares distributions",
        {"generation__strategy": "model-chain-2", "generation__acceptance": "rejection"},
        at_home(drafter__path="larger"),
    ),
    # The prompts.
    "prompts missing": Case("there is no file /nowhere.jsonl", {"data__train": "/nowhere.jsonl"}),
    "prompts in another format": Case(
        "must end in .jsonl or .parquet", prepare=prompts("a,b\n", "bad.csv")
    ),
    "prompts empty": Case("is empty", prepare=prompts("")),
    "prompts with a broken line": Case("Line 2", prepare=prompts('{"prompt": "a"}\n{oops\n')),
    "prompts nested too deeply": Case("Line 1 of", prepare=prompts('{"prompt": ' + "[" * 100_000)),
    "prompt with half a character": Case(
        "half a character", prepare=prompts('{"prompt": "\\ud800"}\n')
    ),
    "prompt with a NUL": Case("a NUL character", prepare=prompts('{"prompt": "\\u0000"}\n')),
    "prompt of a million characters": Case(
        "over 500,000 characters; cut its 'prompt'",
        prepare=prompts(json.dumps({"prompt": "a" * 1_000_000})),
    ),
    "system prompt with half a character": Case(
        "data.system has half a character", {"data__system": "\udcff"}
    ),
    "column that is misspelt": Case(
        "has no column 'anwser', which data.columns renames",
        {"data__columns": '{"anwser": "solution"}'},
    ),
    "prompts without the key": Case("has no 'prompt'", prepare=prompts('{"question": "a"}\n')),
    "prompts all too long": Case("raise max_prompt_tokens", {"data__max_prompt_tokens": 3}),
    "prompts of Parquet that are none": Case(
        "is not a readable Parquet", prepare=prompts("PAR1", "bad.parquet")
    ),
    "prompts of Parquet that are cut off": Case("is not a readable Parquet", prepare=cut_parquet),
    "prompt that is there twice": Case(
        "the key 'prompt' is there twice", prepare=prompts('{"prompt": "a", "prompt": "b"}\n')
    ),
    "prompts with a number of 10,000 digits": Case(
        "a number has thousands of digits", prepare=prompts('{"a": ' + "9" * 10_000 + "}\n")
    ),
    # The rewards.
    "reward that hangs when it is imported": Case(
        "was not imported within 2 s; import less, or raise reward.seconds",
        {"reward__seconds": 0.1},
        reward("import time\ntime.sleep(60)"),
    ),
    "reward that exits when it is imported": Case(
        "cannot be imported: SystemExit: 0", prepare=reward("import sys\nsys.exit(0)")
    ),
    "reward that ends its process when it is imported": Case(
        "ended its process with exit code 0", prepare=reward("import os\nos._exit(0)")
    ),
    "reward that raises when it is imported": Case(
        "cannot be imported: ZeroDivisionError", prepare=reward("1 / 0")
    ),
    "reward missing": Case("there is no file nowhere.py", {"reward__functions": "nowhere.py:f"}),
    "reward without its function": Case(
        "defines no 'nothing'", prepare=at_home(reward__functions="rewards.py:nothing")
    ),
    "reward is no function": Case(
        "is of type int", prepare=at_home(reward__functions="rewards.py:value")
    ),
    "reward cannot be imported": Case(
        "cannot be imported", {"reward__functions": "no.such.module:f"}
    ),
    "reward that is interrupted when it is imported": Case(
        "cannot be imported: KeyboardInterrupt", prepare=reward("raise KeyboardInterrupt")
    ),
    "reward with a parameter that no call fills": Case(
        "has a parameter 'answr', which no call of it fills",
        prepare=reward("def other(response, answr): return 1.0", "other"),
    ),
    "reward with a column that is not there": Case(
        "has a parameter 'answr', which is no column of the prompts (prompt)",
        {},
        reward("def other(completions, answr): return [1.0]", "other"),
        OPENING,
    ),
    "measure named reward": Case(
        "rename it",
        prepare=config(
            "def get_config():\n    config = default()\n"
            "    config.reward.metrics = {'reward': 'configs/rewards/arithmetic.py:gsm8k'}\n   "
            " return config\n"
        ),
    ),
    "reward always raises": Case(
        "raised KeyError", {}, at_home(reward__functions="rewards.py:raises"), WORK
    ),
    "reward always hangs": Case(
        "hangs", {"reward__seconds": 0.1}, at_home(reward__functions="rewards.py:hangs"), WORK
    ),
    "reward is always NaN": Case(
        "gave nan", {}, at_home(reward__functions="rewards.py:no_number"), WORK
    ),
    "reward is always a text": Case(
        "of type str", {}, at_home(reward__functions="rewards.py:text"), WORK
    ),
    "reward always ends its process": Case(
        "exit code 3", {}, at_home(reward__functions="rewards.py:dies"), WORK
    ),
    # The workdir.
    "workdir cannot be written": Case(
        "name another workdir",
        prepare=lambda place: {
            "workdir": place.file("file", "") / "run",
            "reward__models": place.home / "classifier",
        },
    ),
    "checkpoint of another model": Case(
        "the policy's vocab_size = 320, and this run has 384",
        {"steps": 3},
        lambda place: finished()(place) | at_home(model__path="larger")(place),
    ),
    "checkpoint of other prompts": Case(
        "the prompts of data.train",
        {"steps": 3},
        lambda place: finished()(place) | prompts('{"prompt": "a"}\n')(place),
    ),
    "checkpoint of another config": Case(
        "training.learning_rate = 0.001", {"training__learning_rate": 0.1}, finished()
    ),
    "checkpoints all damaged": Case(
        "is valid", {"steps": 3}, finished(damage_checkpoints), OPENING
    ),
    "checkpoints whose arrays are damaged": Case(
        "is valid", {"steps": 3}, finished(damage_arrays), OPENING
    ),
    "checkpoints without their documents": Case(
        "is valid", {"steps": 3}, finished(remove_documents), OPENING
    ),
    "metrics of an earlier run damaged": Case(
        "metrics.jsonl",
        {"steps": 3},
        finished(lambda place: (place.run / "metrics.jsonl").write_text("oops\n")),
        OPENING,
    ),
    "loss is not finite": Case(
        "post-mortem/step-000001.npz",
        GO_ON
        | {"training__learning_rate": 1e30, "training__minibatches": 2, "training__max_skipped": 0},
        finished(),
        WORK,
    ),
    "disk full at the start": Case("cannot be written", {"steps": 3}, full_disk(0), OPENING),
    "disk full at a checkpoint": Case("could not be saved", {"steps": 3}, full_disk(100), WORK),
    "disk full at the end": Case(
        "run/policy cannot be written", {"steps": 3, "checkpoint__every": 0}, full_disk(100), WORK
    ),
    # The other programs.
    "export of no run": Case("There is no run in", program="export"),
    "export without a checkpoint": Case(
        "There is no checkpoint",
        {},
        finished(lambda place: shutil.rmtree(place.run / "checkpoints")),
        program="export",
    ),
    "report of no run": Case("name the workdir of a run", program="report"),
    "report on a full disk": Case(
        "report.html cannot be written", {}, full_disk(0), program="report"
    ),
    "report of damaged metrics": Case(
        "line 1",
        {},
        finished(lambda place: (place.run / "metrics.jsonl").write_text("oops\n")),
        program="report",
    ),
}
