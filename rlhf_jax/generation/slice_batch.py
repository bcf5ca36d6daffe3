"""One slice that generates: its rows, what it is to begin, and the rounds that it has in the air.
Data only.
"""

from __future__ import annotations

import collections
import dataclasses
import time

import jax

from rlhf_jax.generation.rows import Prefix
from rlhf_jax.generation.precompile import Models, Results
from rlhf_jax.generation.requests import Sample
from rlhf_jax.types import Array, DecodeState, Strategy

Board = list[Sample | None]  # the sample of each row


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A sample whose prompt is prefilled: row `source` of `prefix`."""

    sample: Sample
    prefix: Prefix
    source: int


@dataclasses.dataclass(frozen=True, eq=False)
class InFlightRound:
    """A round that was dispatched and whose results are on their way."""

    strategy: Strategy
    samples: Board
    results: Results
    context: int  # known tokens of the live samples
    lag: int  # tokens that the draft model lacked, of the sample that lacked most
    clean: bool  # the slice had nothing to do between it and the round before it
    follows: bool  # it was dispatched while the round before it ran
    compiled: int  # what `ahead` had begun and ended when it was dispatched
    began: float  # when it was dispatched
    # rounds of other slices that its samples took part in before
    after: tuple[tuple[Instance, InFlightRound], ...]
    moved: tuple[int, ...]  # bytes of each sample that had come from another slice


@dataclasses.dataclass
class Clock:
    """When the last counters arrived; None where the host came late and cannot know."""

    last: float | None = None

    def tick(self, waited: bool, began: float | None) -> float | None:
        """Seconds since the device `began`, or without that since the last arrival, where both ends
        are known.
        """
        before = began or self.last
        self.last = time.perf_counter() if waited else None
        return None if before is None or self.last is None else self.last - before


@dataclasses.dataclass(eq=False)
class Instance:
    """A slice's batch. `queue` holds samples it is to begin, `waiting` those whose prompts are
    prefilled.
    """

    number: int
    models: Models
    mesh: jax.sharding.Mesh | None
    state: DecodeState
    board: Board
    queue: collections.deque[Sample] = dataclasses.field(default_factory=collections.deque)
    waiting: collections.deque[Waiting] = dataclasses.field(default_factory=collections.deque)
    in_flight: collections.deque[InFlightRound] = dataclasses.field(
        default_factory=collections.deque
    )
    clock: Clock = dataclasses.field(default_factory=Clock)
    played: DecodeState | None = None  # the state as the last round leaves it
    # see `InFlightRound.after`
    arrived: list[tuple[Instance, InFlightRound]] = dataclasses.field(default_factory=list)
    moved: list[int] = dataclasses.field(default_factory=list)  # see `InFlightRound.moved`
    freed: bool = False  # it is to decode nothing but what it has
    # results of other work that it does
    aside: list[Array] = dataclasses.field(default_factory=list)
    watched: bool = False  # its oldest round was not there yet when last looked for

    @property
    def live(self) -> list[Sample]:
        """The samples in its rows."""
        return [sample for sample in self.board if sample is not None]

    @property
    def samples(self) -> list[Sample]:
        """Those in its rows and those that it is to begin."""
        return [*self.live, *(place.sample for place in self.waiting), *self.queue]

    @property
    def busy(self) -> bool:
        """Whether it has anything left to do."""
        return bool(self.queue or self.waiting or self.in_flight or any(self.board))

    @property
    def has_room(self) -> bool:
        """Whether it may be given other work: two calls ahead of what it is known to have done."""
        return sum(not work.is_ready() for work in self.aside) < 2

    @property
    def ready(self) -> bool:
        """Whether its oldest round's counters are there."""
        return bool(self.in_flight) and self.in_flight[0].results.emission.count.is_ready()
