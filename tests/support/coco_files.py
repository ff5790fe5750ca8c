"""COCO's files of the golden of pycocotools, and small ones."""

import json
from pathlib import Path

import numpy as np

from tests.support import GOLDEN
from vit_jax.detection.coco import rle


def golden() -> dict[str, np.ndarray]:
  """Returns coco_ap.npz: objects, detections, and pycocotools' numbers of them."""
  with np.load(GOLDEN / 'coco_ap.npz') as file:
    return dict(file)


def write_golden(folder: Path) -> tuple[Path, Path]:
  """Writes the golden's objects and detections; returns the paths of G and D.

  Masks of objects are lists of run lengths, those of detections compressed.
  """
  z = golden()
  size = [int(z['height']), int(z['width'])]

  def masks(key):
    bits = np.unpackbits(z[key], axis=1)[:, : size[0] * size[1]]
    return list(bits.reshape(-1, *size))

  rows = zip(
    *(z[f'gt_{k}'].tolist() for k in ('image', 'category', 'box', 'area', 'crowd')),
    masks('gt_mask_bits'),
    strict=True,
  )
  annotations = [
    {
      'id': i + 1,
      'image_id': image,
      'category_id': category,
      'bbox': box,
      'area': area,
      'iscrowd': crowd,
      'segmentation': {'size': size, 'counts': runs(mask)},
    }
    for i, (image, category, box, area, crowd, mask) in enumerate(rows)
  ]
  truth = {
    'images': [
      {'id': i, 'height': size[0], 'width': size[1]} for i in z['image_ids'].tolist()
    ],
    'categories': [{'id': i, 'name': f'thing {i}'} for i in z['category_ids'].tolist()],
    'annotations': annotations,
  }
  rows = zip(
    *(z[f'dt_{k}'].tolist() for k in ('image', 'category', 'box', 'score')),
    masks('dt_mask_bits'),
    strict=True,
  )
  found = [
    {
      'image_id': image,
      'category_id': category,
      'bbox': box,
      'score': score,
      'segmentation': {'size': size, 'counts': rle.encode(mask)['counts'].decode()},
    }
    for image, category, box, score, mask in rows
  ]
  return write(folder / 'G.json', truth), write(folder / 'D.json', found)


def runs(mask: np.ndarray) -> list[int]:
  """Returns the lengths of the runs of a mask, column by column."""
  pixels = np.asarray(mask, bool).T.reshape(-1)
  toggles = np.flatnonzero(np.diff(pixels, prepend=False))
  return np.diff(toggles, prepend=0, append=pixels.size).tolist()


def write(path: Path, content) -> Path:
  """Writes JSON; returns the path."""
  path.write_text(json.dumps(content))
  return path
