"""Run `rlhf-jax report` in a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
