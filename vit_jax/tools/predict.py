"""Classifies images.

  vit_jax predict SOURCE IMAGE_OR_FOLDER... [--top 5] [--json]

SOURCE is what `vit_jax.load` takes: a file of weights, a hub folder, a run's folder (its
newest step; RUN@best or RUN@500), a name of the zoo. Preprocessing comes with the weights;
`--pp` replaces it. `--features FILE.npz` writes features (`--layer`, by default those
before the head) with the paths of their images. Works without TensorFlow.
"""

import os
import sys
from pathlib import Path

from vit_jax import buckets, cli, imagenet, terminal
from vit_jax.data import contents
from vit_jax.data.sources import listing
from vit_jax.errors import UserError
from vit_jax.tools import source


def main(argv: list[str]) -> int:
  """Prints the classes with the largest probabilities of every image."""
  args = _parser().parse_args(argv)
  paths = find(args.images)
  features = args.features and _new_file(args.features)
  from vit_jax import inference, models

  loaded = source.load(args)
  models.check_classifies(loaded.model, args.source)
  if loaded.model.num_classes is None and not features:
    raise UserError(
      f'{args.source} has no head, so no classes: --features FILE.npz writes what it '
      f'computes, vit_jax train --config=finetune:weights={args.source} trains a head.'
    )
  names = loaded.class_names
  if args.names:
    names = _read_names(args.names, loaded.model.num_classes)
  layers = [args.layer] if features else []
  found = inference.predict_images(
    loaded, paths, batch_size=args.batch, layers=layers, pp=args.pp
  )
  top = 0 if loaded.model.num_classes is None else args.top
  images = list(_top(paths, found, names, top))
  if args.json:
    cli.print_json({'source': args.source, 'step': loaded.step, 'images': images})
  else:
    if loaded.step is not None:
      print(f'{args.source}: step {loaded.step}')
    print('\n'.join(map(_render, images)))
  if all(found.errors):
    raise UserError(f'None of {len(paths)} images could be read.')
  if features:
    _write_features(features, paths, found.features[args.layer])
  return 0


def find(images: list[str]) -> list[str]:
  """Returns the files named, and the images below folders named, sorted.

  The images of a folder are those that training would read; it says how many other files
  there are.

  Raises:
    UserError: for a name that is not there, or a folder without images.
  """
  paths = []
  for name in images:
    path = Path(name)
    if path.is_dir():
      inside, others = listing.images_below(name)
      hint = contents.how_to_convert(others)
      if not inside:
        known = ' '.join(sorted(listing.extensions()))
        there = contents.only(others)
        raise UserError(f'No images in {name}{there}: looked for {known}.{hint}')
      if others:
        what = 'warning: ' if hint else ''
        terminal.say(f'{what}{name}: left out: {contents.files(others)}.{hint}')
      paths += sorted(path for path, _ in inside)
    elif path.exists():
      paths.append(name)
    else:
      raise UserError(f'No such image or folder: {name}.')
  return paths


def _read_names(name: str, num_classes: int) -> list[str]:
  try:
    names = Path(name).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--names {name}: {error}.') from None
  if len(names) != num_classes:
    raise UserError(
      f'--names {name} has {len(names)} lines, the model {num_classes} classes.'
    )
  return names


def _top(paths, found, names, number):
  import numpy as np

  shifted = np.exp(found.logits - found.logits.max(-1, keepdims=True))
  probabilities = shifted / shifted.sum(-1, keepdims=True)
  for path, error, row in zip(paths, found.errors, probabilities, strict=True):
    if error:
      yield {'path': path, 'error': error}
      continue
    order = np.argsort(-row, kind='stable')[:number]
    yield {'path': path, 'top': [_class(k, names, float(row[k])) for k in order]}


def _class(k: int, names: list[str] | None, probability: float) -> dict:
  name = names[k] if names else str(k)
  found = {'class': int(k), 'name': name, 'probability': probability}
  described = imagenet.describe(name)  # of data that is named by WordNet ids
  return found | ({'description': described} if described else {})


def _render(image: dict) -> str:
  if 'error' in image:
    return f'{image["path"]}\n  not read: {image["error"]}'
  said = lambda t: ' '.join([t['name'], *filter(None, [t.get('description')])])
  rows = [f'  {100 * t["probability"]:5.1f} %  {said(t)}' for t in image['top']]
  return '\n'.join([image['path'], *rows])


def _new_file(name: str) -> Path:
  path = buckets.on_disk(name, '--features')
  if path.suffix != '.npz':
    raise UserError(f'--features {name}: expected FILE.npz.')
  if not path.parent.is_dir():
    raise UserError(f'--features {name}: {path.parent} is not a folder; make it first.')
  if not os.access(path.parent, os.W_OK):
    raise UserError(f'--features {name}: {path.parent} cannot be written to.')
  return path


def _write_features(path: Path, paths: list[str], features) -> None:
  """Writes `paths` and `features` float32 [n, ...]; rows of unread images are nan."""
  import numpy as np

  partial = path.with_name(f'{path.name}.{os.getpid()}.part')
  try:
    with partial.open('wb') as file:
      np.savez(file, paths=np.array(paths), features=features)
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax predict', description=__doc__.split('\n')[0])
  source.add_options(parser)
  parser.add_argument('images', metavar='IMAGE_OR_FOLDER', nargs='+')
  parser.add_argument('--top', type=cli.positive, default=5, help='classes per image')
  parser.add_argument(
    '--names', metavar='FILE', help='class names, one per line, where SOURCE has none'
  )
  parser.add_argument('--features', metavar='FILE.npz', help='write features there')
  parser.add_argument('--layer', default='pre_logits', help='of the features')
  parser.add_argument('--pp', help='preprocessing in place of that of the weights')
  parser.add_argument('--batch', type=cli.positive, default=32)
  cli.add_json_option(parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
