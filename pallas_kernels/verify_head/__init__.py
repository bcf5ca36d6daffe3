"""Reduce a model's logits to the inputs of a replayable draw, without storing the logits."""

from __future__ import annotations

from pallas_kernels.verify_head.reference import (
    Parts,
    blocks,
    combine,
    inside,
    parts_of,
    tempered,
    verify_head,
)

__all__ = ["Parts", "blocks", "combine", "inside", "parts_of", "tempered", "verify_head"]
