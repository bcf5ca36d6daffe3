"""A toy of each registry, as a user's own file outside the package would have them: a drafter, an
advantage estimator, a source of rewards, an objective and a model family.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp

import rlhf_jax
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.protocol import Proposal
from rlhf_jax.mesh import pin_rows
from rlhf_jax.objectives.reward import RewardObjective
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


class Guessing(RewardObjective):
    """Learns as the rewards say, and counts its steps in a metric of its own."""

    def title(self, config):
        return "guessing"

    @staticmethod
    def step(state, run, observe):
        state, report = RewardObjective.step(state, run, observe)
        told = report.metrics | {"toy/steps": state.step}
        return state, dataclasses.replace(report, metrics=told)

    def report_names(self):
        return {"toy/steps": "guesses", "reward/mean": "luck"}


def register() -> None:
    """One line for each: what a config file of the user's would call."""
    rlhf_jax.register_drafter(ToyDrafter())
    rlhf_jax.register_estimator(
        rlhf_jax.Estimator("toy", rlhf_jax.of_samples(doubled), compares_group=True)
    )
    rlhf_jax.register_reward_source("toy", LengthSource())
    rlhf_jax.register_objective("toy", Guessing())
    rlhf_jax.register_family(rlhf_jax.Family("toy", "Toy", qk_norm=True))
