"""Attend from the nodes of a draft tree to a row's cache and to the tree itself."""

from __future__ import annotations

from pallas_kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
