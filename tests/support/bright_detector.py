"""A detector of the bright rectangle of an image, whose answers follow from the image."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import weights
from vit_jax.detection import boxes
from vit_jax.models.base import Family, Model

NAMES = ('cat', 'dog', 'bird')
PP = 'decode|detr_resize(32, 48)|canvas(48)|value_range(-1, 1)'


class BrightDetector(Model):
  """Query 1 is the box of the pixels above 0.5, a dog; 0 is likely none, 2 a bird's half."""

  num_classes: int = len(NAMES)

  def __call__(self, images, mask=None, train=False):
    if mask is None:
      mask = jnp.ones(images.shape[:3], bool)
    bright = (images.mean(-1) > 0.5) & mask

    def ends(of_line, number):  # [B, n]: first and last, as shares of the image
      n = of_line.shape[1]
      first = jnp.argmax(of_line, 1) / number
      return first, (n - jnp.argmax(of_line[:, ::-1], 1)) / number

    top, bottom = ends(bright.any(2), mask.any(2).sum(1))
    left, right = ends(bright.any(1), mask.any(1).sum(1))
    box = jnp.stack(
      [left + right, top + bottom, 2 * (right - left), 2 * (bottom - top)]
    )
    boxes = jnp.tile(box.T[:, None] / 2, (1, 3, 1)) * jnp.array([1, 1, 1, 0.5])
    boxes = boxes.at[:, 1, 3].multiply(2)
    logits = jnp.zeros((3, 4)).at[[0, 1, 2], [3, 1, 2]].set(jnp.array([4.0, 4.0, 1.5]))
    return {'logits': jnp.tile(logits, (len(images), 1, 1)), 'boxes': boxes}, {}


class BrightRegions(BrightDetector):
  """The dog as a region with a mask, and the lower half of it without: no bird is valid."""

  masks: bool = True

  def __call__(self, images, mask=None, train=False):
    outputs, out = super().__call__(images, mask)
    number = len(images)
    rows = lambda *values: jnp.tile(jnp.array(values), (number, 1))
    masks = jnp.full((number, 3, 28, 28), 0.9).at[:, 1, 14:].set(0.1)
    return {
      'boxes': boxes.to_corners(outputs['boxes'][:, jnp.array([1, 1, 2])]),
      'scores': rows(*SCORES, 0.99),
      'labels': rows(1, 2, 2),
      'valid': rows(True, True, False),
      'masks': masks,
    }, out


REGIONS = Family(BrightRegions, lambda name: {}, tiny=(), outputs='regions')
FAMILY = Family(BrightDetector, lambda name: {}, tiny=(), outputs='boxes')
# Probabilities of the likeliest classes of queries 1 and 2.
SCORES = [float(jax.nn.softmax(jnp.eye(4)[0] * x)[0]) for x in (4.0, 1.5)]


def loaded(model=None):
  """Returns the detector, or another one, as `weights.load` would."""
  model, names = model or BrightDetector(), list(NAMES)
  return weights.Loaded(
    model=model,
    variables={},
    image_size=(48, 48),
    channels=3,
    pp=PP,
    class_names=names,
    source='D',
    format='run',
    report='',
    step=7,
  )


def write_data(root):
  """Writes twelve images of several sizes with a bright dog each, three with a dark cat too."""
  rng = np.random.default_rng(0)
  content = {
    'images': [],
    # The model numbers them in another order, and has one more.
    'categories': [{'id': 3, 'name': 'dog'}, {'id': 7, 'name': 'cat'}],
    'annotations': [],
  }

  def annotate(i, category, box):
    number = len(content['annotations']) + 1
    row = {'id': number, 'image_id': 10 + i, 'category_id': category, 'bbox': box}
    left, top, w, h = box
    polygon = [left, top, left + w, top, left + w, top + h, left, top + h]
    row |= {'area': w * h, 'segmentation': [polygon]}
    content['annotations'].append(row)

  for i in range(12):
    height, width = rng.permutation([48 + 16 * (i % 3), 64]).tolist()
    left, top = rng.integers(0, 12, 2).tolist()
    w, h = rng.integers(24, 36, 2).tolist()
    image = np.zeros((height, width, 3), np.uint8)
    image[top : top + h, left : left + w] = 255
    name = f'{i}.png'
    Image.fromarray(image).save(root / name)
    size = {'height': height, 'width': width}
    content['images'].append({'id': 10 + i, 'file_name': name, **size})
    annotate(i, 3, [left, top, w, h])
    if i % 4 == 0:
      annotate(i, 7, [40, 40, 8, 8])
  (root / 'G.json').write_text(json.dumps(content))
