"""Every pytree that crosses a stage boundary, and the shape letters.

B rows, P prompt, T token slots, N draft nodes, K tree depth, V vocabulary, L layers, H heads,
G key-value heads, D head dim, M width, F feed-forward width, W window slots, Q query tokens.

A per-token array `x[B, T]` speaks of the token at t: `logprobs[b, t]` is the log-probability of
`tokens[b, t]` given `tokens[b, :t]`; entry 0 has no meaning and is never under a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from flax import struct

# a jax.Array, or a numpy array on the host; in templates of a tree, a shape or a sharding
Array = Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 frequency scaling; `kind='linear'` divides every frequency by `factor` instead."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static shape of one decoder-only transformer (Llama, Mistral, Qwen2, Qwen3, SmolLM2)."""

    family: str  # "llama", "mistral", "qwen2" or "qwen3": the Hugging Face model_type
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
    tied: bool = False  # the head is the embedding, transposed
    # one output for the vocabulary's many: a critic or reward model; never tied
    scalar_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value"
                " heads;"
                " the first must be a multiple of the second."
            )


class ModelConfigs(NamedTuple):
    """Hold the shapes of a run's models."""

    policy: ModelConfig
    drafter: ModelConfig | None = None
    critic: ModelConfig | None = None
    rewards: tuple[ModelConfig, ...] = ()


@struct.dataclass
class Layer:
    """One transformer block. Stacked for a scan, every leaf has a leading L."""

    attention_norm: Array  # [M]
    query: Array  # [M, H, D]
    key: Array  # [M, G, D]
    value: Array  # [M, G, D]
    output: Array  # [H, D, M]
    mlp_norm: Array  # [M]
    gate: Array  # [M, F]
    up: Array  # [M, F]
    down: Array  # [F, M]
    query_bias: Array | None = None  # [H, D]
    key_bias: Array | None = None  # [G, D]
    value_bias: Array | None = None  # [G, D]
    query_norm: Array | None = None  # [D]
    key_norm: Array | None = None  # [D]


@struct.dataclass
class Model:
    """Weights of a policy, reference, critic, reward or draft model.

    `layers` is one stacked `Layer` (scanned: training, scoring) or a tuple of them (unrolled:
    decoding). `head` is `[M, V]` for a language model, `[M, 1]` for a scalar head, `None` when
    tied.
    """

    embed: Array  # [V, M]
    layers: Any  # Layer with a leading L, or tuple[Layer, ...]
    norm: Array  # [M]
    head: Array | None
    config: ModelConfig = struct.field(pytree_node=False)


# A cache is a tuple over layers; one layer is (k [B, G, D, T], v [B, G, T, D]), row first.
LayerCache = tuple[Array, Array]
Cache = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A drafting strategy: node i (1-based; 0 is the last committed token) hangs from parents[i-1].

    `parents` counts nodes as the drafts see them: -1 is the committed token, 0 the first draft, so
    `()` is plain decoding, `(-1, 0, 1)` a chain of three and `(-1, -1, 0, 0)` a tree. Nodes stand
    in level order. A packed chain is drafted by all rows, as far as the drafts promise by some: its
    rows verify `packed` nodes on average, roots included.
    """

    parents: tuple[int, ...] = ()
    drafter: str = "none"  # "none", "lookup", "replay" or "model"
    packed: int = 0  # 0: every node of every row is verified


@struct.dataclass
class Tree:
    """A strategy as data, per row, padded to a node bucket. N counts draft nodes; node 0 is the
    root.
    """

    parents: Array  # [B, N+1] int32, index of the parent node; root and padding 0
    depth: Array  # [B, N+1] int32, 0 at the root; -1 at padding
    ancestors: Array  # [B, N+1, N+1] bool, [b, i, j]: j is i or above i


@struct.dataclass
class DraftState:
    """What a draft model keeps of each row."""

    cache: Cache
    length: Array  # [B] int32, committed cache slots that are valid


@struct.dataclass
class DecodeState:
    """Running samples, one a row; axis 0 of every leaf is the row.

    `length` counts known tokens. The cache holds the first `length - 1` of them: the last one is
    the root of the next round.
    """

    tokens: Array  # [B, T] int32
    length: Array  # [B] int32
    limit: Array  # [B] int32, the length at which the sample ends
    done: Array  # [B] bool; also true for empty rows
    key: Array  # [B, 2] uint32: (seed, sample id), the key of the row's noise
    history: Array  # [B, E] int32, earlier roll-outs of the same prompt, -1 between and after
    # [B, T or 0] int32, the text that the same noise gave before, by position; -1 where there is
    # none
    earlier: Array
    cache: Cache
    draft: DraftState | None


@struct.dataclass
class Emission:
    """What one round gave to each row, in path order."""

    tokens: Array  # [B, K+1] int32
    logprobs: Array  # [B, K+1] float32, under the law that was sampled from
    support: Array | None  # [B, K+1, top_k] int32, the sampled sets under top-k
    count: Array  # [B] int32, entries that are real; 0 for a row that was done
    accepted: Array  # [B] int32, drafted tokens that were accepted
    path: Array  # [B, N+1] int32, the node at each depth of the accepted path; its last one repeats
    done: Array  # [B] bool, after this round


@struct.dataclass
class Rollout:
    """Finished samples in the order they were asked for, prompt first, padded on the right."""

    tokens: Array  # [B, T] int32
    mask: Array  # [B, T] bool, true on response tokens
    logprobs: Array  # [B, T] float32, from generation
    length: Array  # [B] int32, prompt and response
    sample_id: Array  # [B] uint32
    support: Array | None = None  # [B, T, top_k] int32


@struct.dataclass
class Experience:
    """What training needs of a rollout. `mask` is the rollout's, less the samples that are not
    trained on.
    """

    rollout: Rollout
    mask: Array  # [B, T] bool, the response tokens that losses count
    logprobs: Array  # [B, T] float32, recomputed under the policy that generated: the "old" ones
    reference_logprobs: Array  # [B, T] float32
    rewards: Array  # [B] float32, of whole samples
    advantages: Array  # [B, T] float32
    # [B, T] float32, the critic's before the update: of what is known before the token
    values: Array | None = None
    returns: Array | None = None  # [B, T] float32, what the critic is to predict


@struct.dataclass
class TrainState:
    """All that an update changes."""

    policy: Model  # float32 master weights, layers stacked
    optimizer: Any  # optax state
    step: Array  # [] int32
    critic: Model | None = None  # as the policy, with a scalar head
    critic_optimizer: Any = None
    drafter: Model | None = None  # a student that is trained beside the policy
    drafter_optimizer: Any = None
    drafter_version: Array | None = None  # [] int32, its updates so far
