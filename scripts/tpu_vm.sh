#!/bin/sh
# Trains on a Cloud TPU VM or a slice of many: copies this checkout's HEAD to every
# worker, installs it there, sees whether JAX finds the TPU, and starts the same command
# on all of them.
#
#   scripts/tpu_vm.sh NAME ZONE --config=vit_b16 --workdir=gs://BUCKET/runs/b16
#
# NAME is an existing TPU VM; docs/guides/tpu.md has the commands that create and
# delete it. The work folder must be one that all workers share: in a bucket, or on a
# mounted Filestore. A run that was stopped with its state saved (exit code 75) is started
# again, unless three starts in a row end within ten minutes each: as when a worker has
# failed for good, for which the others wait in vain. Run this again after the VM itself was
# preempted, and training goes on where it stopped.
set -eu

if [ $# -lt 3 ]; then
  echo "usage: $0 NAME ZONE ARGUMENTS_OF_vit_jax_train..." >&2
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
# Without the tests, whose golden files are 40 MB.
git archive --format=tar.gz --output="$archive" HEAD ":(exclude)tests"

on_all() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp "$archive" "$name:vit_jax.tar.gz" --zone="$zone" \
  --worker=all
# Ubuntu 22.04, which TPU VM images are based on, has Python 3.10: uv brings 3.12.
on_all 'set -e; mkdir -p vit_jax; tar -xzf vit_jax.tar.gz -C vit_jax; cd vit_jax
if [ ! -d .venv ]; then
  for python in python3.13 python3.12 python3.11 python3 ""; do
    test="import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
    [ -z "$python" ] || ! $python -c "$test" 2>/dev/null || break
  done
  if [ "$python" ]; then $python -m venv .venv
  else
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.12 .venv
  fi
fi
.venv/bin/pip install --quiet -e ".[tf,tpu]"
.venv/bin/vit_jax doctor --expect tpu'
on_all "cd vit_jax; short=0; while :; do
began=\$(date +%s)
.venv/bin/vit_jax train --distributed$arguments && exit 0
code=\$?; [ \$code = 75 ] || exit \$code
if [ \$((\$(date +%s) - began)) -lt 600 ]; then short=\$((short + 1)); else short=0; fi
[ \$short -lt 3 ] || exit \$code
done"
