"""Losses of three kinds: of tokens, of groups of sequences, and of values.

Each is called with a model, the hidden states before the predicted tokens of a packed micro-batch
and its columns, and returns the micro-batch's share of its minibatch's loss, and metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.inference.logprobs import head_logprobs, head_values, tempered_states
from rlhf_jax.sequences.batch import PackedSequences
from rlhf_jax.sequences.columns import declaration
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import Array, Model

# By name, [] float32: shares of the minibatch's, which are summed, or maxima (`is_maximum`).
Metrics = dict[str, jax.Array]
Share = tuple[jax.Array, Metrics]


class Loss(Protocol):
    """Describe a loss: its columns, and its share of a minibatch's."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return its columns, of those that exist."""
        ...

    @property
    def whole_groups(self) -> bool:
        """Return whether it compares sequences, so that those of a group must be together."""
        ...

    def __call__(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> Share:
        """Compute the share from the states [S, W, M]; of the model only the ends are read."""
        ...


class TokenTerms(NamedTuple):
    """Hold the inputs of a loss of tokens or values; all are [S, W], and 0 where masked out."""

    scores: jax.Array  # log-probabilities in nats, or values; with gradient
    entropy: jax.Array | None  # in nats, if the settings require it
    batch: PackedSequences
    settings: TrainingSettings

    def column(self, name: str) -> Array | None:
        """Return a column of tokens, 0 where masked out; None if there is none."""
        return _column(self.batch, name)

    def mean(self, x: Array) -> jax.Array:
        """Compute the sum of x [S, W] over the mask, over the tokens of the whole minibatch: [].

        Summed over micro-batches it is the minibatch's mean, however the minibatch is split.
        """
        chex.assert_equal_shape([x, self.batch.mask])
        return jnp.sum(jnp.where(self.batch.mask, x, 0.0)) / self.batch.columns["total_tokens"]


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """Hold a loss of each predicted token, by its log-probability: [S, W], and metrics."""

    function: Callable[[TokenTerms], Share]
    reads: tuple[str, ...] = ()
    whole_groups = False

    def __call__(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> Share:
        """Compute the sum of the tokens' losses, each by its weight."""
        losses, metrics = self.function(self.terms(model, hidden, batch, settings))
        return jnp.sum(batch.columns["weights"] * losses), metrics

    def terms(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> TokenTerms:
        """Compute the inputs of the function."""
        return token_terms(model, hidden, batch, settings)


class ValueLoss(TokenLoss):
    """Hold a loss of the value before each predicted token: [S, W], and metrics."""

    def terms(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> TokenTerms:
        """Compute the values of a scalar head for the function."""
        return TokenTerms(head_values(model, hidden, batch.mask), None, batch, settings)


class GroupTerms(NamedTuple):
    """Hold the inputs of a loss of groups: numbers of tokens [S, W], of sequences [S, R]."""

    scores: jax.Array  # [S, W], log-probabilities in nats, or values of a scalar head
    batch: PackedSequences
    settings: TrainingSettings

    def column(self, name: str) -> Array | None:
        """Return a column of tokens or sequences, 0 where absent; None without one."""
        return _column(self.batch, name)

    def per_sequence(self, x: Array) -> jax.Array:
        """Sum numbers of tokens [S, W] over each sequence: [S, R] float32."""
        tokens = jnp.where(self.batch.mask, x, 0.0)
        return _sum_by(tokens, self.batch.segment_ids, self.batch.groups.shape[1])

    def at_end(self, x: Array) -> jax.Array:
        """Return the numbers of tokens [S, W] at each sequence's last predicted one: [S, R]."""
        here = jnp.where(self.batch.mask, self.batch.segment_ids, -1)
        after = jnp.pad(here[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self.per_sequence(jnp.where(here != after, x, 0.0))

    def per_group(self, x: Array) -> jax.Array:
        """Sum numbers of sequences [S, R] over each group of its line: [S, R], 0 after these."""
        groups = jnp.asarray(self.batch.groups)
        return _sum_by(jnp.where(groups >= 0, x, 0.0), jnp.maximum(groups, 0), x.shape[1])

    @property
    def present(self) -> jax.Array:
        """Return which groups exist: [S, R] bool."""
        return self.per_group(jnp.ones(self.batch.groups.shape, jnp.float32)) > 0

    def mean(self, x: Array) -> jax.Array:
        """Compute the sum of x [S, R] of groups over the groups of the whole minibatch: []."""
        return jnp.sum(jnp.where(self.present, x, 0.0)) / self.batch.columns["total_groups"]


@dataclasses.dataclass(frozen=True)
class GroupLoss:
    """Hold a loss of groups of sequences, as a chosen and a rejected one: [S, R], and metrics."""

    function: Callable[[GroupTerms], Share]
    reads: tuple[str, ...] = ()
    whole_groups = True

    def __call__(
        self, model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
    ) -> Share:
        """Compute the share of the mean over the minibatch's groups."""
        if model.config.scalar_head:
            scores = head_values(model, hidden, batch.mask)
        else:
            scores = token_terms(model, hidden, batch, settings).scores
        terms = GroupTerms(scores, batch, settings)
        losses, metrics = self.function(terms)
        return terms.mean(losses), metrics


def token_terms(
    model: Model, hidden: jax.Array, batch: PackedSequences, settings: TrainingSettings
) -> TokenTerms:
    """Compute the log-probabilities of the predicted tokens, and entropies if required."""
    logprobs, entropy = head_logprobs(
        model,
        tempered_states(hidden, batch, settings.temperature),
        batch.targets,
        batch.mask,
        top_k_ids=batch.columns.get("top_k_ids"),
        temperature=settings.temperature,
        entropy=settings.entropy_coefficient != 0,
        chunk=settings.chunk,
        layout=settings.layout,
        head_dtype=jnp.float32,
    )
    return TokenTerms(jnp.where(batch.mask, logprobs, 0.0), entropy, batch, settings)


def _column(batch: PackedSequences, name: str) -> Array | None:
    """Return a column, 0 where tokens are masked out; None if there is none."""
    column = batch.columns.get(name)
    if column is None or declaration(name).per != "token":
        return column
    return jnp.where(batch.mask, column, 0)


def is_maximum(name: str) -> bool:
    """Return whether a metric of this name is a maximum over tokens; others are sums of shares."""
    return name.endswith("/max")


def _sum_by(x: Array, ids: Array, count: int) -> jax.Array:
    """Sum each line's numbers [S, N] by ids [S, N] int32 below `count`: [S, count]."""
    return jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=count))(
        jnp.asarray(x), jnp.asarray(ids)
    )
