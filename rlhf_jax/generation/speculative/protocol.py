"""Define the interface of a drafter, and register drafters by their names in strategies.

A drafter proposes tokens that the target verifies. A new one is a subclass of `Drafter` (of
`drafters.search.SearchDrafter` if it needs no model) and one call of `register`; nothing else in
the package names it. `docs/examples/new_drafter.py` is a complete example.

A drafter's confidence is one of four classes, 0 (nothing is known) to 3 (its drafts are nearly
always accepted), by its own rule. Acceptance is measured class by class, and the budget of a round
goes to the rows of surer classes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from rlhf_jax.cache.cache import Window
from rlhf_jax.cache.state import DecodeState
from rlhf_jax.generation.speculative.sampling import Truncation
from rlhf_jax.mesh import ONE_DEVICE, Layout
from rlhf_jax.runtime.compilation import Execute
from rlhf_jax.types import Array, Emission, Model, Strategy


@dataclasses.dataclass(frozen=True)
class DraftContext:
    """Hold a drafter's inputs in a round, besides the rows themselves."""

    strategy: Strategy
    siblings: Array  # [B, S] int32, rows that hold samples of the same prompt, -1 for none
    model: Model | None  # the draft model, with unrolled layers; None if no drafter needs one
    truncation: Truncation
    with_logits: bool = False  # whether acceptance reads the logits that drafts were drawn from
    layout: Layout = ONE_DEVICE


class Proposal(NamedTuple):
    """Hold a drafter's proposal for one round, for the N nodes of the strategy's bucket."""

    drafts: Array  # [B, N - 1] int32, -1 where it has none
    logits: Array | None = None  # [B, N, V] float32 at each node; None: each draft is a point mass
    window: Window | None = None  # keys and values of the drafter's own nodes, for `after_commit`
    confidence: Array | None = None  # [B] int8, the class of each row, if it is read


class Drafter(Protocol):
    """Propose drafts for the nodes of a strategy; hold no state, and be hashable.

    Drafters are static arguments of jitted functions. Their state per row is in the `DecodeState`.
    The attributes declare a drafter's requirements and its possible strategies.
    """

    name: ClassVar[str]
    needs_model: ClassVar[bool] = False  # a draft model with a cache of its own
    needs_history: ClassVar[bool] = False  # earlier texts, of the same prompt first, and siblings'
    needs_earlier: ClassVar[bool] = False  # the earlier text of the same noise
    # The confidence class of a row that has an earlier text and no token of its own yet.
    first_confidence: ClassVar[int] = 0
    branches: ClassVar[bool] = False  # its second and third choices are worth trees
    # Its rows differ so much that rounds with a budget of drafts are worth their programs.
    packs: ClassVar[bool] = False
    # Every round looks back at the drafts it would have made. So each row's class is known, and
    # rows of class 0 get no drafts; else class 0 is a row of which nothing is known.
    has_hindsight: ClassVar[bool] = False
    # Its drafts are the draft model's own draws, so its acceptance can be measured on finished
    # texts (see `drafters.teacher`).
    learns_from_texts: ClassVar[bool] = False

    def __eq__(self, other: object) -> bool:
        """Return whether another drafter is the same: of one class, with the same parameters."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def catch_up(self, execute: Execute, state: DecodeState, context: DraftContext) -> DecodeState:
        """Return the state after the drafter has read the tokens of other drafters' rounds.

        It is called before `propose` if there are several candidate strategies.
        """
        return state

    def propose(self, execute: Execute, state: DecodeState, context: DraftContext) -> Proposal:
        """Return drafts for the strategy's nodes, by programs that `execute` calls or compiles."""
        ...

    def after_commit(
        self,
        execute: Execute,
        state: DecodeState,
        proposal: Proposal,
        emission: Emission,
        context: DraftContext,
    ) -> DecodeState:
        """Return the state after the drafter has kept the accepted part of its proposal."""
        return state


class NoDrafter(Drafter):
    """Propose nothing: the drafter of plain decoding."""

    name = "none"

    def propose(self, execute: Execute, state: DecodeState, context: DraftContext) -> Proposal:
        """Return no drafts for any row."""
        return Proposal(np.zeros((len(context.siblings), 0), np.int32))


_NO_DRAFTER = NoDrafter()
DRAFTERS: dict[str, Drafter] = {}  # by name, in the order of their registration


def register(drafter: Drafter) -> None:
    """Register `drafter` for strategies, under its name.

    Raises ValueError if another drafter has that name, or the name cannot begin a strategy's.
    """
    name = drafter.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("none", "plain", "adaptive"):
        raise ValueError(
            f"A drafter cannot be called {name!r}: use small letters, digits and underscores, and"
            " none of 'none', 'plain' and 'adaptive'."
        )
    if DRAFTERS.get(name, drafter) != drafter:
        raise ValueError(f"There is a drafter called {name!r} already; choose another name.")
    DRAFTERS[name] = drafter


def drafter_of(strategy: Strategy) -> Drafter:
    """Return the drafter of a strategy; raises ValueError if none is registered by its name."""
    if not strategy.parents:
        return _NO_DRAFTER
    if strategy.drafter not in DRAFTERS:
        raise ValueError(f"No drafter is called {strategy.drafter!r}; register it first.")
    return DRAFTERS[strategy.drafter]


def drafters_of(strategies: Iterable[Strategy]) -> tuple[Drafter, ...]:
    """Return the drafters of some strategies, in the order of their registration."""
    names = {strategy.drafter for strategy in strategies if strategy.parents}
    return tuple(drafter for drafter in DRAFTERS.values() if drafter.name in names)
