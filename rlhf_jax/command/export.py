"""Write the policy of a checkpoint, or its student, as a Hugging Face folder.

rlhf-jax export WORKDIR [--step N] [--out FOLDER] [--drafter]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.generation.decoding import completed
from rlhf_jax.models import transformer
from rlhf_jax.models.files import huggingface
from rlhf_jax.models.files.source import open_source
from rlhf_jax.runtime.checkpoint.store import read_part
from rlhf_jax.runtime.files import is_remote
from rlhf_jax.runtime.foreign import read_json
from rlhf_jax.runtime.mirror import fetched
from rlhf_jax.training.distill import student_of
from rlhf_jax.types import Model, ModelConfig


def main(argv: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog=argv[0], description="Write the policy of a checkpoint as a Hugging Face folder."
    )
    parser.add_argument("workdir", help="of the run; the run may be going on")
    parser.add_argument("--step", type=int, help="of the checkpoint; the latest if not given")
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder to write; WORKDIR/policy-STEP or drafter-STEP if not given",
    )
    parser.add_argument(
        "--drafter", action="store_true", help="the student that drafts for the policy, instead"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    options = parser.parse_args(argv[1:])
    name = "drafter" if options.drafter else "policy"
    if is_remote(options.workdir) and options.out is None:
        raise ValueError(f"{options.workdir} is a URL: give the output folder by --out FOLDER.")
    workdir = fetched(options.workdir, checkpoints=True)
    out = export(workdir, options.step, options.out, name, options.dtype)
    print(f"The {name} is in {out}.")
    return 0


def export(
    workdir: Path, step: int | None, out: Path | None, name: str = "policy", dtype: str = "float32"
) -> Path:
    """Write the 'policy' or its 'drafter' as a Hugging Face folder, and return the folder.

    Weights have dtype `dtype`; tokenizer and stop tokens are those of the model that the run began
    with. Raises ValueError or OSError in one sentence if there is no such run, model or checkpoint.
    """
    source = open_source(configured(workdir, "model", "path"))
    layers = configured(workdir, "drafter", "layers") if name == "drafter" else 0
    if name == "drafter" and not layers:
        raise ValueError(f"The run in {workdir} has no student: its drafter.layers is 0.")
    template = policy_template(source.config, layers)
    step, state, _ = read_part(workdir / "checkpoints", template, step)
    out = out or workdir / f"{name}-{step}"
    model = state["policy"]["weights"]
    if name == "drafter":
        model = completed(state["drafter"]["weights"], model)
    huggingface.save(
        out,
        model,
        source.tokenizer,
        stop_tokens=source.stop_tokens,
        dtype=jnp.dtype(dtype),
        repeated=source.repeated,
    )
    return out


def configured(workdir: Path, section: str, key: str) -> Any:
    """Return a value of the config of the run in `workdir`."""
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"There is no run in {workdir}: {file} is missing.")
    try:
        return read_json(file)[section][key]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no config of a run: it lacks {section}.{key}.") from error


def policy_template(config: ModelConfig, layers: int = 0) -> dict[str, dict[str, Model]]:
    """Return the shapes of the policy and, with `layers`, its student, placed in host memory.

    A single accelerator may be too small for the float32 weights.
    """
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    policy: Model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config, jnp.float32))
    shapes = {"policy": {"weights": policy}}
    if layers:
        student: Model = jax.eval_shape(lambda model: student_of(model, layers), policy)
        shapes["drafter"] = {"weights": student}
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), shapes
    )
