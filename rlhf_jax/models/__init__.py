"""Hold the transformer: its forward pass, attention, cache, and the layout of its weights."""
