#!/usr/bin/env bash
# A run over all hosts of a TPU VM: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value
# The repository lies in ~/rlhf_jax on every host, with its packages installed. config.mesh.slices must be a multiple of
# the hosts or divide them, and workdir lie on a file system that they share. Where a process dies the others end within
# a minute, and the same command goes on from the last checkpoint. A run does not end with the connection: the same
# command follows it again, and this stops it:
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=all --command 'kill -TERM -- -$(cat rlhf_jax/run.pid)'
# What processes tell each other is signed with a key that is made here and laid in a file of every host, which only its
# owner may read.
if (($# < 3)); then
  echo "usage: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
key=$(mktemp)
trap 'rm -f "$key"' EXIT
python -c 'import secrets; print(secrets.token_hex(32))' >"$key"

# Each host keeps the key of the run that still goes on it.
begin='pid=$(cat run.pid 2>/dev/null)
if ! kill -0 "$pid" 2>/dev/null; then
  install -m 600 ~/.rlhf_jax_key.new ~/.rlhf_jax_key
  export RLHF_JAX_KEY_FILE=~/.rlhf_jax_key
  rm -f run.code
  : >run.log # before it is followed
  setsid nohup bash -c '\''trap : TERM INT; python launch/train.py "$@"; echo $? >run.code'\'' train --processes auto '
follow=' >>run.log 2>&1 </dev/null &
  pid=$!
  echo "$pid" >run.pid
fi
tail --pid="$pid" -n +1 -f run.log
exit "$(cat run.code)"'

gcloud compute tpus tpu-vm scp "$key" "$name:.rlhf_jax_key.new" --zone "$zone" --worker=all --batch-size=all &&
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --batch-size=all \
    --command "cd rlhf_jax && $begin$(printf '%q ' "$@")$follow"
