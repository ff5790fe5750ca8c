"""Published weights and runs as models of ours, and back.

`load` returns a model with its parameters, `read` the parameters as a source holds them,
`fit` brings these to a model.
"""

from vit_jax.weights.fitting import describe, fit
from vit_jax.weights.loading import Loaded, complete, from_section, load, read
from vit_jax.weights.source import Source

__all__ = [
  'Loaded',
  'Source',
  'complete',
  'describe',
  'fit',
  'from_section',
  'load',
  'read',
]
