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
  x = expected(name)
  N = x['target_boxes'].shape[1]
  return dict(
    boxes=jnp.array(x['target_boxes']),
    label=jnp.maximum(jnp.array(x['target_labels']), 0),
    valid=jnp.arange(N) < x['num_targets'][:, None],
  )


def training_of(name, model) -> dict:
  """Returns `targets_of` with masks, weights and the golden's random numbers."""
  x, out = expected(name), targets_of(name)
  B, N = out['valid'].shape
  if 'target_masks_bits' in x:
    h, w = x['image'].shape[1:3]
    bits = np.unpackbits(x['target_masks_bits'], axis=-1)
    out['masks'] = jnp.array(bits[..., : h * w].reshape(B, N, h, w), jnp.float32)
    out['extents'] = jnp.tile(jnp.float32([0, 0, w, h]), (B, N, 1))
    out['size'] = jnp.tile(jnp.float32([h, w]), (B, 1))
  out['weight'] = jnp.full(B, 1 / B)
  if model.origin == 'mmdetection':
    return out | _mmdetection_priorities(x, out['valid'], model)
  P = model.after[0]
  proposals = x.get('train_num_proposals', np.full(B, P))
  priorities = np.full((1, B, P + N), 2, np.float32)
  for b, (n, k) in enumerate(zip(proposals, x['num_targets'], strict=True)):
    priorities[0, b, :n] = x['roi_priority'][b, :n]
    priorities[0, b, P : P + k] = x['roi_priority'][b, n : n + k]
  out['roi_priority'] = jnp.array(priorities)
  out['rpn_priority'] = jnp.array(x['rpn_priority'])
  return out


def _mmdetection_priorities(x, valid, model) -> dict:
  """Numbers of anchors inside of the image, and of targets before the boxes of a stage."""
  B, N = valid.shape
  rpn = np.full(x['rpn_inside'].shape, 2, np.float32)
  for b in range(B):
    inside = np.flatnonzero(x['rpn_inside'][b])
    rpn[b, inside] = x['rpn_priority'][b, : len(inside)]
  stages = []
  for s in range(len(model.overlaps)):
    R = model.after[0] if s == 0 else model.box_sample
    out = np.full((B, N + R), 2, np.float32)
    for b, k in enumerate(x['num_targets']):
      given = x[f'roi_priority_{s}'][b]
      out[b, :k] = given[:k]
      if s == 0:
        out[b, N:] = given[k : k + R]
        continue
      # The boxes of the stage before, but for targets that were added there: the reference
      # has them sorted by place, we by their random numbers.
      before, order = x[f'roi_priority_{s - 1}'][b], []
      parts = [x[f'roi_{part}_{s - 1}'][b] for part in ('pos', 'neg')]
      for part in parts:
        order += sorted(part[part >= 0], key=before.__getitem__)
      places = [i for part in parts for i in part if i >= k]
      for row, i in enumerate(order):
        if i >= k:
          out[b, N + row] = given[k + places.index(i)]
    stages.append(jnp.array(out))
  return {'rpn_priority': jnp.array(rpn), 'roi_priority': stages}
