"""Losses, one function per equation: policy, value, preference, KL, advantages, aggregation."""
