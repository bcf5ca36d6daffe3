"""Declare columns: named arrays about token sequences.

A column of tokens `x[B, T]` is about the token at t: `logprobs[b, t]` is the log-probability of
`tokens[b, t]` given `tokens[b, :t]`; entry 0 has no meaning and is never under a mask.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """Declare a column: its axes, dtype, meaning, unit and producer."""

    per: str  # "token" [B, T], "sequence" [B] or "batch" []
    dtype: str
    meaning: str
    width: bool = False  # there is one more axis at the end


_NATS = "in nats"
COLUMNS = {
    # from generation
    "sampled_logprobs": Column("token", "float32", f"log p of a token as it was drawn, {_NATS}"),
    "top_k_ids": Column("token", "int32", "the set that it was drawn from, -1 absent", width=True),
    "temperatures": Column("token", "float32", "the temperature that the sample was drawn at"),
    "sample_ids": Column("sequence", "uint32", "the samples' ids, which name their noise"),
    # from scoring models
    "logprobs": Column("token", "float32", f"log p by the policy before the update, {_NATS}"),
    "reference_logprobs": Column("token", "float32", f"log p by the reference, {_NATS}"),
    "values": Column("token", "float32", "the critic's expectation before the token"),
    # from rewards and advantages
    "rewards": Column(
        "sequence", "float32", "the rewards of whole samples; NaN where there is none"
    ),
    "ended": Column("sequence", "bool", "whether a response has an end, and was not cut off"),
    "kl_weight": Column("batch", "float32", f"the penalty of the KL divergence, a unit {_NATS}"),
    "preference": Column(
        "sequence", "float32", "1 of a chosen sequence, -1 of a rejected one, 0 of neither"
    ),
    "margin": Column(
        "sequence", "float32", "by which a chosen sequence's reward is to be higher; 0 of others"
    ),
    "kl_baseline": Column("batch", "float32", f"the baseline of gains or prices, {_NATS}"),
    "advantages": Column("token", "float32", "the advantage of the token"),
    "returns": Column("token", "float32", "the critic's target before the token"),
    # of a minibatch, for its micro-batches
    "weights": Column("token", "float32", "of each token's loss in the minibatch's"),
    "total_tokens": Column("batch", "float32", "tokens of the minibatch, which means are over"),
    "total_sequences": Column("batch", "float32", "sequences of the minibatch with such tokens"),
    "total_groups": Column("batch", "float32", "groups of the minibatch with such sequences"),
    # of a student
    "noise_keys": Column("token", "uint32", "(seed, sample id) of the token's noise", width=True),
    "positions": Column("token", "int32", "of the token in its sequence"),
    "hidden": Column("token", "", "the policy's hidden state before the token", width=True),
}


def score_column(role: str, scalar_head: bool) -> str:
    """Return the column name of a role's scores: log-probabilities or values."""
    own = {("policy", False): "logprobs", ("critic", True): "values"}
    return own.get((role, scalar_head), f"{role}_{'values' if scalar_head else 'logprobs'}")


def declaration(name: str) -> Column:
    """Return a column's declaration; ValueError if there is none.

    Columns of further scoring models follow from their names.
    """
    if name in COLUMNS:
        return COLUMNS[name]
    if name.endswith(("_logprobs", "_values")):
        return Column("token", "float32", "a further model's score of the token")
    raise ValueError(f"There is no column {name!r}; declare it in COLUMNS.")
