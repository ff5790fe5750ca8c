"""Published weights and runs as models of ours, and back.

The way down: `read` opens a source and names its parameters as ours, `fit` brings them to
a model, `load` returns both. `write` is the way back.
"""

from vit_jax.weights.adapt import fit
from vit_jax.weights.export import write
from vit_jax.weights.loading import Loaded, load
from vit_jax.weights.reading import complete, from_section, read
from vit_jax.weights.source import Source

__all__ = [
  'Loaded',
  'Source',
  'complete',
  'fit',
  'from_section',
  'load',
  'read',
  'write',
]
