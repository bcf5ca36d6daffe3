"""Save the state of a run, and restore it from the newest valid checkpoint."""
