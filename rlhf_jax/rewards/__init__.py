"""Compute rewards: functions in worker processes, reward models, and their sums."""
