"""Problems for probes, and an evaluator on a model of one layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import evaluators, sharding

CLASSES, TRAIN, TEST = 3, 60, 30
# Of a fixed random layer, whose outputs are the features.
PARAMS = np.random.default_rng(7).normal(size=(12, 9)).astype(np.float32)


def example(n, d, classes, seed=0):
  """Overlapping classes, of features of different scales and means."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, classes, n)
  centers = np.random.default_rng(99).normal(size=(classes, d))
  x = (centers[y] + 2 * rng.normal(size=(n, d))) * np.linspace(0.1, 9, d) + 3
  return x.astype(np.float32), y


@functools.cache
def meshes():
  devices = jax.devices()
  sizes = {(1, 1, 1): devices[:1], (8, 1, 1): devices, (2, 2, 2): devices}
  return [sharding.make_mesh(*size, devices=some) for size, some in sizes.items()]


def predict(params, batch):
  x = jnp.tanh(batch['image'].reshape(len(batch['image']), -1) @ params)
  return {'tokens': x[:, None], 'pre_logits': x, 'logits': x[:, :3]}


def write(folder):
  """Returns (a data set's section, features [90, D], labels); the first 60 are its train split."""
  rng = np.random.default_rng(0)
  labels = np.arange(TRAIN + TEST) % CLASSES
  centers = rng.uniform(60, 190, (CLASSES, 2, 2, 3))
  images = centers[labels] + rng.normal(size=(len(labels), 2, 2, 3)) * 60
  images = np.clip(images, 0, 255).astype(np.uint8)
  path = folder / 'a.npz'
  np.savez(path, images=images, labels=labels)
  x = np.tanh((images.reshape(len(labels), -1) / 127.5 - 1) @ PARAMS)
  splits = {'train': f'train[:{TRAIN}]', 'test': f'train[{TRAIN}:]'}
  return {'source': f'arrays:{path}', **splits}, np.float32(x), labels


def run(type, section, devices=1, predict=predict, **options):
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  data = dict(datasets={'a': section}, pp='value_range(-1, 1)', batch_size=16)
  with jax.set_mesh(mesh):  # as in a run
    evaluator = evaluators.build(type, mesh, **data | options)
    return evaluator.run(predict, PARAMS)


def assert_declared(type, metrics):
  for name in metrics:
    patterns = evaluators.metrics(type)
    assert sum(re.fullmatch(p, name) is not None for p in patterns) == 1, name
