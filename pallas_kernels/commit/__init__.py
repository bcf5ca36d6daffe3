"""Write the keys and values of accepted tokens to the cache of every layer."""

from __future__ import annotations

from pallas_kernels.commit.reference import commit

__all__ = ["commit"]
