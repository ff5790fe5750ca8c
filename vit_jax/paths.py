"""Where files are kept that belong to no run."""

import os
from pathlib import Path


def cache_dir() -> Path:
  """Returns the folder of downloads, compiled programs and indices of data sets.

  $VIT_JAX_CACHE, else vit_jax in $XDG_CACHE_HOME or in ~/.cache. It can be deleted.
  """
  if folder := os.environ.get('VIT_JAX_CACHE'):
    return Path(folder)
  return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'vit_jax'
