"""Hold what decoding keeps of its rows: keys and values, by kind of cache, and the rest."""
