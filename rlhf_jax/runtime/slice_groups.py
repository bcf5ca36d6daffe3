"""The processes that share a slice: the first of them decides, the others follow its numbered
decisions in order.

Every process of a crew runs the same host loop, which is a function of what it is told and of the
rounds that land; all that depends on a clock, on what is compiled or on words of other processes is
decided by the leader alone.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from rlhf_jax import mesh as meshes
from rlhf_jax.runtime import distributed

LOOK = 1.0  # seconds between two looks for a process that has given up

T = TypeVar("T")


class StageAborted(Exception):
    """Another process has given the stage up; its own error says why."""


@dataclasses.dataclass
class SliceGroup:
    """One crew of a stage, to which this process belongs."""

    ranks: tuple[int, ...] = (distributed.LEADER,)
    name: str = ""  # of the stage: one that no other stage at its time has
    decided: int = 0

    @property
    def several(self) -> bool:
        """Whether it has more than one process."""
        return len(self.ranks) > 1

    @property
    def leads(self) -> bool:
        """Whether this process decides, and speaks for the crew's slices."""
        return not self.several or distributed.rank() == self.ranks[0]

    @property
    def slice_groups(self) -> int:
        """All crews of the stage."""
        return distributed.count() // len(self.ranks)

    def share(self, items: Sequence[T]) -> list[T]:
        """This crew's items, dealt out to all crews in turn."""
        return list(items[self.ranks[0] // len(self.ranks) :: self.slice_groups])

    def decide_together(self, decide: Callable[[], T]) -> T:
        """What the leader decides; the others wait for its word. All call it, in the same order.

        Raises Abandoned where the leader has given the stage up; for others that have, the leader
        alone looks.
        """
        if not self.several:
            return decide()
        word = f"{self.name}/of {self.ranks[0]}/{self.decided}"
        self.decided += 1
        if not self.leads:
            return wait_for(self.name, word, self.ranks[0])
        decision = decide()
        self.say(word, decision)
        return decision

    def say(self, word: str, value: Any) -> None:
        """Tell other processes a value of any kind, once for all of the crew."""
        if self.leads:
            distributed.publish(word, base64.b85encode(pickle.dumps(value)).decode())


def slice_group_of(mesh: jax.sharding.Mesh | None, name: str = "") -> SliceGroup:
    """This process's crew in a stage over all slices of a mesh."""
    if mesh is None or not mesh.is_multi_process:
        return SliceGroup((distributed.rank(),), name)
    own = next(part for part in meshes.split(mesh) if meshes.is_here(part))
    return SliceGroup(meshes.owners(own), name)


@contextlib.contextmanager
def failed(stage: str) -> Iterator[None]:
    """Around a process's part of a stage: should it fail, the others wait for it no longer."""
    try:
        yield
    except BaseException:
        distributed.publish(f"{stage}/failed {distributed.rank()}", "yes")
        distributed.publish(f"{stage}/failed", "yes")
        raise


def check(stage: str, rank: int | None = None) -> None:
    """Raise Abandoned where a process, of this rank or any, has given the stage up."""
    if (
        distributed.published(f"{stage}/failed" if rank is None else f"{stage}/failed {rank}")
        is not None
    ):
        raise StageAborted


def wait_for(stage: str, word: str, rank: int | None = None) -> Any:
    """What another process says under a word.

    Raises Abandoned where a process, of this rank or any, gives the stage up meanwhile; if one
    dies, the coordination service ends this one.
    """
    while (said := distributed.awaited(word, LOOK)) is None:
        check(stage, rank)
    return unpacked(said)


def unpacked(word: str) -> Any:
    """The value that was said."""
    return pickle.loads(base64.b85decode(word))
