"""Choose the drafting strategy of each round by measured costs and acceptance."""
