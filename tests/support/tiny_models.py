"""The `tiny` models of every family, with random parameters."""

import functools

import jax
import numpy as np

from vit_jax import models

# 'vit 0', 'vit 1', 'mixer 0', ...
TINY = {
  f'{name} {i}': fields
  for name in models.MODELS
  for i, fields in enumerate(models.family(name).tiny)
}
SIZE = 32


def outputs_of(name):
  return models.family(name.split()[0]).outputs


CLASSIFIERS = [name for name in TINY if outputs_of(name) == 'classes']


def build(name, **fields):
  parameters = models.signature(name.split()[0]).parameters
  classes = {'num_classes': 7} if 'num_classes' in parameters else {}
  return models.build(name.split()[0], **{**classes, **TINY[name], **fields})


def family_of(name):
  return build(name).family


# Families for contracts that cost a compilation each: tokens, and convolutions with
# batch statistics. Other tests compute with the layers of all families.
COMPILED = ('vit', 'resnet')


def one_of_each(names) -> list[str]:
  """Returns the first name of each family of COMPILED."""
  firsts = {name.split()[0]: name for name in reversed(list(names))}
  return [firsts[family] for family in COMPILED if family in firsts]


def total(outputs):
  """Returns the sum of a model's outputs, an array or a dict of them."""
  return sum(x.sum() for x in jax.tree.leaves(outputs))


def having(*fields) -> list[str]:
  """Returns the names of the models that have all these fields."""
  has = lambda name: set(fields) <= {*models.signature(name.split()[0]).parameters}
  names = [name for name in TINY if has(name)]
  assert 'vit 0' in names, f'a ViT has all of {fields}'
  return names


def images():
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (2, SIZE, SIZE, 3)).astype(np.float32)


@functools.cache
def init(model):
  """Returns params with every leaf random: zeros and ones would hide mistakes."""
  return random(model)['params']


def variables(model, params):
  """Returns what a model is applied to: batch norms have random statistics as well."""
  # The shapes do not depend on remat: models that differ in it share one trace.
  same = {'remat': 'none'} if hasattr(model, 'remat') else {}
  return {**random(model.clone(**same)), 'params': params}


@functools.cache
def random(model):
  """From shapes alone: to compile the initialisers takes as long as the model."""
  rng = np.random.default_rng(0)

  def values(path, x):
    names = [key.key for key in path[1:]]
    mean = 1.0 if names[-1] in ('scale', 'var') else 0.0
    if names[0] == 'head' and names[-1] == 'bias' and hasattr(model, 'head_bias_init'):
      mean = model.head_bias_init
    return (mean + 0.2 * rng.normal(size=x.shape)).astype(x.dtype)

  shapes = model.shapes((SIZE, SIZE, 3))
  # Parameters first: they do not depend on whether there are statistics.
  shapes = {'params': shapes.pop('params'), **shapes}
  variables = {}
  for key, tree in shapes.items():
    variables |= jax.tree_util.tree_map_with_path(values, {key: tree})
  return variables


def apply(model, params, key=None):
  """Returns (outputs, out), in training if there is a key."""
  rngs = {} if key is None else {'dropout': jax.random.key(key)}
  return compiled(model, key is not None)(variables(model, params), images(), rngs=rngs)


@functools.cache
def compiled(model, train):
  return jax.jit(functools.partial(model.apply, train=train))
