#!/bin/sh
# Trains on a Cloud TPU VM or a slice of many: copies this checkout's HEAD to every
# worker, installs it there, and starts the same command on all of them.
#
#   scripts/tpu_vm.sh NAME ZONE --config=configs/vit_b16.py --workdir=gs://BUCKET/runs/b16
#
# NAME is an existing TPU VM (gcloud compute tpus tpu-vm create NAME --zone=ZONE
# --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite). The work folder must be
# one that all workers share: in a bucket, or on a mounted Filestore. A run that
# was stopped with its state saved (exit code 75) is started again; run this again after
# the VM itself was preempted, and training goes on where it stopped.
set -eu

if [ $# -lt 3 ]; then
  echo "usage: $0 NAME ZONE ARGUMENTS_OF_vit_jax.main..." >&2
  exit 2
fi
name=$1 zone=$2
shift 2

arguments=
for argument in "$@"; do
  # Quoted for the remote shell: a quote inside becomes '\''.
  quoted=$(printf '%s' "$argument" | sed "s/'/'\\\\''/g")
  arguments="$arguments '$quoted'"
done

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD

on_all() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp "$archive" "$name:vit_jax.tar.gz" --zone="$zone" \
  --worker=all
on_all 'set -e; mkdir -p vit_jax; tar -xzf vit_jax.tar.gz -C vit_jax; cd vit_jax
[ -d .venv ] || python3 -m venv .venv
.venv/bin/pip install --quiet -e ".[tf,tpu]"'
on_all "cd vit_jax; while :; do
.venv/bin/python -m vit_jax.main --distributed$arguments && exit 0
code=\$?; [ \$code = 75 ] || exit \$code
done"
