"""Monitor a run: metrics, traces, and console output."""
