"""Every pytree that crosses a stage boundary, and the shape letters.

B rows, P prompt, T token slots, N draft nodes, K tree depth, V vocabulary, L layers, H heads, G
key-value heads, D head dim, M width, F feed-forward width, W window slots, Q query tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from flax import struct

from rlhf_jax.runtime.shards import counted_up

# An array on the device or, as numpy, on the host. A template of a tree has shapes or shardings in
# its place.
Array = jax.Array | np.ndarray
# What a part of a run keeps from step to step besides models: host arrays by name.
Memory = Mapping[str, np.ndarray]
# One transformer block: its weights by their name in the family's table, arrays or other kinds of
# `model.weight`. In stacked layers every leaf has a leading L.
Layer = dict[str, Any]

T = TypeVar("T")


def hash_once(cls: type[T]) -> type[T]:
    """Cache the hash of a frozen dataclass, since such objects are keys in every round."""
    compute = cls.__hash__

    def __hash__(self) -> int:
        cached = self.__dict__.get("_hash")
        if cached is None:
            cached = self.__dict__["_hash"] = compute(self)
        return cached

    cls.__hash__ = __hash__
    return cls


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Describe the scaling of rotary frequencies: Llama 3's, or a division by `factor`."""

    kind: str  # "llama3" or "linear".
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Describe the static shape of one decoder-only transformer."""

    family: str  # The Hugging Face model_type, a name in `model.families.FAMILIES`.
    vocab_size: int
    width: int
    ffn_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False  # Whether the head is the transposed embedding.
    # Whether the head has one output instead of the vocabulary's, as in a critic or reward model,
    # whose head is never tied.
    scalar_head: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value"
                " heads; the first must be a multiple of the second."
            )


class ModelConfigs(NamedTuple):
    """Hold the shapes of a run's models."""

    policy: ModelConfig
    drafter: ModelConfig | None = None
    # by role, the base of their scalar heads: a reward model or a language model's trunk
    critics: Mapping[str, ModelConfig] = {}
    rewards: tuple[ModelConfig, ...] = ()
    reference: ModelConfig | None = None  # None: a copy of the policy

    @property
    def trunks(self) -> dict[str, ModelConfig]:
        """Return the shapes of the models that may be trained, by role, as stored."""
        return {"policy": self.policy, **self.critics}

    def of(self, call: str) -> tuple[ModelConfig, ...]:
        """Return the shapes of the models that a call scores with or trains.

        Each critic has a scalar head of its own.
        """
        role = call.rpartition("_")[0]
        if role == "reference":
            return (self.reference or self.policy,)
        if role == "reward":
            return self.rewards
        if role in self.critics:
            return (dataclasses.replace(self.critics[role], scalar_head=True, tied=False),)
        return (self.policy,) if role == "policy" else ()

    def scorers(self, calls: Iterable[str]) -> list[ModelConfig]:
        """Return the shapes of the models that score in such calls."""
        return [model for call in calls if call.endswith("_inference") for model in self.of(call)]


@struct.dataclass
class Model:
    """Hold the weights of a policy, reference, critic, reward or draft model.

    `layers` is one stacked `Layer` (scanned: training, scoring) or a tuple of them (unrolled:
    decoding). `head` is [M, V] for a language model, [M, 1] for a scalar head, None if tied. A
    student, which borrows embedding and head of the policy, has None for both.
    """

    embed: Array  # [V, M]
    layers: Layer | tuple[Layer, ...]  # A Layer with a leading L, or a tuple of them.
    norm: Array  # [M]
    head: Array | None
    config: ModelConfig = struct.field(pytree_node=False)


@hash_once
@dataclasses.dataclass(frozen=True)
class Strategy:
    """Describe a drafting strategy: the tree of drafts, the drafter, and the number verified.

    `parents[i]` is the parent of draft i: -1 is the last committed token, 0 the first draft, so
    `()` is plain decoding, `(-1, 0, 1)` a chain of three and `(-1, -1, 0, 0)` a tree. Drafts are in
    level order. All rows draft a packed chain, but each row verifies only as many nodes as its
    drafts are expected to gain: `packed` nodes on average, roots included.
    """

    parents: tuple[int, ...] = ()
    drafter: str = "none"  # by its name in the registry; "none" for plain decoding
    packed: int = 0  # Nodes that a row verifies on average; 0: every node of every row.


@struct.dataclass
class Tree:
    """Hold a strategy as data, per row, padded to a node bucket.

    N counts draft nodes; node 0 is the root.
    """

    parents: Array  # [B, N+1] int32, the index of the parent node; 0 at the root and at padding.
    depth: Array  # [B, N+1] int32, 0 at the root, -1 at padding.
    ancestors: Array  # [B, N+1, N+1] bool: [b, i, j] is whether j is i or an ancestor of i.


@struct.dataclass
class Emission:
    """Hold the output of one round for each row, in path order."""

    tokens: Array  # [B, K+1] int32
    logprobs: Array  # [B, K+1] float32, under the distribution that was sampled from.
    top_k_ids: Array | None  # [B, K+1, top_k] int32, the sampled sets under top-k.
    count: Array  # [B] int32, the number of valid entries; 0 for a row that was done.
    accepted: Array  # [B] int32, how many drafted tokens were accepted.
    path: Array  # [B, N+1] int32, the node at each depth of the accepted path; the last repeats.
    done: Array  # [B] bool, whether the sample has ended after this round.


@struct.dataclass
class Trained:
    """Hold a model that is trained."""

    weights: Model  # The master weights, in float32, layers stacked.
    moments: optax.OptState | None  # of its optimizer; None: it is frozen
    version: Array  # [] int32, the number of its updates

    def counted(self) -> Trained:
        """Return the model after one more update."""
        return dataclasses.replace(self, version=counted_up(self.version))


# Trained models by role: "policy", "drafter", "critic", or an algorithm's own.
Models = dict[str, Trained]
