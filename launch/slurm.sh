#!/usr/bin/env bash
# A run over the nodes of a SLURM job, one process a node; from the repository's root, with python on the PATH:
#   sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh --config configs/grpo_llama31_8b.py:gpu --config.mesh.slices=4
# config.mesh.slices must be a multiple of the nodes or divide them, and workdir lie on a file system that all nodes share.
# Where a process dies the others end within a minute, and the same command goes on from the last checkpoint.
#SBATCH --job-name=rlhf_jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@180
# A node's memory is all the job's: by itself, --exclusive does not say so. The signal comes so many seconds before the
# job's time is over, and with scancel --signal=TERM at once: the run saves itself and ends.

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((61440 + SLURM_JOB_ID % 4096))
# The others have time to notice who is missing, and to say so, before SLURM ends them.
# shellcheck disable=SC2016  # each task has its own number
srun --kill-on-bad-exit=0 --wait=50 bash -c \
  'exec python launch/train.py --coordinator "$0" --processes "$SLURM_NTASKS" --process "$SLURM_PROCID" "$@"' \
  "$host:$port" "$@"
code=$?
case $code in
0 | 1 | 2 | 130 | 143) ;; # it has said why itself
*) echo "A process died (exit status $code): the same command goes on from the last checkpoint." >&2 ;;
esac
exit "$code"
