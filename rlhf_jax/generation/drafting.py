"""Derive the drafting of a run from its config: strategies, drafters, and draft model."""

from __future__ import annotations

from rlhf_jax.config import derived
from rlhf_jax.config.schema import Config
from rlhf_jax.generation.speculative.protocol import DRAFTERS, Drafter, drafters_of
from rlhf_jax.generation.speculative.rules import RULES
from rlhf_jax.generation.strategy import candidates
from rlhf_jax.generation.strategy.candidates import Candidates


def strategies(config: Config) -> Candidates:
    """Return the candidate strategies: the named one, or all that are possible.

    Those of 'adaptive' use every registered drafter whose requirements the run meets. Replay needs
    an evaluation or repeated noise, and text that does not depend on the drafts.
    """
    generation = config.generation
    has_model = derived.names_model(config)
    repeats = bool(config.evaluation.every or generation.repeated_noise)
    replayed = repeats and not RULES[generation.acceptance].depends_on_drafts
    usable = [
        one.name
        for one in DRAFTERS.values()
        if (replayed or not one.needs_earlier) and (has_model or not one.needs_model)
    ]
    longest = max(1, min(candidates.LONGEST_CHAIN, generation.max_new_tokens // 2))
    return candidates.parse(generation.strategy, usable, longest)


def drafters(config: Config) -> tuple[Drafter, ...]:
    """Return the drafters of the candidate strategies."""
    return drafters_of(strategies(config).strategies)


def replays(config: Config) -> bool:
    """Return whether a drafter reads the earlier text of the same noise."""
    return any(one.needs_earlier for one in drafters(config))


def drafts_by_model(config: Config) -> bool:
    """Return whether a drafter needs a draft model."""
    return any(one.needs_model for one in drafters(config))


def keeps_draft_logits(config: Config) -> bool:
    """Return whether acceptance reads the distributions of a draft model's tokens."""
    return RULES[config.generation.acceptance].reads_logits and drafts_by_model(config)


def has_drafter(config: Config) -> bool:
    """Return whether a run has a draft model, to draft with or to train."""
    return derived.generates(config) and (derived.makes_drafter(config) or drafts_by_model(config))


def trains_drafter(config: Config) -> bool:
    """Return whether a run trains a student as its draft model."""
    return has_drafter(config) and config.drafter.layers > 0 and config.drafter.learning_rate > 0
