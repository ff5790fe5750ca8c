"""`vit_jax predict` of a detector: boxes per image, as text, JSON or drawn."""

import argparse
from pathlib import Path

import numpy as np

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools import out_folder

# The demo of facebookresearch/detr keeps boxes that score more than this.
THRESHOLD = 0.7


def _threshold(text: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not 0 <= value < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not a number from 0 to below 1')
  return value


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds the options of detectors."""
  parser.add_argument(
    '--threshold',
    type=_threshold,
    help=f'for detectors: keep boxes with a higher score; default: {THRESHOLD}',
  )
  parser.add_argument(
    '--draw',
    metavar='DIR',
    help='for detectors: write the images with their boxes there, as PNG',
  )


def check_unused(args) -> None:
  """Raises UserError for options of a detector where the model gives classes."""
  for name in ('threshold', 'draw'):
    if getattr(args, name) is not None:
      raise UserError(
        f'--{name} is for detectors; {args.source} gives classes of images.'
      )


def run(args, loaded, paths: list[str], names: list[str] | None) -> int:
  """Prints the boxes of every image, and draws them into `--draw`."""
  from vit_jax.detection import inference

  for name in ('top', 'features', 'layer'):
    if getattr(args, name) is not None:
      raise UserError(
        f'--{name} is for classes of images; {args.source} is a detector: --threshold '
        'chooses among its boxes.'
      )
  drawings = _drawings(args.draw, paths) if args.draw else {}
  detected = inference.detect_images(
    loaded, paths, batch_size=args.batch or 1, pp=args.pp
  )
  least = THRESHOLD if args.threshold is None else args.threshold
  images = [_image(path, i, detected, names, least) for i, path in enumerate(paths)]
  if drawings and not all(detected.errors):
    out_folder.make(Path(args.draw).absolute(), '--draw')
    for image in images:
      if 'error' not in image:
        image['drawn'] = str(drawings[image['path']])
        _draw(image)
  if args.json:
    record = {'source': args.source, 'step': loaded.step, 'threshold': least}
    cli.print_json(record | {'images': images})
  else:
    if loaded.step is not None:
      print(f'{args.source}: step {loaded.step}')
    print('Boxes are x0 y0 x1 y1, in pixels of the image.')
    print('\n'.join(_render(image, least) for image in images))
  if all(detected.errors):
    raise UserError(f'None of {len(paths)} images could be read.')
  return 0


def _image(path: str, i: int, detected, names: list[str] | None, least: float) -> dict:
  """Returns the boxes of image i above the threshold, the most probable first."""
  if detected.errors[i]:
    return {'path': path, 'error': detected.errors[i]}
  scores = detected.scores[i]
  objects = []
  for q in np.argsort(-scores, kind='stable'):
    if (score := float(scores[q])) > least:
      x0, y0, x1, y1 = map(float, detected.boxes[i, q])
      k = int(detected.labels[i, q])
      name = names[k] if names else str(k)
      box = [x0, y0, x1 - x0, y1 - y0]
      objects.append({'category_id': k, 'category': name, 'score': score, 'bbox': box})
  height, width = map(int, detected.sizes[i])
  return {'path': path, 'width': width, 'height': height, 'detections': objects}


def _render(image: dict, least: float) -> str:
  if 'error' in image:
    return f'{image["path"]}\n  not read: {image["error"]}'
  lines = [f'{image["path"]} ({image["width"]} x {image["height"]} pixels)']
  objects = image['detections']
  longest = max((len(x['category']) for x in objects), default=0)
  for x in objects:
    left, top, width, height = x['bbox']
    corners = (left, top, left + width, top + height)
    numbers = ' '.join(f'{n:7.1f}' for n in corners)
    lines.append(f'  {100 * x["score"]:5.1f} %  {x["category"]:{longest}} {numbers}')
  if not objects:
    lines.append(f'  no box scores more than {least:g}')
  if 'drawn' in image:
    lines.append(f'  drawn: {image["drawn"]}')
  return '\n'.join(lines)


def _drawings(folder: str, paths: list[str]) -> dict[str, Path]:
  """Returns {image: the file of its drawing}, all different.

  Raises:
    UserError: for a folder that cannot be written to, or a drawing that would replace an
      image.
  """
  out, drawings, taken = out_folder.check(folder, '--draw'), {}, set()
  for path in dict.fromkeys(paths):
    stem, number = Path(path).stem, 1
    while (drawing := out / f'{stem}{f"_{number}" * (number > 1)}.png') in taken:
      number += 1
    taken.add(drawing)
    drawings[path] = drawing
  images = {Path(path).resolve() for path in paths}
  if replaced := images & {drawing.resolve() for drawing in taken}:
    raise UserError(
      f'--draw {folder} would replace the image {min(replaced)}: name another folder.'
    )
  return drawings


def _draw(image: dict) -> None:
  from PIL import Image

  from vit_jax.data import single_image
  from vit_jax.detection import drawing

  objects = image['detections']
  corners = [(x, y, x + w, y + h) for x, y, w, h in (o['bbox'] for o in objects)]
  drawn = drawing.draw(
    single_image.pixels(image['path']),
    corners,
    [f'{o["category"]} {o["score"]:.0%}' for o in objects],
    [o['category_id'] for o in objects],
  )
  Image.fromarray(drawn).save(image['drawn'])
