#!/usr/bin/env bash
# A run over all hosts of a TPU VM: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value
# The repository lies in ~/rlhf_jax on every host, with its packages installed. config.mesh.slices must be a multiple of
# the hosts or divide them, and workdir lie on a file system that they share. Where a process dies the others end within
# a minute, and the same command goes on from the last checkpoint.
if (($# < 3)); then
  echo "usage: launch/tpu.sh NAME ZONE --config FILE[:ARGUMENT] --config.any.key=value" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
  --command "cd rlhf_jax && python launch/train.py --processes auto $(printf '%q ' "$@")"
