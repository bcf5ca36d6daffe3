"""Describe what is asked of generation and what it gives, on the host."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from rlhf_jax.config.schema import Config
from rlhf_jax.generation.speculative.protocol import Drafter, drafters_of
from rlhf_jax.generation.speculative.rules import RULES, AcceptanceRule
from rlhf_jax.generation.speculative.sampling import Sampling, check_temperature
from rlhf_jax.generation.strategy.acceptance import Observations
from rlhf_jax.mesh import Layout
from rlhf_jax.runtime import messages
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.types import Array, Strategy, hash_once


@dataclasses.dataclass(frozen=True)
class Request:
    """Ask for samples of one prompt.

    Sample ids name the noise: they must not repeat within a seed, nor within a call of `generate`.
    But the same prompt may be drawn again with the same noise, where the text does not depend on
    the drafts (`AcceptanceRule`). One prompt may be asked for several times, each at a temperature
    of its own: one program draws them all. Raises ValueError for a negative or infinite one.
    """

    prompt: np.ndarray  # [P] int32
    sample_ids: tuple[int, ...]
    max_new_tokens: int
    history: tuple[np.ndarray, ...] = ()  # earlier roll-outs of this prompt, the latest last
    # of the same noise, by sample id
    earlier: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    temperature: float | None = None  # 0: greedy; None: that of `GenerationConfig.sampling`
    # the latest roll-outs of other prompts, which lookup reads where `history` leaves room
    others: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature is not None:
            check_temperature(self.temperature)

    @property
    def id(self) -> int:
        """Return the first sample id: no other request of a call has it."""
        return self.sample_ids[0]


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Find the first of some strings in the text of a response's tokens."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]  # Special tokens included, as they are written.

    def end(self, tokens: Sequence[int], new: int) -> int | None:
        """Return how many tokens there are up to the first stop string; None where there is none.

        The last `new` tokens have not been looked at before. A token that goes on after the string
        stays whole, as the policy drew it.
        """
        # A token is of a byte at least, so that no string begins before these.
        longest = max(len(string.encode()) for string in self.strings)
        if not self._in(tokens[-(longest + new) :]):
            return None
        counts = range(len(tokens) - new + 1, len(tokens) + 1)
        found = (count for count in counts if self._in(tokens[max(0, count - longest) : count]))
        return next(found, None)

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(string in text for string in self.strings)


@hash_once
@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Say how to generate: everything that is fixed for one call of `generate`."""

    sampling: Sampling
    strategies: tuple[Strategy, ...]  # that may be chosen; the first is taken where nothing chooses
    stop_tokens: tuple[int, ...]
    max_rows: int  # live rows at most
    max_length: int  # tokens of the longest sample, prompt included
    seed: int
    acceptance: str = "replayable"  # the name of a rule of acceptance
    history: int = 0  # history tokens kept for lookup
    min_rows: int = 1  # the batch shrinks no further: each halving is a program of its own
    stop_strings: StopStrings | None = None

    @classmethod
    def from_config(
        cls,
        config: Config,
        strategies: tuple[Strategy, ...],
        stop_tokens: tuple[int, ...],
        decode: Callable[[Sequence[int]], str],
    ) -> GenerationConfig:
        """Settle what one call of `generate` does in a run.

        `decode` turns tokens into text, special ones as they are written.
        """
        generation = config.generation
        return cls(
            sampling=Sampling(generation.temperature, generation.top_k),
            strategies=strategies,
            stop_tokens=stop_tokens,
            max_rows=generation.max_rows,
            min_rows=generation.min_rows,
            max_length=config.data.max_prompt_tokens + generation.max_new_tokens,
            seed=config.seed,
            acceptance=generation.acceptance,
            history=generation.history_tokens,
            stop_strings=StopStrings(tuple(generation.stop_strings), decode)
            if generation.stop_strings
            else None,
        )

    def ended_itself(self, tokens: Sequence[int]) -> bool:
        """Say whether a finished response has an end of its own, and was not cut off."""
        if tokens[-1] in self.stop_tokens:
            return True
        return self.stop_strings is not None and self.stop_strings.end(tokens, 1) is not None

    @functools.cached_property
    def drafters(self) -> tuple[Drafter, ...]:
        """Return the drafters of the strategies that may be chosen."""
        return drafters_of(self.strategies)

    @property
    def rule(self) -> AcceptanceRule:
        """Return the rule of acceptance."""
        return RULES[self.acceptance]

    def temperature_of(self, request: Request) -> float:
        """Return the temperature that the samples of a request are drawn at."""
        own = request.temperature
        return self.sampling.temperature if own is None else own

    @functools.cached_property
    def of_programs(self) -> GenerationConfig:
        """Return the same with seed 0 and temperature 1, which are data to the programs."""
        sampling = dataclasses.replace(self.sampling, temperature=1.0)
        return dataclasses.replace(self, seed=0, sampling=sampling)


