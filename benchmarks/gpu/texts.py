"""Part c: speculative text against plain text, and log-probs of generation against training's.

In bfloat16 a round of several nodes rounds other than a round of one, so that a token may differ
where two are nearly equal; from there on the two texts are of different contexts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contest import Run, run, tokens_a_round
from benchmarks.gpu.ledger import Case, Ledger
from benchmarks.gpu.setting import (
    Sizes,
    acceptance,
    decoding_case,
    layouts,
    random_model,
    with_earlier,
)
from rlhf_jax.generation.decoding import student_for
from rlhf_jax.generation.requests import as_sequences
from rlhf_jax.inference.logprobs import mismatch
from rlhf_jax.inference.scoring import score_sequences
from rlhf_jax.training.distill import student_of
from rlhf_jax.types import Model

# Drafts that are mostly wrong, of a draft model, a tree of its drafts, and mostly right.
STRATEGIES = ("lookup-chain-4", "model-chain-4", "model-tree-2x2x1", "replay-chain-8")
MOST_NAMED = 32  # samples whose first difference is named


class Plain(NamedTuple):
    """Hold the plain text of a model, and the model as training has it."""

    model: Model
    text: Run


def cases(sizes: Sizes, ledger: Ledger) -> Iterator[Case]:
    """Yield plain text and each strategy of each model, without and with kernels."""
    plain = functools.lru_cache(maxsize=1)(functools.partial(plain_text, sizes))
    for name in sizes.compared:
        hows, _ = layouts(sizes.models[name])
        for how, strategy in itertools.product(hows, ("plain", *STRATEGIES)):
            compare = functools.partial(compare_texts, sizes, plain, name, how, strategy)
            yield Case(f"{name}, {how}: {strategy}", compare)


def plain_text(sizes: Sizes, name: str, how: str) -> Plain:
    """Generate the plain text of a random model by "reference" or "pallas" kernels."""
    model = random_model(sizes.models[name])
    layout = layouts(model.config)[0][how]
    return Plain(model, run(decoding_case(model, sizes.texts, layout, "plain")))


def compare_texts(
    sizes: Sizes, plain: Callable[[str, str], Plain], name: str, how: str, strategy: str
) -> dict[str, Any]:
    """Generate by a strategy; count what differs from plain text, and score what was generated."""
    model, text = plain(name, how)
    found, why = layouts(model.config)
    layout = found[how]
    ours = text
    if strategy != "plain":
        case = with_earlier(decoding_case(model, sizes.texts, layout, strategy), text)
        if strategy.startswith("model"):
            student = student_of(model, max(1, model.config.num_layers // 2))
            case = dataclasses.replace(case, drafter=student_for(case.target, student, layout))
        ours = run(case)
    drawn = as_sequences(ours.samples, sizes.texts.slots)
    # as training computes them anew, which is what a run records of each step
    again = score_sequences(model, drawn, rows=sizes.microbatch_rows, layout=layout)
    mismatches = mismatch(drawn.columns["sampled_logprobs"], again, drawn.mask)
    return differences(ours, text) | mismatches | {"no_kernels": why}


def differences(ours: Run, plain: Run) -> dict[str, Any]:
    """Count the tokens that are compared, up to a sample's first that differs, and name those."""
    first = {}
    compared = 0
    for own, other in zip(ours.samples, plain.samples, strict=True):
        places = np.flatnonzero(np.array(own.tokens) != np.array(other.tokens))
        compared += int(places[0]) + 1 if len(places) else len(own.tokens)
        if len(places):
            first[own.sample_id] = int(places[0])
    named = dict(list(first.items())[:MOST_NAMED])
    return {
        "samples": len(ours.samples),
        "differing_samples": len(first),
        "tokens_compared": compared,
        "first_differing_token": named,  # by sample
        "acceptance": acceptance([ours]),
        "tokens_per_round": tokens_a_round([ours]),
    }
