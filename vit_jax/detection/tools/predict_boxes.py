"""`vit_jax predict` of a detector: boxes per image, as text, JSON or drawn."""

import argparse
from pathlib import Path

import numpy as np

from vit_jax import cli, terminal
from vit_jax.errors import UserError
from vit_jax.tools import out_folder, predict

# The demo of facebookresearch/detr keeps boxes that score more than this.
THRESHOLD = 0.7


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds the options of detectors and segmenters."""
  add = parser.add_argument
  threshold = f'for detectors: keep boxes with a higher score; default: {THRESHOLD}'
  add('--threshold', type=float, help=threshold)
  draw = 'write there, as PNG: the images with their boxes; of a segmenter, masks'
  add('--draw', metavar='DIR', help=draw)


def folder_of(args, paths: list[str]) -> Path | None:
  """Returns the folder `--draw`; UserError for one with images to read."""
  out = args.draw and out_folder.check(args.draw, '--draw')
  if out and out.resolve() in {Path(path).resolve().parent for path in paths}:
    raise UserError(f'--draw {args.draw} holds images to read: name another folder.')
  return out


def run(args, loaded, paths: list[str]) -> int:
  """Prints the boxes of every image, and draws them into `--draw`."""
  from vit_jax.detection import inference

  why = f'is for classes; {args.source} is a detector: --threshold chooses its boxes'
  cli.refuse(args, ['top'], why)
  out = folder_of(args, paths)
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  options = dict(batch_size=args.batch or 1, pp=args.pp)
  detected = inference.detect_images(loaded, shown, **options)
  least = THRESHOLD if args.threshold is None else args.threshold
  names = loaded.class_names
  images = [_image(path, i, detected, names, least) for i, path in enumerate(paths)]
  if out:
    out_folder.make(out, '--draw')
    for i, image in enumerate(images):
      if 'error' not in image:
        image['drawing'] = str(out / f'{i:03d}_{Path(image["path"]).stem}.png')
        _draw(image)
  note = 'Boxes are x0 y0 x1 y1, in pixels of the image.\n'
  lines = lambda image: _lines(image, least)
  return predict.finish(args, loaded, images, lines, note, threshold=least)


def _image(path: str, i: int, detected, names: list[str] | None, least: float) -> dict:
  """Returns the boxes of image i above the threshold, the most probable first."""
  if detected.errors[i]:
    return {'path': path, 'error': detected.errors[i]}
  scores, labels = detected.scores[i].tolist(), detected.labels[i].tolist()
  objects = []
  for q in np.argsort(-detected.scores[i], kind='stable'):
    if scores[q] > least:
      x0, y0, x1, y1 = detected.boxes[i, q].tolist()
      name = names[labels[q]] if names else str(labels[q])
      row = {'category_id': labels[q], 'category': name, 'score': scores[q]}
      objects.append(row | {'bbox': [x0, y0, x1 - x0, y1 - y0]})
  height, width = detected.sizes[i].tolist()
  return {'path': path, 'width': width, 'height': height, 'detections': objects}


def _corners(row: dict) -> tuple[float, ...]:
  left, top, width, height = row['bbox']
  return left, top, left + width, top + height


def _lines(image: dict, least: float) -> list[str]:
  lines, objects = [], image['detections']
  longest = max((len(x['category']) for x in objects), default=0)
  for x in objects:
    numbers = ' '.join(f'{n:7.1f}' for n in _corners(x))
    lines.append(f'{100 * x["score"]:5.1f} %  {x["category"]:{longest}} {numbers}')
  lines = lines or [f'no box scores more than {least:g}']
  lines += [f'drawing: {image["drawing"]}'] if 'drawing' in image else []
  return [f'{image["path"]} ({image["width"]} x {image["height"]} pixels)', *lines]


def _draw(image: dict) -> None:
  from vit_jax.data import single_image
  from vit_jax.detection import drawing

  objects, pixels = image['detections'], single_image.pixels(image['path'])
  labels = [f'{x["category"]} {x["score"]:.0%}' for x in objects]
  numbers = [x['category_id'] for x in objects]
  drawing.draw(pixels, [*map(_corners, objects)], labels, numbers).save(
    image['drawing']
  )
