"""Ready-made rewards to name in a config, or to build on in your own file."""
