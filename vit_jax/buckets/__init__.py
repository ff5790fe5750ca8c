"""Google Cloud Storage, gs://BUCKET/PATH: the one place that opens a bucket.

Everything goes through gcsfs, which finds credentials as Google's tools do, falls back to
anonymous access, and repeats what failed in passing (503, 429, a connection that broke)
for about half a minute. Nothing goes through TensorFlow's file system. Checkpoints are
written by Orbax: TensorStore, and gcsfs below etils.epath, which `filesystem` sets up.

An object is replaced as a whole, and its generation number changes with it. So there is
no appending (see `lines`), and no lock but a condition on the generation (see
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
