"""Let processes that share a slice decide as one: the first decides, the others follow in order.

Every process of a slice group runs the same host loop, which is a function of its decisions and of
the rounds that arrive; everything that depends on a clock, on compilation or on other processes'
messages is decided by the leader alone, and numbered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rlhf_jax.mesh import Layout
from rlhf_jax.runtime import distributed, messages

LOOK = 1.0  # seconds between two polls for a process that has aborted

T = TypeVar("T")


@messages.register_error
class StageAborted(Exception):
    """Signal that another process has aborted the stage; its own error has the reason."""


@messages.register
@dataclasses.dataclass(frozen=True)
class Decision:
    """Carry a decision of the leader of a slice group."""

    value: Any


@dataclasses.dataclass
class SliceGroup:
    """Hold the processes that share a slice in a stage, of which this is one."""

    ranks: tuple[int, ...] = (distributed.LEADER,)  # none if this process does not generate
    name: str = ""  # of the stage: unique among concurrent stages
    all_ranks: tuple[int, ...] = (distributed.LEADER,)  # of all groups, concatenated
    decided: int = 0

    @property
    def several(self) -> bool:
        """Return whether it has more than one process."""
        return len(self.ranks) > 1

    @property
    def leads(self) -> bool:
        """Return whether this process decides and reports for the group's slices."""
        return self.ranks[:1] == (distributed.rank(),)

    @property
    def leads_stage(self) -> bool:
        """Return whether this process plans the stage and reports for all of it."""
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
        """Return the leader's decision; all of the group call it, in the same order.

        Raises StageAborted if the leader has aborted the stage; only the leader polls for others.
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
        """Publish a value to other processes, once for all of the group."""
        if self.leads:
            distributed.publish(word, value)


def slice_group_of(layout: Layout, name: str = "") -> SliceGroup:
    """Return this process's slice group in a stage over all slices of a layout."""
    if layout.mesh is None:
        return SliceGroup((distributed.rank(),), name, tuple(range(distributed.count())))
    owners = next((part.owners for part in layout.split() if part.is_here), ())
    return SliceGroup(owners, name, layout.owners)


@contextlib.contextmanager
def failed(stage: str) -> Iterator[None]:
    """Wrap a process's part of a stage: if it fails, the others stop waiting."""
    try:
        yield
    except BaseException:
        distributed.publish(_failure(stage, distributed.rank()), True)
        distributed.publish(_failure(stage), True)
        raise


def has_failed(stage: str, rank: int | None = None) -> bool:
    """Return whether a process, of this rank or any, has aborted the stage."""
    return distributed.read_published(_failure(stage, rank), bool) is not None


def check(stage: str, rank: int | None = None) -> None:
    """Raise StageAborted if a process, of this rank or any, has aborted the stage."""
    if has_failed(stage, rank):
        raise StageAborted


def wait_for(stage: str, word: str, kind: type[T], rank: int | None = None) -> T:
    """Return the value that another process publishes under a key.

    Raises StageAborted if a process, of this rank or any, aborts the stage meanwhile; if one dies,
    the coordination service ends this one.
    """
    while (value := distributed.wait_published(word, kind, LOOK)) is None:
        check(stage, rank)
    return value


def _failure(stage: str, rank: int | None = None) -> str:
    """Return the key under which the failure of a process, of this rank or any, is published."""
    return f"{stage}/failed" if rank is None else f"{stage}/failed {rank}"
