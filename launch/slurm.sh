#!/usr/bin/env bash
# A run over the nodes of a SLURM job, one process a node; from the repository's root, with python on the PATH:
#   sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh --config configs/grpo_llama31_8b.py:gpu --config.mesh.slices=4
# config.mesh.slices must be a multiple of the nodes or divide them, and workdir lie on a file system that all nodes share.
# Where a process or a node dies the others end within a minute, and the job is queued again and goes on from the last
# checkpoint, ten times at most. What processes tell each other is signed with RLHF_JAX_KEY, which is made here unless
# it, or RLHF_JAX_KEY_FILE, is given, and which srun hands to the tasks in their environment.
#SBATCH --job-name=rlhf_jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# A node's memory is all the job's: by itself, --exclusive does not say so. The signal comes so many seconds before the
# job's time is over, and with scancel --signal=TERM at once: the run saves itself and ends.

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((61440 + SLURM_JOB_ID % 4096))
new_key='import secrets; print(secrets.token_hex(32))'
[[ -n "${RLHF_JAX_KEY_FILE:-}" ]] || export RLHF_JAX_KEY="${RLHF_JAX_KEY:-$(python -c "$new_key")}"
# XLA shares the tuning of kernels between ranks, which may then wait for each other: not yet shown to be safe.
export XLA_FLAGS="--xla_gpu_shard_autotuning=false ${XLA_FLAGS:-}"
# The others have time to notice who is missing, and to say so, before SLURM ends them.
# shellcheck disable=SC2016  # each task has its own number
srun --kill-on-bad-exit=0 --wait=50 --cpu-bind=none bash -c \
  'exec python launch/train.py --coordinator "$0" --processes "$SLURM_NTASKS" --process "$SLURM_PROCID" "$@"' \
  "$host:$port" "$@"
code=$?
case $code in
0 | 1 | 2 | 130 | 143) exit "$code" ;; # it has said why itself
75) ;;                                 # it has said who is lost
*) echo "A process died (exit status $code): the same command goes on from the last checkpoint." >&2 ;;
esac
((${SLURM_RESTART_COUNT:-0} < 10)) && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
