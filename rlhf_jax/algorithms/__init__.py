"""Define the algorithms, one file each: scorers, columns made of rewards, losses."""
