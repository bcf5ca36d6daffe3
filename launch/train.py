"""RLHF in one command: python launch/train.py --config configs/quickstart.py --config.any.key=value

It equals `rlhf-jax train`, in a clone. The same command resumes from the last checkpoint. For
several processes use launch/local.sh, slurm.sh or tpu.sh.
"""

import sys

from rlhf_jax.command.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
