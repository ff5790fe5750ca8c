"""`vit_jax predict` for detectors and segmenters.

A detector's objects are printed as text or JSON, or drawn. A segmenter's masks are written.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vit_jax import cli, terminal
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.errors import UserError
from vit_jax.tools import out_folder, predict

# Thresholds of boxes, as in the demos of facebookresearch/detr and detectron2.
THRESHOLDS = {'boxes': 0.7, 'regions': 0.5}


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds the options of detectors and segmenters."""
  add = parser.add_argument
  draw = 'write there, as PNG: the images with their objects; of a segmenter, masks'
  add('--draw', metavar='DIR', help=draw)


def _check_draw_folder(args, paths: list[str]) -> Path | None:
  """Returns the folder `--draw`; raises UserError if it holds images to read."""
  out = args.draw and out_folder.check_folder(args.draw, '--draw')
  if out and out.resolve() in {Path(path).resolve().parent for path in paths}:
    raise UserError(f'--draw {args.draw} holds images to read: name another folder.')
  return out


def objects(args, loaded, paths: list[str]) -> int:
  """Prints the objects of every image, and draws them into `--draw`."""
  from vit_jax.detection import inference

  why = f'is for classes; {args.source} is a detector: --threshold chooses its boxes'
  cli.refuse(args, ['top'], why)
  out = _check_draw_folder(args, paths)
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  options = dict(batch_size=args.batch or 1, pp=args.pp)
  detected = inference.detect_images(loaded, shown, **options)
  least = args.threshold
  if least is None:
    least = THRESHOLDS[loaded.model.family.outputs]
  names = loaded.class_names
  if names is None:
    origin = ORIGINS[getattr(loaded.model, 'origin', 'detectron2')]
    names = [str(k + origin.first_class) for k in range(loaded.model.num_classes)]
  images = [_objects(path, i, detected, names, least) for i, path in enumerate(paths)]
  if out:
    out_folder.make(out, '--draw')
    for i, image in enumerate(images):
      if 'error' not in image:
        image['drawing'] = str(out / f'{i:03d}_{Path(image["path"]).stem}.png')
        _draw(image)
  if args.csv:
    out_folder.write_csv(args.csv, _cells(images))
  masks = '' if detected.masks is None else '; the last number is the area of the mask'
  note = f'Boxes are x0 y0 x1 y1, in pixels of the image{masks}.\n'
  lines = lambda image: _lines_of_objects(image, least)
  return predict.finish(args, loaded, images, lines, note, threshold=least)


def _objects(path: str, i: int, detected, names: list[str], least: float) -> dict:
  """Lists the objects of image i that score more than `least`, the best first."""
  from vit_jax.detection.coco import rle

  if detected.errors[i]:
    return {'path': path, 'error': detected.errors[i]}
  scores, labels = detected.scores[i].tolist(), detected.labels[i].tolist()
  objects = []
  for q in np.argsort(-detected.scores[i], kind='stable'):
    if detected.valid[i, q] and scores[q] > least:
      x0, y0, x1, y1 = detected.boxes[i, q].tolist()
      category = {'category_id': labels[q], 'category': names[labels[q]]}
      row = {**category, 'score': scores[q]}
      row['bbox'] = [x0, y0, x1 - x0, y1 - y0]
      if detected.masks is not None:
        mask = detected.mask(i, q)
        row['area'], runs = int(mask.sum()), rle.encode(mask)
        row['segmentation'] = runs | {'counts': runs['counts'].decode()}
      objects.append(row)
  height, width = detected.sizes[i].tolist()
  return {'path': path, 'width': width, 'height': height, 'detections': objects}


def _corners(row: dict) -> tuple[float, ...]:
  left, top, width, height = row['bbox']
  return left, top, left + width, top + height


def _cells(images: list[dict]) -> Iterator[tuple]:
  """Yields the rows of --csv: one for each box."""
  yield ('image', 'class', 'name', 'score', 'x0', 'y0', 'x1', 'y1')
  for image in images:
    for x in image.get('detections', ()):
      numbers = (f'{n:.1f}' for n in _corners(x))
      score = f'{x["score"]:.6f}'
      yield image['path'], x['category_id'], x['category'], score, *numbers
    if not image.get('detections'):
      why = f'not read: {image["error"]}' if 'error' in image else 'no box'
      yield image['path'], '', why, *[''] * 5


