"""Place calls: which devices and shardings each call of an iteration has."""
