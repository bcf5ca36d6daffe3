#!/usr/bin/env bash
# Starts a run on all hosts of a TPU VM: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value
# The repository must be in ~/rlhf_jax on every host, with its packages installed. config.mesh.slices must be a multiple
# of the number of hosts or divide it, and workdir must be on a shared file system. If a process dies, the others stop
# within a minute, and the same command resumes from the last checkpoint. If the connection drops, the run continues: the
# same command follows its log again, and this command stops it:
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=all --command 'kill -TERM -- -$(cat rlhf_jax/run.pid)'
# Messages between processes are signed with a key that the script creates and copies to a file on every host, readable
# only by its owner.
if (($# < 3)); then
  echo "usage: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
key=$(mktemp)
trap 'rm -f "$key"' EXIT
python -c 'import secrets; print(secrets.token_hex(32))' >"$key"

# A host keeps the key of a run that is still active on it.
begin='pid=$(cat run.pid 2>/dev/null)
if ! kill -0 "$pid" 2>/dev/null; then
  install -m 600 ~/.rlhf_jax_key.new ~/.rlhf_jax_key
  export RLHF_JAX_KEY_FILE=~/.rlhf_jax_key
  rm -f run.code
  : >run.log # tail needs the file
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
