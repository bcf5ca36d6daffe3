#!/usr/bin/env bash
# Starts several processes on this machine: launch/local.sh PROCESSES --config FILE[:ARGUMENT] --config.any.key=value
#
# config.mesh.slices must be a multiple of PROCESSES or divide it. GPUs are divided evenly. Rank 0 uses the terminal;
# lines of other ranks have the rank as a prefix. Ctrl-C and SIGTERM go to all processes. If one dies, the others stop
# within a minute, and the same command resumes from the last checkpoint. Messages between processes are signed with
# RLHF_JAX_KEY, which the script creates unless RLHF_JAX_KEY or RLHF_JAX_KEY_FILE is set.
set -u
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/local.sh PROCESSES --config FILE[:ARGUMENT] --config.any.key=value" >&2
  exit 2
fi
processes=$1
shift
train=$(dirname "$0")/train.py
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
new_key='import secrets; print(secrets.token_hex(32))'
[[ -n "${RLHF_JAX_KEY_FILE:-}" ]] || export RLHF_JAX_KEY="${RLHF_JAX_KEY:-$(python -c "$new_key")}"
known=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)}
IFS=, read -ra gpus <<<"$known"
each=$((${#gpus[@]} / processes))
# XLA shards autotuning among ranks, which may deadlock; it is not yet known to be safe.
((each > 0)) && export XLA_FLAGS="--xla_gpu_shard_autotuning=false ${XLA_FLAGS:-}"

rank_of() { # RANK ARGUMENTS...: runs that process by exec
  local rank=$1 own
  shift
  if ((each > 0)); then
    own=("${gpus[@]:rank * each:each}")
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${own[*]}")
    export CUDA_VISIBLE_DEVICES
  fi
  exec python "$train" --coordinator "localhost:$port" --processes "$processes" --process "$rank" "$@"
}

labelled() { # RANK: adds the rank as a prefix to each line
  while IFS= read -r line; do echo "[$1] $line"; done
}

pids=()
for ((rank = 0; rank < processes; rank++)); do
  if ((rank == 0)); then rank_of 0 "$@" & else rank_of "$rank" "$@" > >(labelled "$rank") 2> >(labelled "$rank" >&2) & fi
  pids+=($!)
done
send() { kill -s "$1" ${pids[@]+"${pids[@]}"} 2>/dev/null; }
trap 'send INT' INT
trap 'send TERM' TERM

code=0 deadline=0 died=0 told=0
while ((${#pids[@]})); do
  for rank in "${!pids[@]}"; do
    kill -0 "${pids[rank]}" 2>/dev/null && continue
    wait "${pids[rank]}"
    status=$?
    unset "pids[rank]"
    ((status == 75)) && told=1 # the process has printed the lost rank and the hint
    ((status == 0 || code != 0)) && continue
    code=$status deadline=$((SECONDS + 50))
    case $status in
    1 | 2 | 75 | 130 | 143) ;; # the process has printed the reason
    *)
      echo "Rank $rank died (exit status $status): the others end within a minute." >&2
      died=1
      ;;
    esac
  done
  ((deadline && SECONDS >= deadline)) && send KILL
  sleep 0.2
done
((died && !told)) && echo "The same command resumes from the last checkpoint; the output of libraries is in the workdir's log." >&2
exit "$code"
