"""Run `rlhf-jax plan --search` in a clone."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:], "--search"]))
