"""From a config to a run; everything is checked before any weight is loaded."""
