"""Define the acceptance rules: their requirements on drafts, noise and target."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """Describe an acceptance rule, as far as the rest of the system depends on it."""

    name: str
    # Whether the text depends on the drafts, and not on the noise alone. Then a draft must not
    # depend on the noise that accepts it, or the distribution is biased: so no sample has the noise
    # of a text that may serve as drafts (`requests` gives it another, `generate` refuses it), its
    # earlier text cannot be replayed, and ranks in a drafter's draw do not predict acceptance.
    depends_on_drafts: bool
    reads_logits: bool  # of target and drafter at every node; otherwise the target's draws suffice


RULES = {
    rule.name: rule
    for rule in (
        AcceptanceRule("replayable", depends_on_drafts=False, reads_logits=False),
        AcceptanceRule("rejection", depends_on_drafts=True, reads_logits=True),
    )
}
