"""The policy of a checkpoint as a Hugging Face folder: python launch/export.py WORKDIR [--step N] [--out FOLDER]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from rlhf_jax.checkpoint.store import read_part
from rlhf_jax.data.tokenizer import read_json
from rlhf_jax.model import huggingface, transformer
from rlhf_jax.model.source import open_source
from rlhf_jax.types import Model, ModelConfig, TrainState


def main(argv: list[str]) -> int:
    """The exit code; a mistake of the user's is one sentence on stderr."""
    parser = argparse.ArgumentParser(description="Write the policy of a checkpoint as a Hugging Face folder.")
    parser.add_argument("workdir", type=Path, help="of the run; the run may be going on")
    parser.add_argument("--step", type=int, help="of the checkpoint; the latest if not given")
    parser.add_argument("--out", type=Path, help="the folder to write; WORKDIR/policy-STEP if not given")
    asked = parser.parse_args(argv[1:])
    try:
        print(f"The policy is in {export(asked.workdir.expanduser(), asked.step, asked.out)}.")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(workdir: Path, step: int | None, out: Path | None) -> Path:
    """The folder written: weights in float32, the tokenizer and stop tokens of the model that the run began with.

    Raises ValueError or OSError in one sentence where there is no such run, model or checkpoint.
    """
    source = open_source(model_path(workdir))
    step, state, _ = read_part(workdir / "checkpoints", policy_template(source.config), step)
    out = out or workdir / f"policy-{step}"
    huggingface.save(out, state.policy, source.tokenizer, source.stop_tokens, jnp.float32)
    return out


def model_path(workdir: Path) -> str:
    """The path of the model that the run in `workdir` began with, from its config.json."""
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"There is no run in {workdir}: {file} is missing.")
    try:
        return read_json(file)["model"]["path"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no config of a run: it lacks model.path.") from error


def policy_template(config: ModelConfig) -> TrainState:
    """The policy's place in a state, for the host's memory: one accelerator may be too small for its float32."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    shapes: Model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config, jnp.float32))
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), shapes)
    return TrainState(policy=placed, optimizer=None, step=None)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
