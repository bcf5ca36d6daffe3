"""Define the requests and results of generation, on the host."""

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
    """Request samples of one prompt.

    Sample ids identify the noise: they must not repeat within a seed, nor within a call of
    `generate`. The same prompt may be drawn again with the same noise if the text does not depend
    on the drafts (`AcceptanceRule`). One prompt may have several requests with different
    temperatures: one program draws them all. Raises ValueError for a negative or infinite one.
    """

    prompt: np.ndarray  # [P] int32
    sample_ids: tuple[int, ...]
    max_new_tokens: int
    history: tuple[np.ndarray, ...] = ()  # earlier roll-outs of this prompt, the latest last
    # of the same noise, by sample id
    earlier: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    temperature: float | None = None  # 0: greedy; None: that of `GenerationConfig.sampling`
    # of each sample id, in place of the one temperature
    temperatures: tuple[float, ...] = ()
    # the latest roll-outs of other prompts, which lookup reads where `history` leaves room
    others: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        for temperature in (*self.temperatures, self.temperature or 0.0):
            check_temperature(temperature)

    @property
    def id(self) -> int:
        """Return the first sample id, unique among the requests of a call."""
        return self.sample_ids[0]


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Find the first of some strings in the text of a response's tokens."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]  # Special tokens included, as they are written.

    def end(self, tokens: Sequence[int], new: int) -> int | None:
        """Return the number of tokens up to the first stop string; None if there is none.

        The last `new` tokens have not been searched before. A token that goes on after the string
        stays whole, as the policy drew it.
        """
        # A token has at least one byte, so no string begins before these.
        longest = max(len(string.encode()) for string in self.strings)
        if not self._in(tokens[-(longest + new) :]):
            return None
        counts = range(len(tokens) - new + 1, len(tokens) + 1)
        ends = (count for count in counts if self._in(tokens[max(0, count - longest) : count]))
        return next(ends, None)

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(string in text for string in self.strings)


@hash_once
@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Define one call of `generate`: everything that is fixed for its duration."""

    sampling: Sampling
    strategies: tuple[Strategy, ...]  # the candidates; the first is used without a selector
    stop_tokens: tuple[int, ...]
    max_rows: int  # live rows at most
    max_length: int  # tokens of the longest sample, prompt included
    seed: int
    acceptance: str = "replayable"  # the name of a rule of acceptance
    history: int = 0  # history tokens kept for lookup
    min_rows: int = 1  # the least batch: each halving is another program
    stop_strings: StopStrings | None = None

    @classmethod
    def from_config(
        cls,
        config: Config,
        strategies: tuple[Strategy, ...],
        stop_tokens: tuple[int, ...],
        decode: Callable[[Sequence[int]], str],
    ) -> GenerationConfig:
        """Build the settings of a call of `generate` in a run.

        `decode` turns tokens into text, with special ones written out.
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
        """Return whether a finished response has a stop token or string, and was not cut off."""
        if tokens[-1] in self.stop_tokens:
            return True
        return self.stop_strings is not None and self.stop_strings.end(tokens, 1) is not None

    @functools.cached_property
    def drafters(self) -> tuple[Drafter, ...]:
        """Return the drafters of the candidate strategies."""
        return drafters_of(self.strategies)

    @property
    def rule(self) -> AcceptanceRule:
        """Return the rule of acceptance."""
        return RULES[self.acceptance]

    def temperature_of(self, request: Request, sample_id: int) -> float:
        """Return the temperature that a sample of a request is drawn at."""
        if request.temperatures:
            return request.temperatures[request.sample_ids.index(sample_id)]
        own = request.temperature
        return self.sampling.temperature if own is None else own

    @functools.cached_property
    def of_programs(self) -> GenerationConfig:
        """Return these settings with seed 0 and temperature 1, which are data to the programs."""
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
    rounds_in_flight: int = 0  # its rounds whose results have not been read
    done: bool = False

    @property
    def prompt(self) -> np.ndarray:
        """Return the request's prompt [P] int32."""
        return self.request.prompt

    @property
    def length(self) -> int:
        """Return the number of known tokens, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def limit(self) -> int:
        """Return the length in tokens at which it ends, prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @functools.cached_property
    def seen_prompt(self) -> bool:
        """Return whether its prompt has earlier roll-outs."""
        return bool(self.request.history or self.request.earlier)


class IdleWork(Protocol):
    """Provide other work for slices that have nothing left to decode.

    Processes that share a slice have the same work, in one order.
    """

    @property
    def waits(self) -> bool:
        """Return whether there is work now."""
        ...

    def feed(self, number: int, layout: Layout) -> Array:
        """Dispatch the next work to slice `number`; the returned array is ready when it is done."""
        ...


def is_ready(result: Array) -> bool:
    """Return whether a device has computed a result."""
    # The type stubs of jax.Array lack the method.
    return cast(Any, result).is_ready()


def as_sequences(samples: Sequence[Sample], slots: int) -> Sequences:
    """Return host arrays [B, slots] of samples, in the given order; the mask covers responses.

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
        columns["top_k_ids"] = np.full((*tokens.shape, width), -1, np.int32)
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
    """Report a round as known to the host when its results arrive."""

    strategy: Strategy
    rows: int  # row slots decoded, idle ones included
    live: int  # samples that gained tokens
    tokens: int
    accepted: int
    drafted: int
    context: int = 0  # tokens of the live samples before it
    draft_lag: int = 0  # most tokens by which the draft model was behind in a sample
    seconds: float | None = None  # None if the round cannot be timed alone
    observations: Mapping[str, Observations] = dataclasses.field(default_factory=dict)  # by drafter
    slice: int = 0
    began: float = 0.0  # time of dispatch, by the clock of `time.perf_counter`,
    ended: float = 0.0  # and time at which its counters were read
    moves: int = 0  # samples that came from other slices since the slice's previous round,
    moved_bytes: int = 0  # and their bytes with their caches
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
        """Count one round, unless no row took part in it."""
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
        """Return the stage's metrics by name; `tokens_per_round` is per row, so plain has 1."""
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
