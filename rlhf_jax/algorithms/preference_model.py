"""A preference model: a language model learns to name the better of two answers.

It reads both answers and replies with a letter, A or B (Dong et al. 2024, RLHF Workflow).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_jax.config.algorithms import Algorithm
from rlhf_jax.config.checks import require
from rlhf_jax.config.schema import Config
from rlhf_jax.data.comparisons import LETTERS, compare
from rlhf_jax.data.given import contents
from rlhf_jax.losses.preference import comparison_metrics
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.training.kinds import GroupLoss, GroupTerms, Share

PAIR = ("chosen", "rejected")


def as_comparison(row: dict[str, Any], random: np.random.Generator, where: str) -> dict[str, Any]:
    """Return a row whose prompt compares its two answers, in random order.

    Its chosen answer is the letter of the better one.
    """
    order = -1 if random.integers(2) else 1
    first, second = contents(row, PAIR, where)[::order]
    prompt = compare(row["prompt"], first, second)
    letters = LETTERS[::order]
    return {**row, "prompt": prompt, **dict(zip(PAIR, letters, strict=True))}


def letters_alone(batch: Sequences, config: Config) -> tuple[Sequences, dict[str, float]]:
    """Return replies without the token that ends them."""
    del config
    return batch.first_token(), {}


def named_letter(terms: GroupTerms) -> Share:
    """Compute the loss of each comparison [S, R], the nats of the right letter, and metrics.

    `preference/margin` is how much likelier the right letter is than the wrong one, in nats.
    """
    signs = terms.column("preference")
    assert signs is not None, "Pairs say which answer is chosen."
    letters = terms.per_sequence(terms.scores)
    right, wrong = (
        terms.per_group(jnp.where(side, letters, 0.0)) for side in (signs > 0, signs < 0)
    )
    losses = -right
    means = {"loss/policy": losses, **comparison_metrics(right - wrong)}
    return losses, {name: terms.mean(x) for name, x in means.items()}


def rate_by_comparisons(weights: int) -> float:
    """Return the learning rate of AdamW for a model of so many weights: 5e-6 at 8 billion.

    (Dong et al. 2024, RLHF Workflow.) It is larger for smaller models, up to 1e-4.
    """
    return float(f"{min(1e-4, 5e-6 * (8e9 / weights) ** 0.75):.1e}")


def check(config: Config) -> None:
    """Raise ValueError where comparisons would be rendered otherwise than rewards render them."""
    for key in ("system", "template_arguments", "raw"):
        require(
            not config.data[key],
            f"data.{key} is set, but a preference model reads comparisons without it; clear it.",
        )


PREFERENCE_MODEL = Algorithm(
    title="a preference model",
    losses={"policy": GroupLoss(named_letter, reads=("preference",))},
    prepare=letters_alone,
    given=PAIR,
    rewrite=as_comparison,
    check=check,
    learning_rate=rate_by_comparisons,
)
