"""Compute log-probability and entropy of given tokens, without storing the logits."""

from __future__ import annotations

from pallas_kernels.logprobs.reference import token_logprobs

__all__ = ["token_logprobs"]