@dataclasses.dataclass(eq=False)
class Sample:
    """Hold one sample on the host; it grows as results of rounds arrive."""

    sample_id: int
    request: Request
    # for lookup: earlier roll-outs of the prompt, and siblings as they finish
    texts: list[np.ndarray]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_k_ids: list[np.ndarray] = dataclasses.field(
        default_factory=list
    )  # [top_k] each, under top-k
    # class of each drafter at its last look
    confidence: dict[str, int] = dataclasses.field(default_factory=dict)
    unfed: int = 0  # tokens since the draft model last drafted for it
    rounds: int = 0  # rounds it took part in
    accepted: int = 0  # drafted tokens that were accepted
    rounds_in_flight: int = 0  # rounds that it takes part in and whose results have not been read
    done: bool = False

    @property
    def prompt(self) -> np.ndarray:
        """Return the request's prompt [P] int32."""
        return self.request.prompt

    @property
    def length(self) -> int:
        """Return the tokens that are known, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def limit(self) -> int:
        """Return the length in tokens at which it ends, prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @functools.cached_property
    def seen_prompt(self) -> bool:
        """Say whether its prompt has been rolled out before."""
        return bool(self.request.history or self.request.earlier)


class IdleWork(Protocol):
    """Offer other work to slices that decode nothing more.

    Processes that share a slice have the same work, in one order.
    """

    @property
    def waits(self) -> bool:
        """Say whether there is any now."""
        ...

    def feed(self, number: int, layout: Layout) -> Array:
        """Dispatch the next of it to slice `number`: an array that is ready when it is done."""
        ...


def is_ready(result: Array) -> bool:
    """Say whether a device has computed a result."""
    # The type stubs of jax.Array lack the method.
    return cast(Any, result).is_ready()


def as_sequences(samples: Sequence[Sample], slots: int) -> Sequences:
    """Return host arrays [B, slots] of samples, in the order given; responses are under the mask.

    Samples of one prompt are a group.
    """
    shape = (len(samples), slots)
    tokens = np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    ids = np.array([sample.sample_id for sample in samples], np.uint32)
    numbers: dict[bytes, int] = {}
    prompts = (sample.prompt.tobytes() for sample in samples)
    group = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int32)
    columns: dict[str, Array] = {"sampled_logprobs": logprobs, "sample_ids": ids}
    if samples and samples[0].top_k_ids:
        width = len(samples[0].top_k_ids[0])
        columns["top_k_ids"] = np.full((*shape, width), -1, np.int32)
    for row, sample in enumerate(samples):
        start = len(sample.prompt)
        end = start + len(sample.tokens)
        tokens[row, :start] = sample.prompt
        tokens[row, start:end] = sample.tokens
        mask[row, start:end] = True
        logprobs[row, start:end] = sample.logprobs
        if "top_k_ids" in columns:
            columns["top_k_ids"][row, start:end] = sample.top_k_ids
    return Sequences(tokens, mask, group).with_columns(**columns)


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """Report what the host knows of a round when its results arrive."""

    strategy: Strategy
    rows: int  # row slots decoded, idle ones included
    live: int  # samples that gained tokens
    tokens: int
    accepted: int
    drafted: int
    context: int = 0  # known tokens of the live samples, before it
    lag: int = 0  # tokens that the draft model had to catch up on, of the sample that lacked most
    seconds: float | None = None  # None where they are not known to be the round's own
    observations: Mapping[str, Observations] = dataclasses.field(default_factory=dict)  # by drafter
    slice: int = 0
    began: float = 0.0  # when it was dispatched, by the clock of `time.perf_counter`,
    ended: float = 0.0  # and when its counters were read
    moves: int = 0  # samples that came from other slices since the slice's round before,
    moved_bytes: int = 0  # with their caches
    finished: int = 0  # samples that ended with it


@messages.register
@dataclasses.dataclass
class GenerationCounts:
    """Count what one generation stage did; `add` is what `generate` observes with."""

    rounds: int = 0
    row_slots: int = 0  # rows decoded, idle ones included
    live: int = 0  # rows that gained tokens
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    moves: int = 0  # of samples between slices
    moved_bytes: int = 0

    def add(self, report: RoundReport) -> None:
        """Count one round; a round that nobody took part in is not one."""
        self.rounds += report.live > 0
        self.row_slots += report.rows
        self.live += report.live
        self.tokens += report.tokens
        self.drafted += report.drafted
        self.accepted += report.accepted
        self.moves += report.moves
        self.moved_bytes += report.moved_bytes

    def __add__(self, other: GenerationCounts) -> GenerationCounts:
        """Return the sums of both."""
        counts = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return GenerationCounts(*(own + more for own, more in counts))

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the stage's figures by name; `tokens_per_round` is a row's, so plain has 1."""
        return {
            "generation/seconds": seconds,
            "generation/tokens": self.tokens,
            "generation/rounds": self.rounds,
            "generation/tokens_per_second": self.tokens / max(seconds, 1e-9),
            "generation/tokens_per_round": self.tokens / max(self.live, 1),
            "generation/acceptance": self.accepted / max(self.drafted, 1),
            "generation/occupancy": self.live / max(self.row_slots, 1),
            "generation/moves": self.moves,
            "generation/moved_bytes": self.moved_bytes,
        }
