"""Where things lie: the checkout, these helpers, and what other programs have computed."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
GOLDEN = ROOT / "tests" / "golden"
