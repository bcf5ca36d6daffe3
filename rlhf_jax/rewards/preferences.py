"""Preference models: language models that read two responses and name the better one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf_jax.data.comparisons import LETTERS, compare
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.models.files.source import Source
from rlhf_jax.placement.transfer import fetched
from rlhf_jax.rewards.combination import Response, RewardResult, Scorer, Scores, as_scores
from rlhf_jax.rewards.models import finish_reading, start_reading
from rlhf_jax.types import Model


@dataclasses.dataclass(frozen=True)
class PreferenceModel:
    """Hold a language model that the algorithm `preference_model` has trained.

    A response's worth is the mean probability that it is better than another of its group
    (Dong et al. 2024, RLHF Workflow: p(A) / (p(A) + p(B))); each pair is read in both orders.
    """

    source: Source
    model: Model
    rows: int  # comparisons read at a time, where row shards divide them
    length_bucket: int = 64  # Their tokens are padded on the right to a multiple of this.

    @property
    def letters(self) -> tuple[int, int]:
        """Return the tokens that name the first answer and the second one."""
        tokenizer = self.source.tokenizer
        first, second = (tokenizer.encode_rendered(letter)[0] for letter in LETTERS)
        return int(first), int(second)

    def __post_init__(self) -> None:
        if self.letters[0] == self.letters[1]:
            raise ValueError(
                f"{self.source.path}: the letters A and B begin with the same token; a preference"
                " model needs a tokenizer that tells them apart."
            )


def preference_scorer(preference_model: PreferenceModel, layout: Layout = ONE_DEVICE) -> Scorer:
    """Return the scorer of a preference model.

    A pair that cannot be read does not count; a response without any other pair has no score.
    """

    def score(responses: Sequence[Response]) -> Scores:
        weights = fetched(preference_model.model)
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for index, response in enumerate(responses):
            groups[response.group].append(index)
        pairs = [(a, b) for group in groups.values() for a in group for b in group if a != b]
        texts = {
            place: _tokens(preference_model.source, responses[first], responses[second])
            for place, (first, second) in enumerate(pairs)
            if responses[first].response != responses[second].response
        }
        read = finish_reading(
            start_reading(
                weights,
                {place: text for place, text in texts.items() if not isinstance(text, str)},
                preference_model.rows,
                preference_model.length_bucket,
                layout,
                preference_model.letters,
            )
        )
        won: list[list[float]] = [[] for _ in responses]
        reasons = ["has no other response to be compared with"] * len(responses)
        for place, (first, second) in enumerate(pairs):
            text = texts.get(place)
            if isinstance(text, str):
                reasons[first] = reasons[second] = text
                continue
            # of equal responses neither is better
            chance = 1 / (1 + np.exp(-read.get(place, 0.0)))
            won[first].append(chance)
            won[second].append(1 - chance)
        results: list[float | RewardResult] = [
            float(np.mean(chances)) if chances else reason
            for chances, reason in zip(won, reasons, strict=True)
        ]
        return as_scores(results)

    return score


def _tokens(source: Source, first: Response, second: Response) -> list[int] | str:
    """Return the token ids of a comparison, or why it cannot be read."""
    tokenizer = source.tokenizer
    # as in the rows that the model learned from, without a system message of the config
    prompt = first.row.get("prompt", first.messages)
    text = compare(prompt, first.response, second.response)
    try:
        if tokenizer.template is None:
            tokens = tokenizer.encode(text)
        else:
            messages = [{"role": "user", "content": text}]
            tokens = tokenizer.encode_chat(messages, add_generation_prompt=True)
    except ValueError as error:
        return f"could not be rendered: {error}"
    if len(tokens) < source.config.max_context:
        return tokens
    return f"makes a comparison of {len(tokens)} tokens, the context is {source.config.max_context}"
