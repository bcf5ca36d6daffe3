"""The same as `rlhf-jax strategy`, from a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["strategy", *sys.argv[1:]]))
