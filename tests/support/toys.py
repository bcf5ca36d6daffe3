"""A toy of each registry, as a user's own file outside the package would have them: a drafter, an
advantage estimator, a source of rewards, algorithms and a model family.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.protocol import Proposal
from rlhf_jax.losses.value import value_loss
from rlhf_jax.mesh import pin_rows
from rlhf_jax.models.families import QWEN3
from rlhf_jax.rewards.combination import as_scores


@functools.partial(jax.jit, static_argnames=("strategy", "layout"))
def repeat_last(state, strategy, layout):
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    place = jnp.arange(tree.bucket(strategy) - 1, dtype=jnp.int32)
    drafts = jnp.where(place < len(strategy.parents), last, -1)
    return pin_rows(Proposal(drafts), layout)


class ToyDrafter(rlhf_jax.Drafter):
    """Drafts that the last token repeats; it searches nothing, and looks back at nothing."""

    name = "toy"

    def propose(self, execute, state, context):
        return execute(repeat_last, state, strategy=context.strategy, layout=context.layout)


def doubled(rewards, samples_per_prompt):
    return 2 * rewards


class LengthSource(rlhf_jax.RewardSource):
    """Of toy://NAME/LENGTH: how near a response is to that many characters; none if it is empty."""

    def term_name(self, spec):
        return spec.split("/")[2]

    def check(self, spec):
        if not spec.rpartition("/")[2].isdigit():
            raise ValueError(f"Reward {spec!r} must end in a length.")

    @contextlib.contextmanager
    def open(self, spec, config, alive):
        wanted = int(spec.rpartition("/")[2])

        def score(responses):
            texts = [response.response for response in responses]
            return as_scores([-abs(len(t) - wanted) if t else "is empty" for t in texts])

        yield score


def counted(batch, config):
    """Advantages as the rewards say, and a metric of its own."""
    batch, metrics = rlhf_jax.GRPO.prepare(batch, config)
    return batch, metrics | {"toy/samples": float(len(batch.tokens))}


def judged(terms):
    """A critic's loss, of the judge's values."""
    known, mask = terms.batch.columns, terms.batch.mask
    losses = value_loss(terms.scores, known["judge_values"], known["returns"], mask=mask, clip=0.2)
    return losses, {"judge/loss": terms.mean(losses)}


def rewards_as_returns(batch, config):
    """Returns that are the sample's reward at each token; and how far the judge is from the rater
    that it began as.
    """
    known = batch.columns
    returns = np.where(batch.mask, known["rewards"][:, None], 0.0).astype(np.float32)
    moved = np.abs(known["judge_values"] - known["rater_values"])[batch.mask].mean()
    return batch.with_columns(returns=returns), {"judge/moved": float(moved)}


JUDGE_LOSS = rlhf_jax.ValueLoss(judged, reads=("judge_values", "returns"))
TWO_CRITICS = dataclasses.replace(
    rlhf_jax.PPO,
    losses={**rlhf_jax.PPO.losses, "judge": JUDGE_LOSS},
    scores=lambda config: (*rlhf_jax.PPO.scorers(config), "judge"),
)
# a judge that learns from the samples of a policy that does not, beside a rater that stays
JUDGE_ALONE = rlhf_jax.Algorithm(
    "a judge alone", {"judge": JUDGE_LOSS}, ("judge", "rater"), rewards_as_returns
)


def register() -> None:
    """One line for each: what a config file of the user's would call."""
    rlhf_jax.register_drafter(ToyDrafter())
    rlhf_jax.register_estimator(
        rlhf_jax.Estimator("toy", rlhf_jax.of_samples(doubled), compares_group=True)
    )
    rlhf_jax.register_reward_source("toy", LengthSource())
    guessing = dataclasses.replace(rlhf_jax.GRPO, title="guessing", prepare=counted)
    rlhf_jax.register_algorithm("toy", guessing)
    rlhf_jax.register_family(rlhf_jax.Family("toy", "Toy", weights=QWEN3.weights))
