"""Plan runs for absent devices: memory, prices, search, and verification by compilers."""