def _lines_of_objects(image: dict, least: float) -> list[str]:
  lines, objects = [], image['detections']
  longest = max((len(x['category']) for x in objects), default=0)
  for x in objects:
    numbers = ' '.join(f'{n:7.1f}' for n in _corners(x))
    numbers += f' {x["area"]:9,}' if 'area' in x else ''
    lines.append(f'{100 * x["score"]:5.1f} %  {x["category"]:{longest}} {numbers}')
  lines = lines or [f'no box scores more than {least:g}']
  lines += [f'drawing: {image["drawing"]}'] if 'drawing' in image else []
  return [f'{image["path"]} ({image["width"]} x {image["height"]} pixels)', *lines]


def _draw(image: dict) -> None:
  from vit_jax.data import single_image
  from vit_jax.detection import drawing
  from vit_jax.detection.coco import rle

  objects, pixels = image['detections'], single_image.pixels(image['path'])
  labels = [f'{x["category"]} {x["score"]:.0%}' for x in objects]
  numbers = [x['category_id'] for x in objects]
  masks = [rle.decode(x['segmentation']) for x in objects if 'segmentation' in x]
  corners = [*map(_corners, objects)]
  picture = drawing.draw(pixels, corners, labels, numbers, masks=masks)
  picture.save(image['drawing'])


def pixels(args, loaded, paths: list[str]) -> int:
  """Prints the share of each class in an image, and writes masks into `--draw`.

  A mask has the size of its image, and a palette. The source `masks:` can read it.
  """
  from PIL import Image

  from vit_jax import inference
  from vit_jax.data.ops import registry
  from vit_jax.data.single_image import SingleImage
  from vit_jax.detection import drawing

  why = f'has no use: {args.source} gives a class for every pixel'
  cli.refuse(args, ('top', 'threshold', 'labels', 'csv'), why)
  K, names = loaded.model.num_classes, loaded.class_names
  if K is None or K > 256:
    raise UserError(
      f'{args.source}: its num_classes is {K}, but an 8-bit mask holds 1 to 256 classes.'
    )
  out, pp = _check_draw_folder(args, paths), args.pp or loaded.pp
  registry.check_positions(pp)
  if out:
    out_folder.make(out, '--draw')

  def function(variables, batch):
    logits, _ = loaded.model.apply(variables, batch['image'], features=False)
    return {'mask': logits.argmax(-1).astype('uint8'), 'size': batch['size']}

  images = []
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  options = SingleImage(pp), args.batch or 8, function
  for part, errors in inference.stream(loaded, shown, *options):
    sizes = part['size'].tolist()
    for error, mask, size in zip(errors, part['mask'], sizes, strict=True):
      path = paths[len(images)]
      image = {'path': path} | (
        {'error': error} if error else _shares(mask, size, names)
      )
      if out and not error:
        image['mask'] = f'{out}/{len(images):03d}_{Path(path).stem}.png'
        mask = Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST)
        mask.putpalette(drawing.palette(K).tobytes())
        mask.save(image['mask'])
      images.append(image)
  return predict.finish(args, loaded, images, _lines_of_shares)


def _shares(mask: np.ndarray, size: list[int], names) -> dict:
  share = np.bincount(mask.reshape(-1)) / mask.size
  segments = [
    {'class': k, 'name': names[k] if names else str(k), 'share': float(share[k])}
    for k in np.argsort(-share, kind='stable').tolist()
    if share[k]
  ]
  return {'width': size[1], 'height': size[0], 'segments': segments}


def _lines_of_shares(image: dict) -> list[str]:
  rows = [f'{100 * x["share"]:5.1f} %  {x["name"]}' for x in image['segments']]
  rows += [f'mask: {image["mask"]}'] if 'mask' in image else []
  return [image['path'], *rows]
