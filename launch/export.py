"""The same as `rlhf-jax export`, from a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
