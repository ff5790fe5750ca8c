"""Google Cloud Storage, gs://BUCKET/PATH: the one place that opens a bucket.

Everything goes through gcsfs, which finds credentials as Google's tools do, falls back to
anonymous access, and repeats requests that failed for a passing reason (503, 429, a broken
connection) for about half a minute. Nothing goes through TensorFlow's file system. Orbax
writes checkpoints by TensorStore, and by gcsfs below etils.epath, which `filesystem` sets
up.

An object is replaced as a whole, and each write gives it a new generation number. So lines
are not appended (see `lines`), and a lock is a condition on the generation (see
`train.lease`).
"""

from vit_jax.buckets.client import (
  Changed,
  download,
  errors_of,
  filesystem,
  ranges,
  read,
  upload,
  write,
)
from vit_jax.buckets.lines import Lines, update
from vit_jax.buckets.outages import raise_if_outage
from vit_jax.buckets.path import SCHEME, BucketPath, is_url, on_disk, path

__all__ = [
  'SCHEME',
  'BucketPath',
  'Changed',
  'Lines',
  'download',
  'errors_of',
  'filesystem',
  'is_url',
  'on_disk',
  'path',
  'raise_if_outage',
  'ranges',
  'read',
  'update',
  'upload',
  'write',
]
