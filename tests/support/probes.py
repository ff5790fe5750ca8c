"""Problems for the tests of probes, and evaluators of a model of one layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import evaluators, sharding

CLASSES, TRAIN, TEST = 3, 60, 30
# Parameters of a fixed random layer, whose outputs are the features.
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


def write(folder, seed=0, train=TRAIN):
  """Writes noisy copies of one image per class, 30 of them for the test split.

  Returns:
    (a data set's section, features of all images, their labels).
  """
  rng = np.random.default_rng(seed)
  labels = np.arange(train + TEST) % CLASSES
  centers = rng.uniform(60, 190, (CLASSES, 2, 2, 3))
  images = centers[labels] + rng.normal(size=(len(labels), 2, 2, 3)) * 60
  images = np.clip(images, 0, 255).astype(np.uint8)
  path = folder / f'{seed}.npz'
  names = [f'kind{c}' for c in range(CLASSES)]
  np.savez(path, images=images, labels=labels, class_names=names)
  x = np.tanh((images.reshape(len(labels), -1) / 127.5 - 1) @ PARAMS)
  splits = {'train': f'train[:{train}]', 'test': f'train[{train}:]'}
  return {'source': f'arrays:{path}', **splits}, np.float32(x), labels


def build(type, sections, devices=1, **options):
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  data = dict(datasets=sections, pp='value_range(-1, 1)', batch_size=16)
  return evaluators.build(type, mesh, **data | options)


def run(type, sections, devices=1, predict=predict, **options):
  """Returns the numbers of an evaluator, each of which it declares once."""
  evaluator = build(type, sections, devices, **options)
  with jax.set_mesh(evaluator.mesh):  # as in a run
    numbers = evaluator.run(predict, PARAMS)
  for name in numbers:
    assert sum(re.fullmatch(p, name) is not None for p in evaluator.METRICS) == 1, name
  return numbers
