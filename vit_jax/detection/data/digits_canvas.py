"""The source `digits_canvas`: bundled digits on canvases, with exact boxes and masks."""

import numpy as np

from vit_jax.data import philox
from vit_jax.data.features import Feature, ImageFeature
from vit_jax.data.sources import arrays, splits
from vit_jax.data.sources.base import fingerprint
from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data import objects

# Pixels of a canvas's side, and the maximum number of digits on it.
_SIDE, _MOST = 64, 4
_SIZES = {'train': 10_000, 'test': 1_000}
_TRIES = 8  # random places to try for a digit
# Random numbers per digit: which digit, its size, its places
_PER_DIGIT = 2 + 2 * _TRIES
_INK = 64  # minimum ink, out of 255, of a pixel in a digit's mask
# The key of the random numbers. It lies above any 32-bit seed, because augmentations use
# the seed of the run as their key.
_TAG = 0xD161 << 40


class DigitsCanvas(objects.Objects):
  """Canvases with 1 to 4 handwritten digits, uint8 [64, 64, 1].

  Each digit comes from the same split of the source 'digits', which has 1,797. It is
  enlarged from 8 x 8 pixels to between 0.2 and 0.45 of the canvas's side, and placed where
  it overlaps no other. Its mask holds the pixels with at least a quarter of full ink; its
  box is the smallest around the mask. Both are exact. Digits are bright, on a dark ground
  of varying brightness.

  An example depends on its split and number only. It is computed in integers, so that it is
  the same on every machine. 'train' has 10,000 canvases, 'test' 1,000.

  Args:
    target: must be ''.
    split: a split expression, see `splits`.
    segments: whether an example also has 'segments', uint8 [64, 64]: 0 for the
      background, 1 + digit for a digit's mask.
    masks: whether an example also has the digits' masks, see `objects.encode_masks`.
  """

  def __init__(
    self, target: str, split: str, *, segments: bool = False, masks: bool = False
  ):
    if target:
      raise ValueError(f"Source 'digits_canvas' takes no path, got {target!r}")
    self.name = 'digits_canvas'
    self._segments, self._masks = segments, masks
    self._digits = {name: arrays.Digits('', name) for name in _SIZES}
    self._rows = [
      (name, row)
      for name, rows in splits.select(split, _SIZES, self.name)
      for row in rows.tolist()
    ]
    self.num_classes, self.class_names = 10, [str(i) for i in range(10)]
    self.features = {'image': ImageFeature((_SIDE, _SIDE, 1)), **objects.BOXES}
    if segments:
      self.features['segments'] = Feature(
        (_SIDE, _SIDE), 'uint8', located=True, classes=('background', *self.class_names)
      )
    if masks:
      self.features |= objects.MASKS
    # The option `masks` is newer: without it, fingerprints stay as they were.
    options = (segments, masks) if masks else (segments,)
    self.fingerprint = fingerprint(('digits_canvas 1', _SIDE, _MOST, split, *options))

  def __len__(self) -> int:
    return len(self._rows)

  def name_of(self, index: int) -> str:
    name, row = self._rows[index]
    return f'{self.name}/{name}#{row}'

  def read(self, indices: np.ndarray) -> list[dict]:
    out = []
    for index in indices:
      canvas, pasted = self._canvas(index)
      boxes = np.array([box for box, _, _ in pasted], np.float64).reshape(-1, 4)
      example = {
        'image': canvas[..., None],
        'boxes': (boxes / _SIDE).astype(np.float32),
        'label': np.array([label for _, _, label in pasted], np.int32),
      }
      if self._segments:
        example['segments'] = np.zeros(canvas.shape, np.uint8)
        for _, mask, label in pasted:
          example['segments'][mask] = 1 + label
      if self._masks:
        example |= objects.encode_masks(mask for _, mask, _ in pasted)
      out.append(example)
    return out

  def truth(self, masks: bool = False) -> Truth:
    every = [(i, *digit) for i in range(len(self)) for digit in self._canvas(i)[1]]
    image, boxes, shapes, labels = zip(*every, strict=True)
    return Truth.from_source(
      self,
      np.array(boxes, np.float64),
      sizes=np.full((len(self), 2), _SIDE),
      image=np.array(image, np.int64),
      category=np.array(labels, np.int64),
      areas=np.array([mask.sum() for mask in shapes], np.float64),
      crowd=np.zeros(len(every), bool),
      masks=[rle.encode(mask) for mask in shapes] if masks else None,
    )

  def _canvas(self, index: int) -> tuple[np.ndarray, list]:
    """Draws a canvas: uint8 [64, 64], and its objects, each (box, mask [64, 64], label).

    A box is top, left, bottom, right.
    """
    name, row = self._rows[index]
    position = (list(_SIZES).index(name) << 32) + row
    counts = (3, *[_PER_DIGIT] * _MOST)
    (numbers,) = philox.uniforms(_TAG, [position], counts)
    u = numbers[:3].astype(np.float64)
    # ground + contrast stays below 255, so that uint8 holds it.
    ground, contrast = int(80 * u[1]), 128 + int(48 * u[2])
    canvas = np.full((_SIDE, _SIDE), ground, np.int64)
    pasted: list = []
    number, digits = 1 + int(u[0] * _MOST), self._digits[name]
    for v in numbers[3:].reshape(_MOST, _PER_DIGIT)[:number].astype(np.float64):
      which = int(v[0] * len(digits))
      side = int((0.2 + 0.25 * v[1]) * _SIDE)
      ink = _enlarge(digits.images[which, ..., 0].astype(np.int64), side)
      shape = ink >= _INK
      rows, columns = (np.flatnonzero(shape.any(axis)) for axis in (1, 0))
      for y, x in (v[2:].reshape(_TRIES, 2) * (_SIDE - side + 1)).astype(int):
        box = (y + rows[0], x + columns[0], y + rows[-1] + 1, x + columns[-1] + 1)
        if all(_disjoint(box, other) for other, _, _ in pasted):
          mask = np.zeros(canvas.shape, bool)
          mask[y : y + side, x : x + side] = shape
          window = canvas[y : y + side, x : x + side]
          # Faint ink outside of a box may reach into another box: keep the brighter pixel.
          np.maximum(window, ground + ink * contrast // 255, out=window)
          pasted.append((box, mask, int(digits.labels[which])))
          break
    return canvas.astype(np.uint8), pasted


def _disjoint(a: tuple, b: tuple) -> bool:
  return a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]


def _enlarge(image: np.ndarray, side: int) -> np.ndarray:
  """Enlarges an image of integers [8, 8] to [side, side], bilinearly, in integers.

  Pixel centres are at half pixels. Weights are multiples of 1/256, so that every machine
  rounds alike.
  """
  number = len(image)
  # Positions in the small image, in 256ths of a pixel.
  at = (2 * np.arange(side) + 1) * number * 128 // side - 128
  at = np.clip(at, 0, 256 * (number - 1))
  low, part = at // 256, at % 256
  weights = np.zeros((side, number), np.int64)
  weights[np.arange(side), low] = 256 - part
  weights[np.arange(side), np.minimum(low + 1, number - 1)] += part
  return weights @ image @ weights.T >> 16
