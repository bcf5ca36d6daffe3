"""Coordinate plans of assignment: made by a single process, or for several by rank 0.

With several processes, each slice group reports the state of its slices, rank 0 plans, and all
carry out its plans in order. A plan has a number, and takes effect on a slice at its next round, as
the leader of its group decides. No group waits for another except to pass on a sample: the sender
first publishes the sample's content, then both take part in the exchange of their two slices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from rlhf_jax.generation.assignment import (
    Assignments,
    AssignmentState,
    Unfinished,
    apply_assignments,
    join,
    leave,
    reassign,
    unfinished,
)
from rlhf_jax.generation.reallocation import row_transfer
from rlhf_jax.generation.reallocation.row_transfer import RowPacket
from rlhf_jax.generation.requests import Sample
from rlhf_jax.generation.scheduler import SliceBatch, resize
from rlhf_jax.generation.slice_groups import (
    LOOK,
    SliceGroup,
    StageAborted,
    check,
    has_failed,
    wait_for,
)
from rlhf_jax.runtime import distributed, messages

POLL = 0.02  # seconds between two polls for a plan
PLAN_NAP = 1e-3  # seconds, if there is nothing else to do


@messages.register
@dataclasses.dataclass(frozen=True)
class SliceReport:
    """Report the slices of a slice group, after some number of plans."""

    carried: int  # plans carried out so far
    standing: Unfinished


class HandOver:
    """Describe a sample that moves to a slice of another process."""


@messages.register
@dataclasses.dataclass(frozen=True)
class RowHandOver(HandOver):
    """Hold a running sample without its row, which follows in an exchange of two slices."""

    tokens: list[int]
    logprobs: list[float]
    unfed: int
    rounds: int
    accepted: int
    confidence: dict[str, int]
    top_k_ids: list[np.ndarray]
    cache_length: int  # of the transferred row, in tokens


@messages.register
@dataclasses.dataclass(frozen=True)
class StillQueued(HandOver):
    """Signal that a sample to move has not begun: its new slice begins it."""


@messages.register
@dataclasses.dataclass(frozen=True)
class AlreadyEnded(HandOver):
    """Signal that a sample to move has ended meanwhile."""


# fields of a sample in a `RowHandOver`
MOVED = tuple(
    field.name for field in dataclasses.fields(RowHandOver) if field.name != "cache_length"
)


@dataclasses.dataclass
class PlanCoordinator:
    """Take part in planning a stage for this process, or its slice group."""

    stage: AssignmentState
    settle: Callable[[SliceBatch], None]  # receives all rounds that a slice has in flight
    may_occupy: Callable[[], bool]  # whether an idle slice here may start other work now
    carried: int = 0  # plans
    looked: float = 0.0  # time of the last poll for a plan
    over: bool = False
    seen: set[int] = dataclasses.field(default_factory=set)  # unfinished samples at the last plan

    def goes_on(self) -> bool:
        """Return whether anything is left to decode: here, or elsewhere if samples may arrive."""
        if self._together:
            return not self.over
        return bool(self.stage.unassigned) or any(
            batch.busy for batch in self.stage.own_slices.values()
        )

    @property
    def _together(self) -> bool:
        several = len(self._slice_group.all_ranks) > 1
        return several and self.stage.policy.plan_reallocation is not None

    def turn(self) -> None:
        """Carry out the next plan, if it is due.

        Raises StageAborted if another process aborts the stage.
        """
        if self._together:
            if self._slice_group.decide_together(self._next):
                wanted = wait_for(self._name, f"{self._name}/plan {self.carried}", Assignments)
                apply_assignments(self.stage, wanted, self._carry)
                self.carried = self.carried + 1
                self.over = wanted.over
        elif self.stage.due:
            apply_assignments(self.stage, reassign(self.stage, unfinished(self.stage)))
        else:
            self._slice_group.decide_together(lambda: None)  # its leader goes on

    @property
    def _name(self) -> str:
        return self.stage.policy.name

    @property
    def _slice_group(self) -> SliceGroup:
        return self.stage.run.slice_group

    def _next(self) -> bool:
        """Return whether there is another plan now; an idle group of several waits for one.

        At intervals it reports its slices and, as rank 0, plans.
        """
        busy = any(batch.busy for batch in self.stage.own_slices.values())
        while True:
            exists = False
            if time.perf_counter() - self.looked < POLL:
                time.sleep(0 if busy else PLAN_NAP)
            else:
                self.looked = time.perf_counter()
                report = SliceReport(self.carried, unfinished(self.stage))
                self._slice_group.publish(f"{self._name}/rank {distributed.rank()}", report)
                check(self._name)
                if self._slice_group.leads_stage:
                    self._plan()
                plan = f"{self._name}/plan {self.carried}"
                exists = distributed.read_published(plan, Assignments) is not None
            if exists or busy or not self._slice_group.several or self.may_occupy():
                return exists

    def _plan(self) -> None:
        """Publish the next plan, once all have carried out the last one and reported since."""
        leaders = sorted({layout.owners[0] for layout in self.stage.layouts})
        words = [f"{self._name}/rank {rank}" for rank in leaders]
        reports = [distributed.read_published(word, SliceReport) for word in words]
        known = [report for report in reports if report and report.carried == self.carried]
        if len(known) < len(reports):
            return
        where = [one for report in known for one in report.standing]
        over = not where and not self.stage.unassigned
        ids = {one for one, _, _ in where}
        if over or self.stage.due or ids != self.seen:
            self.seen = ids
            wanted = dataclasses.replace(reassign(self.stage, where), over=over)
            if over or wanted.moves or wanted.admissions or tuple(wanted.freed) != self.stage.freed:
                self._slice_group.publish(f"{self._name}/plan {self.carried}", wanted)

    def _carry(self, sample_id: int, source: int, target: int) -> None:
        word = f"{self._name}/plan {self.carried} moves {sample_id}"
        if source in self.stage.own_slices:
            self._give(self.stage.samples[sample_id], source, target, word)
        elif target in self.stage.own_slices:
            self._take(self.stage.samples[sample_id], source, target, word)

    def _give(self, sample: Sample, source: int, target: int, word: str) -> None:
        batch = self.stage.own_slices[source]

        def wait_until_awaited() -> None:
            """Wait until the sample's target awaits it; the first published word decides."""
            consent = f"{word}, awaited"
            while distributed.wait_published(consent, bool, LOOK) is None:
                # A process that has aborted by then takes no part in the exchange, and nor does the
                # other.
                if has_failed(self._name) and not distributed.publish_if_absent(consent, False):
                    raise StageAborted

        self.settle(batch)
        if sample in batch.queue:
            batch.queue.remove(sample)
            self._slice_group.publish(word, StillQueued())
        elif sample.done or sample not in batch.rows:
            self._slice_group.publish(word, AlreadyEnded())
        else:
            cache_length = row_transfer.packet_length(sample.length, batch.state.tokens.shape[1])
            moved = {name: getattr(sample, name) for name in MOVED}
            self._slice_group.publish(word, RowHandOver(**moved, cache_length=cache_length))
            self._slice_group.decide_together(wait_until_awaited)
            self._pass(leave(batch, sample, cache_length), batch, source, target)

    def _take(self, sample: Sample, source: int, target: int, word: str) -> None:
        batch = self.stage.own_slices[target]
        handed = self._slice_group.decide_together(lambda: wait_for(self._name, word, HandOver))
        if isinstance(handed, StillQueued):
            batch.queue.append(sample)
        elif isinstance(handed, RowHandOver):

            def promise() -> None:
                """Publish that the sample is awaited; both sides then take part in the exchange."""
                if not distributed.publish_if_absent(f"{word}, awaited", True):
                    raise StageAborted

            self._slice_group.decide_together(promise)
            for name in MOVED:
                setattr(sample, name, getattr(handed, name))
            resize(batch, len(batch.samples) + 1, self.stage.run.decoding)
            blank = row_transfer.pack_rows(
                batch.state, np.zeros(1, np.int32), handed.cache_length, layout=batch.layout
            )
            join(batch, sample, self._pass(blank, batch, source, target))

    def _pass(self, packet: RowPacket, batch: SliceBatch, source: int, target: int) -> RowPacket:
        ends = self.stage.layouts
        return row_transfer.send_to_process([packet], batch.layout, ends[source], ends[target])
