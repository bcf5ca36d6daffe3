"""Models that score: classifiers of one label, and language models that name the better answer."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data.comparisons import LETTERS, compare
from rlhf_jax.data.rendering import Message
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.mesh import ONE_DEVICE, Layout, place_rows, rows_of_shard
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.files.sizes import token_id
from rlhf_jax.models.files.source import Source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.placement.transfer import fetched
from rlhf_jax.rewards.combination import (
    Response,
    RewardResult,
    Scorer,
    Scores,
    as_scores,
    refuse_broken,
)
from rlhf_jax.runtime import to_host
from rlhf_jax.runtime.foreign import read_json
from rlhf_jax.types import Array, Model


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """Hold a Hugging Face classifier of one label, and how it reads conversations.

    The chat and the response as the assistant's message go through the reward model's own chat
    template, or are concatenated if it has none. The score is that of the scalar head at the last
    token. As in transformers' ...ForSequenceClassification, that is the last token other than
    config.json's `pad_token_id`: with the end-of-text token as padding, it is the one before the
    final end of text. Raises ValueError for a language model.
    """

    source: Source
    model: Model
    rows: int  # conversations read at a time, if row shards divide them
    length_bucket: int = 64  # Their tokens are padded on the right to a multiple of this.

    def __post_init__(self) -> None:
        if not self.source.config.scalar_head:
            raise ValueError(
                f"{self.source.path} is a language model; a reward model is a folder of a"
                " ...ForSequenceClassification."
            )

    @functools.cached_property
    def padding(self) -> int | None:
        """Return the id of the padding token, never read; None if config.json names none."""
        file = self.source.path / "config.json"
        return token_id(read_json(file), "pad_token_id", file)


# Indices of responses, and what was read of them: the first ones of an array [rows, ...] float32.
ScoredRows = tuple[list[int], jax.Array]
# from a model, tokens [rows, T], the last places [rows] and a layout to numbers [rows, ...]
Read = Callable[[Model, Array, Array, Layout], jax.Array]


def start_scoring(
    reward_model: RewardModel, responses: Sequence[Response], layout: Layout, read: Read
) -> tuple[list[ScoredRows], dict[int, str]]:
    """Start reading responses on the model's devices; return pending parts and failures by index.

    A failure is the reason why a response cannot be scored, such as exceeding the model's context.
    Responses of similar length are batched together.
    """
    weights = fetched(reward_model.model)  # in transfer while texts are tokenized
    texts = [_conversation(reward_model, response) for response in responses]
    fitting = {index: text for index, text in enumerate(texts) if not isinstance(text, str)}
    failures = {index: text for index, text in enumerate(texts) if isinstance(text, str)}
    own = reward_model
    return start_reading(weights, fitting, own.rows, own.length_bucket, layout, read), failures


def start_reading(
    weights: Model,
    fitting: Mapping[int, Sequence[int]],
    rows: int,
    bucket: int,
    layout: Layout,
    read: Read,
) -> list[ScoredRows]:
    """Start to read texts of tokens, `rows` at a time; those of like length go together.

    bucket: as `RewardModel.length_bucket` has it. read: `read_scores` or `read_states`.
    """
    rows = rows_of_shard(rows, layout.row_shards) * layout.row_shards
    order = sorted(fitting, key=lambda index: len(fitting[index]))
    parts = []
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        slots = -(-len(fitting[chosen[-1]]) // bucket) * bucket
        tokens = np.zeros((rows, slots), np.int32)
        last = np.zeros(rows, np.int32)
        for row, index in enumerate(chosen):
            tokens[row, : len(fitting[index])] = fitting[index]
            last[row] = len(fitting[index]) - 1
        placed, places = place_rows((tokens, last), layout)
        parts.append((chosen, read(weights, placed, places, layout)))
    return parts


def finish_reading(parts: Sequence[ScoredRows]) -> dict[int, Any]:
    """Wait for what was read of texts: by their index a number, or an array of them."""
    results: dict[int, Any] = {}
    found = to_host.fetch([scored for _, scored in parts])
    for (chosen, _), scored in zip(parts, found, strict=True):
        # The last rows of `scored` may be padding.
        results |= zip(chosen, scored.tolist() if scored.ndim == 1 else scored, strict=False)
    return results


def model_scorer(reward_model: RewardModel, layout: Layout = ONE_DEVICE) -> Scorer:
    """Return the scorer of a reward model.

    It raises Broken if every response of a call fails and none was scored before.
    """
    works = False  # whether it ever returned a number

    def score(responses: Sequence[Response]) -> Scores:
        nonlocal works
        parts, failures = start_scoring(reward_model, responses, layout, read_scores)
        results: dict[int, float | str] = {**failures, **finish_reading(parts)}
        scores = as_scores([results[index] for index in range(len(responses))])
        works = works or len(scores.failures) < len(responses)
        if not works:
            refuse_broken(str(reward_model.source.path), scores)
        return scores

    return score


def _conversation(reward_model: RewardModel, response: Response) -> list[int] | str:
    """Return the conversation's token ids up to the scored one, or the reason of a failure."""
    source = reward_model.source
    messages = [*response.messages, {"role": "assistant", "content": response.response}]
    tokens = _encoded(source.tokenizer, messages, add_generation_prompt=False)
    if isinstance(tokens, str):
        return tokens
    while tokens and tokens[-1] == reward_model.padding:
        tokens.pop()
    if 0 < len(tokens) <= source.config.max_context:
        return tokens
    return f"has {len(tokens)} tokens, the context is 1 to {source.config.max_context}"


