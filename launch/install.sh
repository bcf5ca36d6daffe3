#!/usr/bin/env bash
# Creates a virtual environment with the package, as in the image: launch/install.sh FOLDER PACKAGE [EXTRA,EXTRA...]
# PACKAGE is a wheel, a checkout or a name on a package index; rlhf-jax is then in FOLDER/bin.
set -euo pipefail
if (($# < 2)); then
  echo "usage: launch/install.sh FOLDER PACKAGE [EXTRA,EXTRA...]" >&2
  exit 2
fi
folder=$1 package=$2 extras=${3:-}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "$package${extras:+[$extras]}"
"$folder/bin/rlhf-jax" version
