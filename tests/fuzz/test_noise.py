"""Whatever a run does between evaluations, no draft stems from the noise that accepts it."""

from __future__ import annotations

import collections

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.generation.history import History, requests
from rlhf_jax.generation.requests import Sample
from rlhf_jax.generation.speculative.rules import RULES

PROMPTS = [np.array([number], np.int32) for number in range(3)]

DRAWS = st.tuples(
    st.sampled_from(list(RULES)),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),  # of which prompts, each maybe twice
    st.integers(1, 3),  # samples of each
    st.integers(0, 2),  # of which so many may repeat noise
    st.integers(0, 9),  # where ids would begin
)
RESUMES = st.integers(0, 8)  # tokens that are remembered of a prompt from then on
ENDS = st.just("ends before it is saved")


@given(st.lists(st.one_of(DRAWS, RESUMES, ENDS), max_size=12))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_draft_stems_from_the_noise_that_accepts_it(steps):
    """Follows each text's ancestors: the ids whose noise had a part in it, by its drafts."""
    history = History(4)
    saved = history.state()
    ancestors: dict[int, set[int]] = collections.defaultdict(set)
    for step in steps:
        if step == "ends before it is saved":
            history.restore(saved)
            continue
        if isinstance(step, int):
            saved = history.state()
            history = History(step)
            history.restore(saved)
            continue
        rule, chosen, samples, repeated, first = step
        wanted = requests(
            [PROMPTS[one] for one in chosen],
            samples,
            2,
            first,
            history,
            RULES[rule],
            repeated=repeated,
        )
        drawn = []
        for request in wanted:
            inherited = {one for text in request.earlier for one in ancestors[text] | {text}}
            if RULES[rule].depends_on_drafts:
                assert not inherited & set(request.sample_ids)
            for number in request.sample_ids:
                # A replayable text is its own noise's alone.
                own = inherited if RULES[rule].depends_on_drafts else set()
                drawn.append((number, request, own))
        ids = [number for number, *_ in drawn]
        assert len(set(ids)) == len(ids) or not RULES[rule].depends_on_drafts
        texts = []
        for number, request, own in drawn:
            ancestors[number] = own
            texts.append(Sample(number, request, [], tokens=[number % 5] * 2))
        history = history.with_samples(texts)
