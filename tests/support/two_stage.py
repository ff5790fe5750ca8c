"""Goldens of two-stage detectors.

To the config.json of each, with the arguments of the reference, was added our own section,
the fields that no array shows.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np

from tests.support import GOLDEN

FOLDER = GOLDEN / 'twostage'


@functools.cache
def expected(name) -> dict[str, np.ndarray]:
  with np.load(FOLDER / f'{name}.expected.npz') as file:
    return dict(file)


def config_of(name) -> dict:
  return json.loads((FOLDER / name / 'config.json').read_text())


def images_of(name) -> tuple[np.ndarray, np.ndarray]:
  """Returns (RGB images, standardised, 0 in padding; mask [B, H, W])."""
  x, config = expected(name), config_of(name)
  scale = 255 if config['framework'] == 'torchvision' else 1
  mean = np.float32(config.get('pixel_mean', config.get('image_mean')))
  std = np.float32(config.get('pixel_std', config.get('image_std')))
  images = (x['image'].astype(np.float32) / scale - mean) / std
  h, w = x['image'].shape[1:3]
  sizes = x['sizes'][:, :, None, None]
  mask = (np.arange(h)[:, None] < sizes[:, 0]) & (np.arange(w) < sizes[:, 1])
  images = images * mask[..., None]
  bgr = config.get('input_format') == 'BGR'
  return images[..., ::-1] if bgr else images, mask


def targets_of(name) -> dict:
  """Returns the targets of the model, with the golden's priorities."""
  x, config = expected(name), config_of(name)
  N = x['target_boxes'].shape[1]
  first = config['framework'] == 'torchvision'
  out = dict(
    boxes=jnp.array(x['target_boxes']),
    label=jnp.maximum(jnp.array(x['target_labels']) - first, 0),
    valid=jnp.arange(N) < x['num_targets'][:, None],
  )
  return out
