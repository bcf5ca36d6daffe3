"""The parts of a run's memory: the bytes of each on a device, their peak, and whether it fits."""

from __future__ import annotations

import dataclasses
import functools

GIGA = 1e9
STAGE_NAMES = ("generation", "inference", "training")
SMALL = 0.01  # parts below this share of the peak are not printed

# Hints for a part that is too large.
SPLIT = "raise mesh.fsdp or mesh.slices"
# for models that only score; with mesh.idle_on_host they wait in the host's memory
SPLIT_OR_OFFLOAD = f"{SPLIT}, or set mesh.idle_on_host"
NO_OFFLOAD = "set mesh.idle_on_host to False"
SPLIT_TENSORS = "raise mesh.tensor"
FEWER_ROWS = "lower training.microbatch_rows or microbatch_tokens"
FEWER_LIVE = "lower generation.max_rows or generation.max_new_tokens"
SHORTER_PROMPTS = "lower data.max_prompt_tokens"
LESS_HISTORY = "lower generation.history_tokens"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold the bytes of one part on the fullest device."""

    name: str
    stage: str  # one of STAGE_NAMES, or "always": from the first step to the last
    bytes: int
    hint: str  # what to change if it is too large


def total(parts: list[Part], stage: str) -> int:
    """Return the bytes of a device in a stage, the constant parts included."""
    return sum(part.bytes for part in parts if part.stage in ("always", stage))


def peak(parts: list[Part]) -> tuple[str, int]:
    """Return the stage with the most bytes on a device, and these."""
    stage = max(STAGE_NAMES, key=functools.partial(total, parts))
    return stage, total(parts, stage)


def check(parts: list[Part], limit: float, holder: str = "A device") -> None:
    """Raise ValueError if the peak is above `limit` bytes of the holder, with a hint."""
    stage, needed = peak(parts)
    if needed <= limit:
        return
    held = [part for part in parts if part.stage in ("always", stage)]
    worst = max(held, key=lambda part: part.bytes)
    raise ValueError(
        f"{holder} needs {needed / GIGA:.1f} GB in {stage} and has {limit / GIGA:.1f} GB; the"
        f" largest part is {worst.name} ({worst.bytes / GIGA:.1f} GB): {worst.hint}."
    )


def table(parts: list[Part]) -> list[str]:
    """Return the estimate as lines of text.

    They are the parts that matter, each stage with the constant parts, and the peak.
    """
    stage, needed = peak(parts)
    unit, letter = (GIGA, "G") if needed >= GIGA else (1e6, "M")

    def line(size: int, stage: str, name: str) -> str:
        return f"{size / unit:8.2f} {letter}B  {stage:10}  {name}"

    shown = [part for part in parts if part.bytes >= SMALL * needed]
    lines = [line(part.bytes, part.stage, part.name) for part in shown]
    stages = [name for name in STAGE_NAMES if any(part.stage == name for part in parts)]
    sums = [line(total(parts, name), name, "in all") for name in stages]
    return [*lines, *sums, line(needed, "peak", f"in {stage}")]
