"""Losses, one equation a function: of tokens, values, KL, advantages, and their sums."""
