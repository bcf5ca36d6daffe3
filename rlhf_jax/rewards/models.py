"""Reward models: sequence classifiers of one label, read at a conversation's last token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.mesh import ONE_DEVICE, Layout, place_rows, rows_of_shard
from rlhf_jax.models.attention import causal_on
from rlhf_jax.models.files.sizes import token_id
from rlhf_jax.models.files.source import Source
from rlhf_jax.models.transformer import forward, logits
from rlhf_jax.placement.transfer import fetched
from rlhf_jax.rewards.combination import Response, Scorer, Scores, as_scores, refuse_broken
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


# Indices of responses, and their scores: the first ones of an array [rows] float32.
ScoredRows = tuple[list[int], jax.Array]


def start_scoring(
    reward_model: RewardModel, responses: Sequence[Response], layout: Layout
) -> tuple[list[ScoredRows], dict[int, str]]:
    """Start scoring responses on the model's devices; return pending parts and failures by index.

    A failure is the reason why a response cannot be scored, such as exceeding the model's context.
    Responses of similar length are batched together.
    """
    weights = fetched(reward_model.model)  # in transfer while texts are tokenized
    texts = [_tokens_to_read(reward_model, response) for response in responses]
    fitting = {index: text for index, text in enumerate(texts) if not isinstance(text, str)}
    failures = {index: text for index, text in enumerate(texts) if isinstance(text, str)}
    own = reward_model
    return start_reading(weights, fitting, own.rows, own.length_bucket, layout), failures


def start_reading(
    weights: Model,
    fitting: Mapping[int, Sequence[int]],
    rows: int,
    bucket: int,
    layout: Layout,
    letters: tuple[int, int] | None = None,
) -> list[ScoredRows]:
    """Start to read texts of tokens, `rows` at a time; those of like length go together.

    bucket, letters: as `RewardModel.length_bucket` and `read_scores` have them.
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
        placed = place_rows((tokens, last), layout)
        parts.append((chosen, read_scores(weights, *placed, layout, letters)))
    return parts


def finish_reading(parts: Sequence[ScoredRows]) -> dict[int, float]:
    """Wait for the scores of texts: by their index."""
    results: dict[int, float] = {}
    found = to_host.fetch([scored for _, scored in parts])
    for (chosen, _), scored in zip(parts, found, strict=True):
        # The last rows of `scored` may be padding.
        results |= zip(chosen, scored.tolist(), strict=False)
    return results


def model_scorer(reward_model: RewardModel, layout: Layout = ONE_DEVICE) -> Scorer:
    """Return the scorer of a reward model.

    It raises Broken if every response of a call fails and none was scored before.
    """
    works = False  # whether it ever returned a number

    def score(responses: Sequence[Response]) -> Scores:
        nonlocal works
        parts, failures = start_scoring(reward_model, responses, layout)
        results: dict[int, float | str] = {**failures, **finish_reading(parts)}
        scores = as_scores([results[index] for index in range(len(responses))])
        works = works or len(scores.failures) < len(responses)
        if not works:
            refuse_broken(str(reward_model.source.path), scores)
        return scores

    return score


def _tokens_to_read(reward_model: RewardModel, response: Response) -> list[int] | str:
    """Return the conversation's token ids up to the scored one, or the reason of a failure."""
    source = reward_model.source
    tokenizer = source.tokenizer
    messages = [*response.messages, {"role": "assistant", "content": response.response}]
    try:
        if tokenizer.template is None:
            tokens = tokenizer.encode("".join(message["content"] for message in messages))
        else:
            tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
    except ValueError as error:
        return f"could not be rendered: {error}"
    while tokens and tokens[-1] == reward_model.padding:
        tokens.pop()
    if 0 < len(tokens) <= source.config.max_context:
        return tokens
    return f"has {len(tokens)} tokens, the context is 1 to {source.config.max_context}"


@functools.partial(jax.jit, static_argnames=("layout", "letters"))
def read_scores(
    model: Model, tokens: Array, last: Array, layout: Layout, letters: tuple[int, int] | None = None
) -> jax.Array:
    """Compute the scalar head at position last[b] of tokens [B, T]: [B] float32.

    letters: of a language model two tokens; the score is how much likelier the first is to follow
    than the second, in nats. Tokens after that position change nothing.
    """
    chex.assert_rank([tokens, last], [2, 1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=causal_on(layout))
    at_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    found = logits(model, at_last)
    return found[:, 0] if letters is None else found[:, letters[0]] - found[:, letters[1]]
