"""The same as `rlhf-jax plan --search`, from a clone."""

import sys

from rlhf_jax.command.plan import main

if __name__ == "__main__":
    sys.exit(main([*sys.argv, "--search"]))
