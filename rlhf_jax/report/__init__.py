"""Draw the report of a run: one HTML page of its metrics, drafts and time lines."""
