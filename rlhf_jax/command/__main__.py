"""python -m rlhf_jax.command: the same as `rlhf-jax`."""

import sys

from rlhf_jax.command import main

if __name__ == "__main__":
    sys.exit(main())
