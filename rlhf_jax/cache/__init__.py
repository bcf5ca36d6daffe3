"""Hold the decoding state of rows: key-value caches of several kinds, and the rest."""
