"""Classifies images or their pixels, or finds objects in them.

  vit_jax predict SOURCE IMAGE_OR_FOLDER... [--top 5] [--threshold 0.5] [--csv FILE] [--json]
  vit_jax predict CLIP IMAGE_OR_FOLDER... --labels 'a cat,a dog'
  vit_jax predict DETECTOR IMAGE_OR_FOLDER... [--threshold 0.7] [--draw DIR] [--csv FILE] [--json]
  vit_jax predict SEGMENTER IMAGE_OR_FOLDER... [--draw DIR] [--json]

SOURCE is any source that `vit_jax.load` takes; images are preprocessed as its weights need.
A detector gives boxes with a class and a score, in pixels of the image in the file, and
maybe masks; `--draw` writes images with them. A segmenter gives the share of pixels of each
class; `--draw` writes masks. CLIP and SigLIP compare images with the texts of `--labels`.
A classifier knows only its own classes, and one of them is always the most probable. With
`--threshold` an image in which none is probable has none of them. The classes of a run whose
loss is binary, such as sigmoid, have independent probabilities: `--threshold 0.5` finds all
labels of an image.
TensorFlow is not needed. For features see `vit_jax embed`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from vit_jax import cli, files, imagenet, terminal
from vit_jax.check import parse_options
from vit_jax.data.sources import folder
from vit_jax.errors import UserError, printable
from vit_jax.registry import Registry
from vit_jax.tools import out_folder, source, zero_shot

_TOP, _BATCH = 5, 32
_NONE = 'none of these'
# For each kind of outputs, except classes: a function(args, loaded, paths).
PARTS = Registry('part of predict', {})
# For each name: a function(parser) that adds the options of these parts.
OPTIONS = Registry('options of predict', {})


def main(argv: list[str]) -> int:
  """Prints the most probable classes of every image, or its boxes or segments."""
  args = _parser().parse_args(argv)
  least = args.threshold or 0.0
  if not 0 <= least <= 1:
    raise UserError(f'--threshold {least:g}: expected a share, from 0 to 1.')
  if Path(args.source).suffix.lower() in (*folder.EXTENSIONS, *folder.HEIF):
    raise UserError(
      f'{args.source} is an image, but SOURCE comes first: vit_jax predict '
      f'{args.images[0]} {args.source}'
    )
  paths = find_images(args.images)
  args.csv = args.csv and _check_csv(args.csv)
  from vit_jax import inference, losses

  loaded = zero_shot.classifier(args, source.load(args))
  if (outputs := loaded.model.family.outputs) in PARTS:
    return PARTS[outputs](args, loaded, paths)
  loaded.model.check_outputs('classes', args.source)
  why = f'is for detectors and segmenters; {args.source} gives classes'
  cli.refuse(args, ['draw'], why)
  if loaded.model.num_classes is None:
    raise UserError(
      f'{args.source} has no head, so no classes: vit_jax embed writes features, and '
      f'vit_jax train --config=finetune:weights={args.source} trains a head.'
    )
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  predicted = inference.predict_images(
    loaded, shown, batch_size=args.batch or _BATCH, pp=args.pp
  )
  binary = parse_options(source.loss_of(args.source))[0] in losses.BINARY
  top = args.top or _TOP, least, binary
  images = list(_top(paths, predicted, loaded.class_names, *top))
  if args.csv:
    out_folder.write_csv(args.csv, _cells(images))
  more = {} if args.threshold is None else {'threshold': least}
  return finish(args, loaded, images, _lines, **more)


def finish(args, loaded, images: list[dict], lines, note: str = '', **more) -> int:
  """Prints predictions as text or JSON; raises UserError if no image could be read.

  Args:
    lines: function of a readable image that returns a heading and the lines below it.
    **more: further entries of the JSON.
  """
  if args.json:
    record = {'source': args.source, 'step': loaded.step, **more, 'images': images}
    cli.print_json(record)
  else:
    if loaded.step is not None:
      print(f'{args.source}: step {loaded.step}')
    print(note, end='')
    for image in images:
      error = [image['path'], f'not read: {image.get("error")}']
      print('\n  '.join(map(printable, error if 'error' in image else lines(image))))
  if all('error' in image for image in images):
    raise UserError(f'None of {len(images)} images could be read.')
  return 0


def find_images(images: list[str]) -> list[str]:
  """Returns the named files, and the sorted images below the named folders.

  The images of a folder are those that training would read. Prints how many other files the
  folder has.
  """
  paths = []
  for name in images:
    path = Path(name)
    if path.is_dir():
      inside, others = folder.images_below(name)
      if not inside:
        extensions = ' '.join(sorted(folder.extensions()))
        there = f', only {folder.describe(others)}' if others else ''
        raise UserError(f'No images in {name}{there}: looked for {extensions}.')
      if others:
        terminal.say(printable(f'{name}: left out: {folder.describe(others)}.'))
      paths += sorted(os.path.join(name, image) for image in inside)
    elif path.exists():
      paths.append(name)
    else:
      raise UserError(f'No such image or folder: {name}.')
  return paths


def _check_csv(name: str) -> Path:
  path = files.local_path(name, '--csv')
  if path.suffix != '.csv' or path.is_dir():
    raise UserError(f'--csv {name}: expected FILE.csv.')
  out_folder.make(out_folder.check_folder(str(path.parent), '--csv'), '--csv')
  return path


def _top(paths, predicted, names, number, least, binary):
  import numpy as np

  shifted = np.exp(predicted.logits - predicted.logits.max(-1, keepdims=True))
  probabilities = shifted / shifted.sum(-1, keepdims=True)
  if binary:
    with np.errstate(over='ignore'):
      probabilities = 1 / (1 + np.exp(-predicted.logits))
  for path, error, row in zip(paths, predicted.errors, probabilities, strict=True):
    order = np.argsort(-row, kind='stable')[:number]
    top = [_class(k, names, float(row[k])) for k in order if row[k] >= least]
    yield {'path': path, **({'error': error} if error else {'top': top})}


def _class(k: int, names: list[str] | None, probability: float) -> dict:
  name = names[k] if names else str(k)
  record = {'class': int(k), 'name': name, 'probability': probability}
  # Only WordNet ids have a description.
  described = imagenet.describe(name)
  return record | ({'description': described} if described else {})


def _lines(image: dict) -> list[str]:
  name = lambda t: ' '.join(filter(None, [t['name'], t.get('description')]))
  rows = [f'{100 * t["probability"]:5.1f} %  {name(t)}' for t in image['top']]
  return [image['path'], *(rows or [_NONE])]


def _cells(images: list[dict]) -> Iterator[tuple]:
  """Yields the rows of --csv: one for each image and class."""
  yield ('image', 'rank', 'class', 'name', 'probability')
  for image in images:
    for rank, x in enumerate(image.get('top', ()), 1):
      yield image['path'], rank, x['class'], x['name'], f'{x["probability"]:.6f}'
    if not image.get('top'):
      why = f'not read: {image["error"]}' if 'error' in image else _NONE
      yield image['path'], '', '', why, ''


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax predict', description=__doc__.split('\n')[0])
  source.add_options(parser, names=True)
  add = parser.add_argument
  add('images', metavar='IMAGE_OR_FOLDER', nargs='+')
  add('--top', type=cli.positive, help=f'classes per image; default: {_TOP}')
  threshold = 'leave out classes that are less probable, or boxes that score less'
  add('--threshold', type=float, metavar='SHARE', help=threshold)
  table = 'write the classes, or the boxes, of all images there, too'
  add('--csv', metavar='FILE.csv', help=table)
  zero_shot.add_options(parser)
  add('--pp', help='preprocessing in place of that of the weights')
  batch = f'images per step, at most; default: {_BATCH}, for a detector 1'
  add('--batch', type=cli.positive, help=batch)
  for name in OPTIONS:
    OPTIONS[name](parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
