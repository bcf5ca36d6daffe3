"""RLHF in one command: python launch/train.py --config configs/quickstart.py --config.any.key=value

The same as `rlhf-jax train`, from a clone. The same command again goes on from the last checkpoint.
As several processes: launch/local.sh, slurm.sh, tpu.sh.
"""

import sys

from rlhf_jax.command.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
