"""Count what models, rows and layers take on one device, from shapes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Kernels
from rlhf_jax import mesh as meshes
from rlhf_jax.config.objectives import objective_of
from rlhf_jax.config.schema import Config
from rlhf_jax.inference.logprobs import CHUNK
from rlhf_jax.model import transformer
from rlhf_jax.types import Model, ModelConfig, ModelConfigs


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Hold what decides the memory of a run; `dtype` is that of computation."""

    config: Config
    models: ModelConfigs
    mesh: AbstractMesh
    dtype: DTypeLike
    kernels: Kernels

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number in the compute dtype."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def trains_policy(self) -> bool:
        """Tell whether the policy learns; else it only teaches a student."""
        return objective_of(self.config).uses_rewards

    @property
    def text_tokens(self) -> int:
        """Return the tokens of the longest prompt and response."""
        return self.config.data.max_prompt_tokens + self.config.generation.max_new_tokens

    @property
    def batch_tokens(self) -> int:
        """Return the token slots of a device's part of the longest micro-batch."""
        return row_share(self.config.training.microbatch_rows, self.mesh) * self.text_tokens

    @property
    def chunk_tokens(self) -> int:
        """Return the tokens of a device whose logits exist at one time outside generation."""
        rows = self.config.training.microbatch_rows
        return row_share(rows, self.mesh) * max(1, CHUNK // rows)

    @property
    def layout(self) -> meshes.Layout:
        """Return the training layout."""
        return meshes.Layout(self.mesh, "training", self.kernels, jnp.dtype(self.dtype))

    def weights(self, model: ModelConfig | None, dtype: DTypeLike, role: str = "training") -> int:
        """Return the bytes of a model's weights, split as in "training" or "generation"."""
        if model is None:
            return 0
        shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model, dtype))
        return meshes.bytes_per_device(
            shapes, meshes.model_shardings(shapes, meshes.Layout(self.mesh, role))
        )

    def student_weights(self, dtype: DTypeLike, role: str = "training") -> int:
        """Return the bytes of a student's own weights: its embedding and head are the policy's."""
        student = self.models.drafter
        if student is None:
            return 0
        whole: Model = jax.eval_shape(lambda: transformer.init(jax.random.key(0), student, dtype))
        own = dataclasses.replace(whole, embed=None, head=None)
        return meshes.bytes_per_device(
            own, meshes.model_shardings(own, meshes.Layout(self.mesh, role))
        )

    def cast_weights(self, model: ModelConfig) -> int:
        """Return the bytes of a copy of float32 weights in the compute dtype.

        There is none where that is float32.
        """
        return 0 if jnp.dtype(self.dtype) == jnp.float32 else self.weights(model, self.dtype)

    def layer(self, model: ModelConfig, tokens: int) -> int:
        """Return the bytes of one layer's forward pass over `tokens` of a device.

        Its weights are gathered over `fsdp`.
        """
        attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        weights = model.width * (attention + 3 * model.ffn_width)
        gathered = weights // self.mesh.shape["tensor"]
        return (tokens * layer_values(model, self.mesh) + gathered) * self.itemsize


def row_bytes(rows: Any, mesh: AbstractMesh) -> int:
    """Return the bytes of a pytree whose leaves all have rows as their first axis."""
    return meshes.bytes_per_device(rows, meshes.row_shardings(rows, meshes.Layout(mesh)))


def row_share(rows: int, mesh: meshes.AnyMesh) -> int:
    """Return how many of the rows lie on one device."""
    return -(-rows // meshes.Layout(mesh).row_shards)


def tensor_share(size: int, mesh: AbstractMesh) -> int:
    """Return how much of a dimension that is split over `tensor` lies on one device.

    It is all of it where the mesh's `tensor` does not divide it.
    """
    tensor = mesh.shape["tensor"]
    return size if size % tensor else size // tensor


def layer_values(model: ModelConfig, mesh: AbstractMesh) -> int:
    """Return the values of one token in one layer.

    They are norms and residuals [M], attention [H, D] and [G, D], and products [F].
    """
    attention = (3 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return 10 * model.width + (attention + 4 * model.ffn_width) // mesh.shape["tensor"]
