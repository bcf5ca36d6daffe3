"""Reward models: Hugging Face sequence classifiers of one label, read at a conversation's last
token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.model.attention import causal_on
from rlhf_jax.model.transformer import forward, logits
from rlhf_jax.model.weights import huggingface
from rlhf_jax.model.weights.source import Source
from rlhf_jax.rewards.combination import Response, Scorer, Scores, as_scores, refuse_broken
from rlhf_jax.runtime import distributed
from rlhf_jax.types import Array, Model


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A classifier, and how it reads: the scalar head at the last token of the conversation.

    The chat and the response as the assistant's message go through the reward model's own chat
    template, or one after the other where it has none. As in transformers'
    ...ForSequenceClassification, the token that is read is the last one that is not config.json's
    `pad_token_id`: with the end-of-text token as padding, it is the one before the final end of
    text. Raises ValueError for a language model.
    """

    source: Source
    model: Model
    rows: int  # conversations read at a time
    bucket: int = 64  # their tokens are padded on the right to a multiple of this

    def __post_init__(self):
        if not self.source.config.scalar_head:
            raise ValueError(
                f"{self.source.path} is a language model; a reward model is a folder of a"
                " ...ForSequenceClassification."
            )

    @functools.cached_property
    def padding(self) -> int | None:
        """The token that is never read."""
        return huggingface.padding_token(self.source.path)


# indices of answers, and their scores in the first of [rows] float32
Read = tuple[list[int], Array]


def read(
    judge: RewardModel, answers: Sequence[Response], mesh: jax.sharding.Mesh | None
) -> tuple[list[Read], dict]:
    """Start to score answers on the judge's devices: the parts that are on their way, and by index
    why others fail.

    Answers of like length go together. One that is longer than the model's context fails.
    """
    texts = dict(enumerate(_tokens(answer, judge.source, judge.padding) for answer in answers))
    fitting = {index: text for index, text in texts.items() if not isinstance(text, str)}
    attend = causal_on(mesh, judge.source.config.num_kv_heads)
    parts = []
    for chosen, tokens, last in _batches(fitting, judge.rows, judge.bucket):
        parts.append(
            (chosen, _read(judge.model, *meshes.place_rows((tokens, last), mesh), attend=attend))
        )
    return parts, {index: text for index, text in texts.items() if isinstance(text, str)}


def model_scorer(judge: RewardModel, mesh: jax.sharding.Mesh | None = None) -> Scorer:
    """The scorer of a reward model. It raises Broken where every answer of a call fails and none
    was scored before.
    """
    works = False  # whether it ever gave a number

    def score(answers: Sequence[Response]) -> Scores:
        nonlocal works
        parts, results = read(judge, answers, mesh)
        for chosen, scored in parts:
            # rows may be left over
            results |= zip(chosen, distributed.fetch(scored).tolist(), strict=False)
        scores = as_scores([results[index] for index in range(len(answers))])
        works = works or len(scores.failures) < len(answers)
        if not works:
            refuse_broken(str(judge.source.path), scores)
        return scores

    return score


def _tokens(answer: Response, source: Source, padding: int | None) -> list[int] | str:
    """The conversation's token ids up to the one that is read, or why it cannot be scored."""
    tokenizer = source.tokenizer
    response = {"role": "assistant", "content": answer.response}
    messages = [*answer.messages, response]
    try:
        if tokenizer.template is None:
            tokens = tokenizer.encode("".join(message["content"] for message in messages))
        else:
            tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
    except ValueError as error:
        return f"could not be rendered: {error}"
    while tokens and tokens[-1] == padding:
        tokens.pop()
    if 0 < len(tokens) <= source.config.max_context:
        return tokens
    return f"has {len(tokens)} tokens, the context is 1 to {source.config.max_context}"


def _batches(
    texts: dict[int, list[int]], rows: int, bucket: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Keys of at most `rows` texts of like length, their tokens [rows, T] int32 and last positions
    [rows] int32.
    """
    order = sorted(texts, key=lambda index: len(texts[index]))
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        slots = -(-len(texts[chosen[-1]]) // bucket) * bucket
        tokens = np.zeros((rows, slots), np.int32)
        last = np.zeros(rows, np.int32)
        for row, index in enumerate(chosen):
            tokens[row, : len(texts[index])] = texts[index]
            last[row] = len(texts[index]) - 1
        yield chosen, tokens, last


@functools.partial(jax.jit, static_argnames="attend")
def _read(model: Model, tokens: Array, last: Array, *, attend: Callable) -> Array:
    """The scalar head at position last[b] of tokens [B, T], [B] float32; what lies behind it
    changes nothing.
    """
    chex.assert_rank([tokens, last], [2, 1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = forward(model, tokens, positions, attend=attend)
    read = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return logits(model, read)[:, 0]
