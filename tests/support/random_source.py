"""A small model with random parameters, as weights; its logits beside those of a file."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, trees
from vit_jax.weights import adapt
from vit_jax.weights.source import Source


def random_source(**fields):
  """A small model as `configs/folder.py` has it, every parameter random."""
  fields = dict(variant='mu/8', depth=2, num_classes=5) | fields
  family, fields = models.resolve('vit', **fields)
  model = models.build(family, **fields)
  images = jnp.zeros((1, 32, 48, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  flat = {n: rng.normal(0, 0.3, x.shape) for n, x in trees.flatten(shapes).items()}
  flat = {name: x.astype(np.float32) for name, x in flat.items()}
  flat = adapt.unstack(flat, models.family(family))
  names = ['ant', 'bee', 'cat', 'dog', 'eel'] if fields['num_classes'] else None
  return Source(
    source='a run',
    format='run',
    family=family,
    fields=fields,
    image_size=(32, 48),
    channels=3,
    class_names=names,
    flat=flat,
  )


def write_narrow_b16(path) -> None:
  """Writes the arrays of a ViT-B/16 that is 16 wide, for 1,000 classes."""
  model = models.build('vit', 'B/16', width=16, mlp_dim=16, num_heads=1)
  rng = np.random.default_rng(0)
  draw = lambda x: rng.standard_normal(x.shape, np.float32) * np.float32(0.02)
  shapes = trees.flatten(model.shapes((224, 224, 3))['params'])
  np.savez(path, **{name: draw(x) for name, x in shapes.items()})


def logits_of(source, loaded):
  """Logits of the source's own model, and of what was loaded."""
  x = np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)
  # One block after the other: the source's parameters are not stacked.
  model = models.build(source.family, **source.fields | {'scan': False})
  mine, _ = jax.jit(model.apply)({'params': trees.unflatten(source.flat)}, x)
  return mine, jax.jit(loaded.model.apply)(loaded.variables, x)[0]