def _encoded(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool
) -> list[int] | str:
    """Return a chat's token ids, or why it has none; without a template its texts are joined."""
    try:
        if tokenizer.template is None:
            return tokenizer.encode("".join(message["content"] for message in messages))
        return tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    except ValueError as error:
        return f"could not be rendered: {error}"


@functools.partial(jax.jit, static_argnames=("layout", "letters"))
def read_scores(
    model: Model, tokens: Array, last: Array, layout: Layout, letters: tuple[int, int] | None = None
) -> jax.Array:
    """Compute the scalar head at position last[b] of tokens [B, T]: [B] float32.

    letters: of a language model two tokens; the score is how much likelier the first is to follow
    than the second, in nats. Tokens after that position change nothing.
    """
    found = logits(model, _states(model, tokens, last, layout))
    return found[:, 0] if letters is None else found[:, letters[0]] - found[:, letters[1]]


@functools.partial(jax.jit, static_argnames="layout")
def read_states(model: Model, tokens: Array, last: Array, layout: Layout) -> jax.Array:
    """Compute what a scalar head reads at position last[b] of tokens [B, T]: [B, M] float32."""
    return _states(model, tokens, last, layout).astype(jnp.float32)


def _states(model: Model, tokens: Array, last: Array, layout: Layout) -> jax.Array:
    """Compute the last hidden states at position last[b] of tokens [B, T]: [B, M]."""
    chex.assert_rank([tokens, last], [2, 1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=causal_on(layout))
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


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
            place: _comparison(preference_model.source, responses[first], responses[second])
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
                functools.partial(read_scores, letters=preference_model.letters),
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


def _comparison(source: Source, first: Response, second: Response) -> list[int] | str:
    """Return the token ids of a comparison, or why it cannot be read."""
    # as in the rows that the model learned from, without a system message of the config
    prompt = first.row.get("prompt", first.messages)
    text = compare(prompt, first.response, second.response)
    messages = [{"role": "user", "content": text}]
    tokens = _encoded(source.tokenizer, messages, add_generation_prompt=True)
    if isinstance(tokens, str) or len(tokens) < source.config.max_context:
        return tokens
    return f"makes a comparison of {len(tokens)} tokens, the context is {source.config.max_context}"
