#!/usr/bin/env bash
# Starts a run on the TPUs of a GKE cluster, by XPK: launch/xpk.sh CLUSTER NAME TPU IMAGE --config FILE[:ARGUMENT] --config.any.key=value
# IMAGE is built from launch/Dockerfile with EXTRAS=tpu; TPU is XPK's name of a slice, such as v5p-16. config.mesh.slices
# must be a multiple of the number of hosts or divide it, and workdir must be on a shared file system. Messages between
# processes are signed with RLHF_JAX_KEY, which the script creates unless it is set; anyone with read access to the
# workload in the cluster can read it.
set -euo pipefail
if (($# < 5)); then
  echo "usage: launch/xpk.sh CLUSTER NAME TPU IMAGE --config FILE[:ARGUMENT] --config.any.key=value" >&2
  exit 2
fi
cluster=$1 name=$2 tpu=$3 image=$4
shift 4
new_key='import secrets; print(secrets.token_hex(32))'
export RLHF_JAX_KEY="${RLHF_JAX_KEY:-$(python -c "$new_key")}"
xpk workload create --cluster "$cluster" --workload "$name" --tpu-type "$tpu" --docker-image "$image" \
  --env-file <(echo RLHF_JAX_KEY) --max-restarts 10 --command "rlhf-jax train --processes auto $(printf '%q ' "$@")"
