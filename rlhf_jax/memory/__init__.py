"""Estimate the memory that a run takes, by part, before anything is loaded."""
