"""Run `rlhf-jax export` in a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
