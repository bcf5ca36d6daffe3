"""Shuffled, endless, resumable batches of prompt indices, on the host."""

from __future__ import annotations

import grain
import numpy as np


class Batches:
    """Batches of `batch` indices below `count`, in an order that depends on `seed` and epoch alone.

    The stream is one permutation of all indices after another, a fresh one each epoch, cut into
    batches: where `count` is no multiple of `batch`, a batch runs over the epoch's end, so every
    batch is full and no index is dropped. The whole state is one position in that stream, so
    resuming, even with another batch size, neither skips nor repeats an index.
    """

    def __init__(self, count: int, batch: int, seed: int):
        if count < 1 or batch < 1:
            raise ValueError(
                f"Batches need at least one prompt and one a batch, not {count} and {batch}."
            )
        self._count = count
        self._batch = batch
        self._seed = seed
        self._position = 0
        # grain shuffles epoch e with seed + e: spread the seeds, or seed 1 would be seed 0 an epoch
        # later.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._stream = grain.MapDataset.range(count).shuffle(seed=spread).repeat()

    def next(self) -> np.ndarray:
        """The next batch: int64 indices, shape (batch,)."""
        places = range(self._position, self._position + self._batch)
        self._position = places.stop
        return np.array([self._stream[place] for place in places], np.int64)

    def take(self, position: dict[str, int]) -> tuple[np.ndarray, dict[str, int]]:
        """Return the batch at a position, int64 indices [batch], and the position after it."""
        self.restore(position)
        return self.next(), self.state()

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: the position (indices given out so far) and what it belongs
        to.
        """
        return {"position": self._position, "count": self._count, "seed": self._seed}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken; a state of other data or another seed is refused."""
        for name, own in (("count", self._count), ("seed", self._seed)):
            if int(state[name]) != own:
                raise ValueError(
                    f"The checkpoint's data position belongs to prompts with {name}"
                    f" {state[name]}, this run"
                    f" has {name} {own}; restore the prompt file and seed, or start in a new"
                    " workdir."
                )
        self._position = int(state["position"])
