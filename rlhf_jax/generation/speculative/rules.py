"""Say what each rule of acceptance needs of the drafts, their noise and the target."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """Describe how drafts are accepted, by what the rest of the system must know of it."""

    name: str
    # Whether the text depends on the drafts, and not on the noise alone. Then a draft must not
    # depend on the noise that accepts it, or the law is biased: so no sample has the noise of a
    # text that somebody may draft from (`requests` gives it another, `generate` refuses it), its
    # earlier text cannot be replayed, and no rank in a drafter's draw says what is accepted.
    depends_on_drafts: bool
    reads_logits: bool  # of target and drafter at every node, where else the target's draws do


RULES = {
    rule.name: rule
    for rule in (
        AcceptanceRule("replayable", depends_on_drafts=False, reads_logits=False),
        AcceptanceRule("rejection", depends_on_drafts=True, reads_logits=True),
    )
}
