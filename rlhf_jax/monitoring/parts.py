"""Count the parts of a stage's work that devices have finished, without waiting for any."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from rlhf_jax.types import Array


@dataclasses.dataclass
class PhaseParts:
    """Hold an array of each part that was handed to the devices; it is ready when the part is."""

    of: int  # parts in all
    handed: list[Array] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """Count the parts that are finished."""
        # The type stubs of jax.Array lack the method.
        return sum(bool(cast(Any, array).is_ready()) for array in self.handed)
