"""Shuffled, endless, resumable batches of prompt indices, on the host."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf_jax.data.prompts import Prompts


class Batches:
    """Draw batches of prompt indices below `count`, in an order that `seed` and epoch decide alone.

    The stream is one permutation of all indices after another, a fresh one each epoch, cut into
    batches: where `count` is no multiple of `batch`, a batch runs over the epoch's end, so every
    batch is full and no index is dropped. The whole state is one position in that stream, so
    resuming, even with another batch size, neither skips nor repeats an index.
    """

    def __init__(self, count: int, batch: int, seed: int):
        # Imported here: programs are planned and measured on machines that lack it.
        import grain

        if count < 1 or batch < 1:
            raise ValueError(
                f"Batches need at least one prompt and one a batch, not {count} and {batch}."
            )
        self._count = count
        self._batch = batch
        self._seed = seed
        self._position = 0
        # grain shuffles epoch e with seed + e: not spread, seed 1 would be seed 0 an epoch later.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._stream = grain.MapDataset.range(count).shuffle(seed=spread).repeat()

    def next(self) -> np.ndarray:
        """Return the next batch: int64 indices [batch]."""
        positions = range(self._position, self._position + self._batch)
        self._position = positions.stop
        return np.array([self._stream[position] for position in positions], np.int64)

    def take(self, position: dict[str, int]) -> tuple[np.ndarray, dict[str, int]]:
        """Return the batch at a position, int64 indices [batch], and the position after it."""
        self.restore(position)
        return self.next(), self.state()

    def state(self) -> dict[str, int]:
        """Return what a checkpoint keeps: the position in the stream, and whose stream it is.

        The position counts the indices given out so far.
        """
        return {"position": self._position, "count": self._count, "seed": self._seed}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken; ValueError if it is of other data or another seed."""
        for name, own in (("count", self._count), ("seed", self._seed)):
            if int(state[name]) != own:
                raise ValueError(
                    f"The checkpoint's data position belongs to prompts with {name}"
                    f" {state[name]}, this run has {name} {own}; restore the prompt file and seed,"
                    " or start in a new workdir."
                )
        self._position = int(state["position"])


@dataclasses.dataclass(frozen=True)
class PromptStream:
    """Hold prompts, and the order in which a run takes them."""

    prompts: Prompts
    batches: Batches
