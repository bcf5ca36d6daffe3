"""The same as `rlhf-jax export`, from a clone."""

import sys

from rlhf_jax.command.export import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
