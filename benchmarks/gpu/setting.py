"""Set the sizes of each part, and make its models and layouts on one device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.chip import MODELS
from benchmarks.contest import Case, Run
from benchmarks.shapes import SLOTS
from pallas_kernels import dispatch
from rlhf_jax.generation.decoding import decoding_weights
from rlhf_jax.generation.requests import GenerationConfig, Request
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.mesh import Layout, make_mesh
from rlhf_jax.models.kernels import shape_of
from rlhf_jax.models.published import PUBLISHED
from rlhf_jax.models.transformer import init
from rlhf_jax.types import Model, ModelConfig

ROOT = Path(__file__).resolve().parents[2]
# No token ends a sample: a random model would end each at another place.
NO_STOP = (-2,)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Hold the size of a part's samples."""

    samples: int
    prompt_tokens: int
    new_tokens: int
    repeats: int

    @property
    def slots(self) -> int:
        """Return the tokens of a sample, prompt included."""
        return self.prompt_tokens + self.new_tokens


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Hold the sizes of each part."""

    models: Mapping[str, ModelConfig]
    compared: tuple[str, ...]  # models whose texts are compared
    decoded: tuple[str, ...]  # models that generate, the most telling first
    trained: tuple[str, ...]  # of which a step is taken
    # of benchmarks/kernels.py, the most telling first
    kernel_shapes: tuple[str, ...]
    kernel_rows: tuple[int, ...]
    kernel_nodes: tuple[int, ...]
    kernel_slots: int
    kernel_repeats: int
    # shapes at which kernels are held to their laws
    law_shapes: tuple[str, ...]
    law_rows: int
    law_tests: str  # which tests run, as pytest's -m has it
    chip_model: ModelConfig  # by whose calls the chip's shares are measured
    texts: Batch
    decoding: Batch
    step: Batch
    group: int  # samples of a prompt in a step
    microbatch_rows: int


_TINY = ModelConfig("qwen2", 320, 32, 64, 2, 4, 2, 8, 128, tied=True)
TINY = Sizes(
    models={"tiny": _TINY},
    compared=("tiny",),
    decoded=("tiny",),
    trained=("tiny",),
    kernel_shapes=("smollm2_135m",),
    kernel_rows=(1,),
    kernel_nodes=(1,),
    kernel_slots=128,
    kernel_repeats=1,
    law_shapes=("smollm2_135m",),
    law_rows=1,
    law_tests="gpu and not slow and not long",
    chip_model=_TINY,
    texts=Batch(samples=4, prompt_tokens=8, new_tokens=8, repeats=1),
    decoding=Batch(samples=4, prompt_tokens=8, new_tokens=8, repeats=1),
    step=Batch(samples=4, prompt_tokens=8, new_tokens=8, repeats=1),
    group=2,
    microbatch_rows=2,
)
REAL = Sizes(
    models={
        "0.5B": PUBLISHED["Qwen2.5-0.5B"],
        "1B": PUBLISHED["Llama-3.2-1B"],
        "8B": PUBLISHED["Llama-3.1-8B"],
        # heads and products of 8B, at an eighth of its compilation
        "8B, 4 layers": dataclasses.replace(PUBLISHED["Llama-3.1-8B"], num_layers=4),
    },
    compared=("0.5B", "8B, 4 layers"),
    decoded=("0.5B", "8B", "1B"),
    trained=("0.5B", "1B"),
    kernel_shapes=("llama3_8b", "qwen3_0.6b", "smollm2_135m", "llama3_8b_of_8"),
    kernel_rows=(32, 8, 64, 1),
    kernel_nodes=(1, 9),
    kernel_slots=SLOTS,
    kernel_repeats=5,
    law_shapes=("llama3_8b", "qwen3_0.6b", "smollm2_135m"),
    law_rows=8,
    law_tests="gpu",
    chip_model=MODELS["other"],
    texts=Batch(samples=16, prompt_tokens=64, new_tokens=128, repeats=1),
    decoding=Batch(samples=32, prompt_tokens=128, new_tokens=128, repeats=3),
    step=Batch(samples=64, prompt_tokens=128, new_tokens=256, repeats=3),
    group=8,
    microbatch_rows=8,
)


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports from this checkout, with more variables."""
    others = os.environ.get("PYTHONPATH")
    places = os.pathsep.join([str(ROOT), *([others] if others else [])])
    return os.environ | {"PYTHONPATH": places} | variables


def compute_dtype() -> jnp.dtype:
    """Return the compute dtype here: bfloat16, except on a CPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def layouts(config: ModelConfig) -> tuple[dict[str, Layout], str]:
    """Return generation's layout by "reference" and, where there are any, by "pallas" kernels.

    And why there are none.
    """
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    found = {"reference": Layout(mesh, "generation", dtype=compute_dtype())}
    wanted = dict.fromkeys(dispatch.FUNCTIONS, "pallas")
    try:
        kernels, _ = dispatch.choose(
            wanted, jax.devices()[0], compute_dtype().itemsize, [shape_of(config)]
        )
    except ValueError as error:
        return found, str(error)
    return found | {"pallas": dataclasses.replace(found["reference"], kernels=kernels)}, ""


def random_model(config: ModelConfig, seed: int = 0) -> Model:
    """Draw a model's weights on the device, layers stacked, in the dtype that it computes in."""
    draw = jax.jit(init, static_argnums=(1, 2))
    return draw(jax.random.key(seed), config, compute_dtype())


def decoding_case(
    model: Model, batch: Batch, layout: Layout, *strategies: str, acceptance: str = "replayable"
) -> Case:
    """Return samples to generate, each with a random prompt of its own.

    model: as training has it. The batch keeps its rows until the last sample ends, since each size
    would be a program of its own, and all samples are equally long.
    """
    random = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = random.integers(0, vocabulary, (batch.samples, batch.prompt_tokens), np.int32)
    wanted = [Request(prompt, (row,), batch.new_tokens) for row, prompt in enumerate(prompts)]
    decoding = GenerationConfig(
        Sampling(1.0),
        tuple(map(tree.parse, strategies)),
        NO_STOP,
        max_rows=batch.samples,
        min_rows=batch.samples,
        max_length=batch.slots,
        seed=0,
        acceptance=acceptance,
    )
    return Case(decoding_weights(model, layout), None, wanted, decoding, layout)


def with_earlier(case: Case, earlier: Run) -> Case:
    """Return a case whose samples know a text of the same noise: drafts that replay it are right.

    Random models repeat nothing, so this is the one way to have most drafts accepted.
    """
    texts = {sample.sample_id: np.array(sample.tokens, np.int32) for sample in earlier.samples}
    wanted = [dataclasses.replace(request, earlier=texts) for request in case.wanted]
    return dataclasses.replace(case, wanted=wanted)


def acceptance(runs: Sequence[Run]) -> float:
    """Return the share of drafts that were accepted."""
    reports = [report for one in runs for report in one.reports]
    drafted = sum(report.drafted for report in reports)
    return sum(report.accepted for report in reports) / max(drafted, 1)
