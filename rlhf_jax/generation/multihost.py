"""When there is a new plan, and who makes it: one process alone, or for several their leader.

Of several, each crew says what its slices do, rank 0 plans, and all carry its plans out in order. A
plan has a number, and takes effect on a slice at its next round, the one that its crew's leader
says. No crew waits for another but to pass a sample on: the one that gives says first what the
sample has by now, then both take part in the exchange of their two slices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from rlhf_jax import mesh as meshes
from rlhf_jax.generation.assignment import (
    Assignments,
    AssignmentState,
    apply_assignments,
    join,
    leave,
    reassign,
    unfinished,
)
from rlhf_jax.generation.requests import Sample
from rlhf_jax.generation.scheduler import SliceBatch, resize
from rlhf_jax.reallocation import row_transfer
from rlhf_jax.reallocation.row_transfer import RowPacket
from rlhf_jax.runtime import distributed
from rlhf_jax.runtime.slice_groups import LOOK, SliceGroup, StageAborted, check, unpacked, wait_for

POLL = 0.02  # seconds between two looks for a plan
NAP = 1e-3  # seconds, where there is nothing else to do
YES = "yes"
NO = "no"
# a sample that has ended meanwhile, and one that has not begun
GONE = "gone"
QUEUED = "queued"
# of a sample that moves
KEPT = ("tokens", "logprobs", "unfed", "rounds", "accepted", "confidence", "support")


@dataclasses.dataclass
class PlanCoordinator:
    """The part of this process, or of its crew, in planning a stage."""

    stage: AssignmentState
    settle: Callable[[SliceBatch], None]  # lands all rounds that a slice has in the air
    may_occupy: Callable[[], bool]  # whether an idle slice here may be given other work now
    carried: int = 0  # plans
    looked: float = 0.0  # for a plan, last
    over: bool = False
    seen: set[int] = dataclasses.field(default_factory=set)  # samples that stood at the last plan

    def goes_on(self) -> bool:
        """Whether there is anything left to decode, here or, where samples may yet come,
        elsewhere.
        """
        if self._together:
            return not self.over
        return bool(self.stage.unassigned) or any(
            instance.busy for instance in self.stage.own_slices.values()
        )

    @property
    def _together(self) -> bool:
        return distributed.started() and self.stage.policy.plan_reallocation is not None

    def turn(self) -> None:
        """Carry out the next plan, if it is time for one. Raises Abandoned where another process
        gives the stage up.
        """
        if self._together:
            self._turn()
        elif self.stage.due:
            apply_assignments(self.stage, reassign(self.stage, unfinished(self.stage)))
        else:
            self._slice_group.decide_together(lambda: None)  # its leader goes on

    def _turn(self) -> None:
        if self._slice_group.decide_together(self._next):
            wanted: Assignments = wait_for(self._name, f"{self._name}/plan {self.carried}")
            apply_assignments(self.stage, wanted, self._carry)
            self.carried = self.carried + 1
            self.over = wanted.over

    @property
    def _name(self) -> str:
        return self.stage.policy.name

    @property
    def _slice_group(self) -> SliceGroup:
        return self.stage.run.slice_group

    def _next(self) -> bool:
        """Whether there is another plan now. A crew of several with nothing to do waits for one."""
        busy = any(instance.busy for instance in self.stage.own_slices.values())
        while (
            not (found := self._look(busy))
            and self._slice_group.several
            and not busy
            and not self.may_occupy()
        ):
            continue
        return found

    def _look(self, busy: bool) -> bool:
        """From time to time: say what there is, plan if this is rank 0, and look for the next
        plan.
        """
        if time.perf_counter() - self.looked < POLL:
            time.sleep(0 if busy else NAP)
            return False
        self.looked = time.perf_counter()
        self._slice_group.say(
            f"{self._name}/rank {distributed.rank()}", [self.carried, unfinished(self.stage)]
        )
        check(self._name)
        if distributed.leads():
            self._plan()
        return distributed.published(f"{self._name}/plan {self.carried}") is not None

    def _plan(self) -> None:
        """The next plan, once all have carried out the last one and said what came of it."""
        leaders = sorted({meshes.owners(part)[0] for part in self.stage.meshes if part is not None})
        said = [distributed.published(f"{self._name}/rank {rank}") for rank in leaders]
        heard = [unpacked(word) for word in said if word]
        if len(heard) < len(said) or any(carried != self.carried for carried, _ in heard):
            return
        where = [one for _, standing in heard for one in standing]
        over = not where and not self.stage.unassigned
        ids = {one for one, _, _ in where}
        if over or self.stage.due or ids != self.seen:
            self.seen = ids
            wanted = dataclasses.replace(reassign(self.stage, where), over=over)
            if over or wanted.moves or wanted.admissions or tuple(wanted.freed) != self.stage.freed:
                self._slice_group.say(f"{self._name}/plan {self.carried}", wanted)

    def _carry(self, sample_id: int, source: int, target: int) -> None:
        word = f"{self._name}/plan {self.carried} moves {sample_id}"
        if source in self.stage.own_slices:
            self._give(self.stage.samples[sample_id], source, target, word)
        elif target in self.stage.own_slices:
            self._take(self.stage.samples[sample_id], source, target, word)

    def _give(self, sample: Sample, source: int, target: int, word: str) -> None:
        instance = self.stage.own_slices[source]
        self.settle(instance)
        if sample in instance.queue:
            instance.queue.remove(sample)
            self._slice_group.say(word, QUEUED)
        elif sample.done or sample not in instance.rows:
            self._slice_group.say(word, GONE)
        else:
            slots = row_transfer.width(
                len(sample.prompt) + len(sample.tokens), instance.state.tokens.shape[1]
            )
            self._slice_group.say(
                word, {name: getattr(sample, name) for name in KEPT} | {"slots": slots}
            )
            self._slice_group.decide_together(lambda: self._is_awaited(word))
            self._pass(leave(instance, sample, slots), instance, source, target)

    def _take(self, sample: Sample, source: int, target: int, word: str) -> None:
        instance = self.stage.own_slices[target]
        said = self._slice_group.decide_together(lambda: wait_for(self._name, word))
        if said == QUEUED:
            instance.queue.append(sample)
        elif said != GONE:
            self._slice_group.decide_together(lambda: _promise(word))
            for name in KEPT:
                setattr(sample, name, said[name])
            resize(instance, len(instance.samples) + 1, self.stage.run.decoding)
            blank = row_transfer.pack_rows(
                instance.state, np.zeros(1, np.int32), said["slots"], mesh=instance.mesh
            )
            join(instance, sample, self._pass(blank, instance, source, target))

    def _is_awaited(self, word: str) -> None:
        """Wait until a sample is. Who has given up by then takes no part in the exchange, and nor
        does the other.
        """
        while distributed.awaited(f"{word}, awaited", LOOK) is None:
            if (
                distributed.published(f"{self._name}/failed")
                and distributed.first(f"{word}, awaited", NO) == NO
            ):
                raise StageAborted

    def _pass(self, packet: RowPacket, instance: SliceBatch, source: int, target: int) -> RowPacket:
        here = cast(Any, instance.mesh)
        ends = cast(Any, self.stage.meshes)
        return row_transfer.send_to_process([packet], here, ends[source], ends[target])


def _promise(word: str) -> None:
    """Say that a sample is awaited: from then on both take part in the exchange."""
    if distributed.first(f"{word}, awaited", YES) == NO:
        raise StageAborted
