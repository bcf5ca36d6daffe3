"""Plan runs for devices that need not be here: their memory, prices, search and compilers."""
