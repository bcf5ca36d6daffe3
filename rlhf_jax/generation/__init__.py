"""Generate samples: requests become rows of slices, decoded by speculative rounds."""
