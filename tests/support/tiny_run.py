"""A run that takes seconds: a model of bytes, a few prompts, a reward, and the command line that
joins them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import soon
import tokenizers
from places import ROOT
from tokenizers import decoders, models, pre_tokenizers

from rlhf_jax.config import default
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.transformer import init
from rlhf_jax.types import ModelConfig

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
STOPS = tuple(range(24))  # many, so that rows finish at different times
CONFIG = ModelConfig("llama", 320, 32, 64, 2, 4, 2, 8, 128, tied=True)


def make_model(folder: Path, seed: int = 0, **changes) -> Path:
    """A Hugging Face folder of random weights and a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    model = init(jax.random.key(seed), dataclasses.replace(CONFIG, **changes))
    huggingface.save(
        folder, model, Tokenizer(backend, TEMPLATE, {}, settings, folder), STOPS, jnp.float32
    )
    return folder


def make_files(folder: Path) -> None:
    """prompts.jsonl of eight prompts, reward.py:vowels and a config.py of defaults."""
    prompts = "".join(json.dumps({"prompt": f"Say {word}"}) + "\n" for word in "abcdefgh")
    (folder / "prompts.jsonl").write_text(prompts)
    reward = "def vowels(prompt, response, row):\n    return sum(c in 'aeiou' for c in response)\n"
    (folder / "reward.py").write_text(reward)
    (folder / "config.py").write_text("from rlhf_jax.config import default as get_config\n")


def arguments(folder: Path, model: Path, **changes) -> list[str]:
    """The command line of three small steps; `training__epochs=2` changes training.epochs.

    It names the kernels of these tests, which a command in a process of its own would not know.
    """
    values = {
        "workdir": folder / "run",
        "steps": 3,
        "model.path": model,
        "compilation_cache": "",
        "data.train": folder / "prompts.jsonl",
        "data.eval": folder / "prompts.jsonl",
        "data.max_prompt_tokens": 24,
        "reward.functions": f"{folder / 'reward.py'}:vowels",
        "reward.workers": 1,
        "generation.prompts_per_step": 4,
        "generation.samples_per_prompt": 4,
        "generation.max_new_tokens": 12,
        "generation.max_rows": 8,
        "generation.strategy": "lookup-chain-2",
        "generation.history_tokens": 32,
        "evaluation.every": 2,
        "training.learning_rate": 1e-3,
        "training.microbatch_rows": 8,
        "checkpoint.every": 0,
        "mesh.data": 1,
        "mesh.fsdp": 1,
        **{f"kernels.{name}": how for name, how in default().kernels.items()},
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [
        "train.py",
        "--config",
        str(folder / "config.py"),
        *(f"--config.{k}={v}" for k, v in values.items()),
    ]


def environment(**changes: str) -> dict[str, str]:
    """Of a process of one device that takes such a run: its programs are compiled soon rather than
    well, and kept with those of the tests.
    """
    kept = "jax_compilation_cache_dir"
    own = {
        "PYTHONPATH": str(ROOT),
        kept.upper(): getattr(jax.config, kept) or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | soon.environment() | own | changes


def lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


PPO = {
    "algorithm__name": "ppo",
    "kl__place": "reward",
    "kl__estimator": "k1",
    "kl__target": 1.0,
    "critic__learning_rate": 1e-3,
}
