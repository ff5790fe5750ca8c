"""Draws the picture of docs/tutorials/no_labels.md: nearest neighbours before and after.

  python docs/images/neighbours.py BEFORE AFTER FOLDER PIXELS neighbours.png

BEFORE is a backbone and AFTER a run of configs/dino_continue.py, whose average is taken, at
PIXELS. FOLDER has `train` and `val`, each with a folder per class. A row for some images of `val`:
the image, its five neighbours in `train` by the features of BEFORE, and those of AFTER.
Neighbours of another class have a red frame.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import vit_jax
from vit_jax import inference

ROWS, NEIGHBOURS, SIDE, GAP = 6, 5, 56, 6


def features(loaded, paths: list[Path]) -> np.ndarray:
  """Returns unit features [n, D] of images."""
  rows = inference.predict_images(loaded, paths, batch_size=64, layers=['pre_logits'])
  x = rows.features['pre_logits']
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def tile(path: Path, wrong: bool) -> Image.Image:
  image = Image.open(path).convert('RGB').resize((SIDE - 8, SIDE - 8))
  return ImageOps.expand(image, 4, '#D55E00' if wrong else 'white')


def main(before: str, after: str, folder: str, pixels: str, target: str):
  find = lambda split: sorted(Path(folder, split).glob('*/*.png'))
  keys, queries = find('train'), find('val')
  size = (int(pixels),) * 2
  models = [
    vit_jax.load(before, image_size=size),
    vit_jax.load(after, image_size=size, ema=True),
  ]
  nearest = []
  for loaded in models:
    similarity = features(loaded, queries) @ features(loaded, keys).T
    nearest.append(np.argsort(-similarity, axis=1)[:, :NEIGHBOURS])
  wrong = lambda i, k: keys[k].parent.name != queries[i].parent.name
  errors = [[sum(wrong(i, k) for k in row) for i, row in enumerate(x)] for x in nearest]
  # Images whose neighbours changed most, both for better and for worse.
  change = np.abs(np.subtract(*errors))
  shown = np.argsort(-change, kind='stable')[:ROWS]
  width = (1 + 2 * NEIGHBOURS) * SIDE + 2 * GAP
  picture = Image.new('RGB', (width, ROWS * SIDE), 'white')
  for y, i in enumerate(shown):
    picture.paste(tile(queries[i], False), (0, y * SIDE))
    for half, x in enumerate(nearest):
      left = SIDE + GAP + half * (NEIGHBOURS * SIDE + GAP)
      for n, k in enumerate(x[i]):
        picture.paste(tile(keys[k], wrong(i, k)), (left + n * SIDE, y * SIDE))
  picture.quantize(128).save(target, optimize=True)
  print([np.mean(x) / NEIGHBOURS for x in errors])


if __name__ == '__main__':
  main(*sys.argv[1:])
