"""Let processes that share a slice decide as one: the first decides, the others follow in order.

Every process of a slice group runs the same host loop, which is a function of what it is told and
of the rounds that arrive; all that depends on a clock, on what is compiled or on what other
processes say is decided by the leader alone, and numbered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rlhf_jax.mesh import Layout
from rlhf_jax.runtime import distributed, messages

LOOK = 1.0  # seconds between two looks for a process that has given up

T = TypeVar("T")


@messages.register_error
class StageAborted(Exception):
    """Say that another process has given the stage up; its own error says why."""


@messages.register
@dataclasses.dataclass(frozen=True)
class Decision:
    """Carry what the leader of a slice group has decided."""

    value: Any


@dataclasses.dataclass
class SliceGroup:
    """Hold the processes that share a slice in a stage, of which this is one."""

    ranks: tuple[int, ...] = (distributed.LEADER,)  # none, where this process does not generate
    name: str = ""  # of the stage: one that no other stage at its time has
    all_ranks: tuple[int, ...] = (distributed.LEADER,)  # of all groups, one after the other
    decided: int = 0

    @property
    def several(self) -> bool:
        """Say whether it has more than one process."""
        return len(self.ranks) > 1

    @property
    def leads(self) -> bool:
        """Say whether this process decides, and speaks for the slices of the group."""
        return self.ranks[:1] == (distributed.rank(),)

    @property
    def leads_stage(self) -> bool:
        """Say whether this process plans the stage, and speaks for all of it."""
        return distributed.rank() == self.all_ranks[0]

    @property
    def slice_groups(self) -> int:
        """Count the slice groups of the stage."""
        return len(self.all_ranks) // max(1, len(self.ranks))

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this group's items, dealt out to all groups in turn."""
        if not self.ranks:
            return []
        number = self.all_ranks.index(self.ranks[0]) // len(self.ranks)
        return list(items[number :: self.slice_groups])

    def decide_together(self, decide: Callable[[], T]) -> T:
        """Return what the leader decides; all of the group call it, in the same order.

        Raises StageAborted where the leader has given the stage up; for others that have, the
        leader alone looks.
        """
        if not self.several:
            return decide()
        word = f"{self.name}/of {self.ranks[0]}/{self.decided}"
        self.decided += 1
        if not self.leads:
            return wait_for(self.name, word, Decision, self.ranks[0]).value
        decision = decide()
        distributed.publish(word, Decision(decision))
        return decision

    def publish(self, word: str, value: object) -> None:
        """Tell other processes a value, once for all of the group."""
        if self.leads:
            distributed.publish(word, value)


def slice_group_of(layout: Layout, name: str = "") -> SliceGroup:
    """Return this process's slice group in a stage over all slices of a layout."""
    if layout.mesh is None:
        return SliceGroup((distributed.rank(),), name, tuple(range(distributed.count())))
    own = next((part.owners for part in layout.split() if part.is_here), ())
    return SliceGroup(own, name, layout.owners)


@contextlib.contextmanager
def failed(stage: str) -> Iterator[None]:
    """Stand around a process's part of a stage: should it fail, the others wait no longer."""
    try:
        yield
    except BaseException:
        distributed.publish(_failure(stage, distributed.rank()), True)
        distributed.publish(_failure(stage), True)
        raise


def has_failed(stage: str, rank: int | None = None) -> bool:
    """Say whether a process, of this rank or any, has given the stage up."""
    return distributed.read_published(_failure(stage, rank), bool) is not None


def check(stage: str, rank: int | None = None) -> None:
    """Raise StageAborted where a process, of this rank or any, has given the stage up."""
    if has_failed(stage, rank):
        raise StageAborted


def wait_for(stage: str, word: str, kind: type[T], rank: int | None = None) -> T:
    """Return what another process publishes under a word.

    Raises StageAborted where a process, of this rank or any, gives the stage up meanwhile; if one
    dies, the coordination service ends this one.
    """
    while (value := distributed.wait_published(word, kind, LOOK)) is None:
        check(stage, rank)
    return value


def _failure(stage: str, rank: int | None = None) -> str:
    """Return under what name it stands that a process, of this rank or any, has failed."""
    return f"{stage}/failed" if rank is None else f"{stage}/failed {rank}"
