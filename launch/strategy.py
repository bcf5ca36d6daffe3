"""The same as `rlhf-jax strategy`, from a clone."""

import sys

from rlhf_jax.command.strategy import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
