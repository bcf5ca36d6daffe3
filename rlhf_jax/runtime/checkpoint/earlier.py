"""What arrays are called in checkpoints of earlier versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# By how a name begins now: how it began.
BEGINNINGS = {
    "policy.weights.": "policy.",
    "policy.moments.": "optimizer.",
    "policy.version": "step",
    "critic.weights.": "critic.",
    "critic.moments.": "critic_optimizer.",
    "critic.version": "step",
    "drafter.weights.": "drafter.",
    "drafter.moments.": "drafter_optimizer.",
    "drafter.version": "drafter_version",
}


def saved_names(names: Iterable[str], saved: Collection[str]) -> dict[str, str]:
    """Return what arrays are called among those that a checkpoint holds, by their names now.

    One that is not there keeps its name.
    """

    def saved_name(name: str) -> str:
        for now, before in BEGINNINGS.items():
            earlier = before + name.removeprefix(now)
            if name.startswith(now) and name not in saved and earlier in saved:
                return earlier
        return name

    return {name: saved_name(name) for name in names}
