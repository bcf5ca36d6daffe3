"""Tell how a run goes: metrics, traces, and what is printed."""
