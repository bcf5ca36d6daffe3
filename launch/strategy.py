"""Run `rlhf-jax strategy` in a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["strategy", *sys.argv[1:]]))
