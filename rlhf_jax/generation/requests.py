"""What is asked of generation and what it gives, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from pallas_kernels.dispatch import REFERENCE, Kernels
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy.acceptance import Observations
from rlhf_jax.types import Strategy


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted of it. Sample ids name the noise: they must not repeat
    within a seed.
    """

    prompt: np.ndarray  # [P] int32
    sample_ids: tuple[int, ...]
    max_new_tokens: int
    history: tuple[np.ndarray, ...] = ()  # earlier roll-outs of this prompt, the latest last
    # of the same noise, by sample id
    earlier: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How to generate: everything that is fixed for one call of `generate`."""

    sampling: Sampling
    strategies: tuple[Strategy, ...]  # that may be chosen; the first is taken where nothing chooses
    stop_tokens: tuple[int, ...]
    max_rows: int  # live rows at most
    max_length: int  # tokens of the longest sample, prompt included
    seed: int
    acceptance: str = "replayable"  # or "rejection"
    history: int = 0  # history tokens kept for lookup
    min_rows: int = 1  # the batch shrinks no further: each halving is a program of its own
    kernels: Kernels = REFERENCE

    def uses_drafter(self, drafter: str) -> bool:
        """Whether a strategy that may be chosen drafts by 'lookup', 'replay' or 'model'."""
        return any(strategy.drafter == drafter for strategy in self.strategies)


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample on the host; grows as rounds arrive."""

    sample_id: int
    request: Request
    # for lookup: earlier roll-outs of the prompt, and siblings as they finish
    texts: list[np.ndarray]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    support: list[np.ndarray] = dataclasses.field(default_factory=list)  # [top_k] each, under top-k
    # class of each drafter at its last look
    confidence: dict[str, int] = dataclasses.field(default_factory=dict)
    unfed: int = 0  # tokens since the draft model last drafted for it
    rounds: int = 0  # rounds it took part in
    accepted: int = 0  # drafted tokens that were accepted
    flying: int = 0  # rounds that it takes part in and that have not landed
    done: bool = False

    @property
    def prompt(self) -> np.ndarray:
        """[P] int32."""
        return self.request.prompt

    @property
    def limit(self) -> int:
        """The length at which it ends, prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def seen_prompt(self) -> bool:
        """Whether its prompt has been rolled out before."""
        return bool(self.request.history or self.request.earlier)


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What the host knows of a round when its counters arrive."""

    strategy: Strategy
    rows: int  # row slots decoded, idle ones included
    live: int  # samples that gained tokens
    tokens: int
    accepted: int
    drafted: int
    context: int = 0  # known tokens of the live samples, before it
    lag: int = 0  # tokens that the draft model had to catch up on, of the sample that lacked most
    seconds: float | None = None  # None where they are not known to be the round's own
    evidence: Mapping[str, Observations] = dataclasses.field(default_factory=dict)  # by drafter
    slice: int = 0
    began: float = 0.0  # when it was dispatched, by the clock of `time.perf_counter`,
    ended: float = 0.0  # and when its counters were read
    moves: int = 0  # samples that came from other slices since the slice's round before,
    moved_bytes: int = 0  # with their caches
