"""Rewards that are ready to be named in a config, or made in a file of one's own."""
