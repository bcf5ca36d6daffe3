"""Names of arrays in checkpoints of earlier versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# By current prefix: the earlier prefix.
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
    """Return the names of arrays in a checkpoint, by their current names.

    A missing array keeps its name.
    """

    def saved_name(name: str) -> str:
        for now, before in BEGINNINGS.items():
            earlier = before + name.removeprefix(now)
            if name.startswith(now) and name not in saved and earlier in saved:
                return earlier
        return name

    return {name: saved_name(name) for name in names}
