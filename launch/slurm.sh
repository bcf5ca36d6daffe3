#!/usr/bin/env bash
# Starts a run on the nodes of a SLURM job, one process per node; in the root of a clone, with python on the PATH:
#   sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh --config configs/grpo_llama31_8b.py:gpu --config.mesh.slices=4
# config.mesh.slices must be a multiple of the number of nodes or divide it, and workdir must be on a shared disk.
# If a process or a node dies, the others stop within a minute, and the job is requeued and resumes from the last
# checkpoint, at most ten times. Messages between processes are signed with RLHF_JAX_KEY, which the script creates
# unless RLHF_JAX_KEY or RLHF_JAX_KEY_FILE is set; srun passes it to the tasks in their environment.
#SBATCH --job-name=rlhf_jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# --mem=0 requests all memory of a node; --exclusive alone does not. TERM@180 sends the signal 180 seconds before the
# time limit (scancel --signal=TERM sends it immediately); the run then saves its state and stops.

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((61440 + SLURM_JOB_ID % 4096))
new_key='import secrets; print(secrets.token_hex(32))'
[[ -n "${RLHF_JAX_KEY_FILE:-}" ]] || export RLHF_JAX_KEY="${RLHF_JAX_KEY:-$(python -c "$new_key")}"
# XLA shards autotuning among ranks, which may deadlock; it is not yet known to be safe.
export XLA_FLAGS="--xla_gpu_shard_autotuning=false ${XLA_FLAGS:-}"
# --wait gives the other ranks time to detect and report the lost rank before SLURM kills them.
# shellcheck disable=SC2016  # each task expands its own SLURM_PROCID
srun --kill-on-bad-exit=0 --wait=50 --cpu-bind=none bash -c \
  'exec python launch/train.py --coordinator "$0" --processes "$SLURM_NTASKS" --process "$SLURM_PROCID" "$@"' \
  "$host:$port" "$@"
code=$?
case $code in
0 | 1 | 2 | 130 | 143) exit "$code" ;; # the process has printed the reason
75) ;;                                 # the process has printed the lost rank
*) echo "A process died (exit status $code): the same command resumes from the last checkpoint." >&2 ;;
esac
((${SLURM_RESTART_COUNT:-0} < 10)) && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
