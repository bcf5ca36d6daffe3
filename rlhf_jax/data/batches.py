"""Draw shuffled, endless, resumable batches of prompt indices, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf_jax.data.prompts import Prompts


class Batches:
    """Draw batches of indices below `count`, in an order that only `seed` and epoch determine.

    The stream is one permutation of all indices after another, a fresh one each epoch, cut into
    batches: where `count` is no multiple of `batch`, a batch runs over the epoch's end, so every
    batch is full and no index is dropped. Where a run stands is one position in that stream, so
    resuming, even with another batch size, neither skips nor repeats an index.

    Indices of several sources lie behind each other, with `sizes` that sum to `count`. Each has a
    stream of its own, and these are mixed by `weights`, evenly spread.
    """

    def __init__(
        self,
        count: int,
        batch: int,
        seed: int,
        sizes: Sequence[int] = (),
        weights: Sequence[float] = (),
    ):
        # Imported here: programs are planned and measured on machines that lack it.
        import grain

        if count < 1 or batch < 1:
            raise ValueError(
                f"Batches need at least one prompt and one a batch, not {count} and {batch}."
            )
        # Checkpointed: the number of indices drawn so far, and the identity of the stream.
        self.start = {"position": 0, "count": count, "seed": seed}
        self._batch = batch
        # grain shuffles epoch e with seed + e: not spread, seed 1 would be seed 0 an epoch later.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        ends = np.cumsum(sizes or (count,)).tolist()
        streams = [
            grain.MapDataset.range(start, end).shuffle(seed=spread).repeat()
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        self._stream = grain.MapDataset.mix(streams, weights=weights or (1.0,))

    def take(self, position: dict[str, int]) -> tuple[np.ndarray, dict[str, int]]:
        """Return the batch at a position, int64 indices [batch], and the position after it.

        Raises ValueError if the position is of other data or another seed.
        """
        for name in ("count", "seed"):
            if int(position[name]) != self.start[name]:
                raise ValueError(
                    f"The checkpoint's data position belongs to prompts with {name}"
                    f" {position[name]}, this run has {name} {self.start[name]}; restore the prompt"
                    " file and seed, or start in a new workdir."
                )
        first = int(position["position"])
        places = range(first, first + self._batch)
        indices = np.array([self._stream[place] for place in places], np.int64)
        return indices, self.start | {"position": places.stop}


@dataclasses.dataclass(frozen=True)
class PromptStream:
    """Hold prompts and the order in which a run takes them."""

    prompts: Prompts
    batches: Batches
