"""Writes the features of a folder's images to a file, for search, plots and classifiers.

  vit_jax embed SOURCE FOLDER --out features.parquet
  vit_jax embed SOURCE FOLDER --out patches.parquet --layer encoded

SOURCE is any source that `vit_jax.load` takes; images are preprocessed as its weights need.
By default, a row holds an image and its vector before the head, `pre_logits`; for CLIP and
SigLIP it is `logits`, the vector for comparison with texts. Other layers (`encoded`,
`block05`, `stage2`, `stem`: the model's `out`) give a row per patch or position, without the
class token and registers. The same command again continues where it was stopped, and adds
new images. Images that cannot be read, or whose features are not finite, are left out and
listed at the end.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

from vit_jax import cli, files, terminal
from vit_jax.errors import UserError, choose, printable
from vit_jax.tools import feature_file, out_folder, predict, source, zero_shot
from vit_jax.version import __version__

# Number of images in a batch on these platforms; 256 on all others.
_BATCH = {'cpu': 32}
# Maximum number of unreadable images that the text lists.
_MOST_NAMED = 20


def main(argv: list[str]) -> int:
  """Writes the file, and prints its size and the images that could not be read."""
  args = _parser().parse_args(argv)
  feature_file.arrow()
  out = files.local_path(args.out, '--out')
  if out.suffix != feature_file.SUFFIX or out.is_dir():
    raise UserError(f'--out {out}: expected FILE{feature_file.SUFFIX}.')
  out_folder.check_folder(str(out.parent))
  if not Path(args.folder).is_dir():
    raise UserError(f'{args.folder} is not a folder.')
  root = str(Path(args.folder).absolute()) + '/'
  names = [path.removeprefix(root) for path in predict.find_images([root])]
  import jax

  from vit_jax import inference, sharding
  from vit_jax.data.single_image import SingleImage

  loaded = source.load(args, **({'dtype': args.dtype} if args.dtype else {}))
  loaded.model.check_outputs('classes', args.source)
  pp = args.pp or loaded.pp
  numbers = 'float16' if args.half else 'float32'
  usual = ['logits' if zero_shot.is_pair(loaded) else 'pre_logits']
  function, layers = extractor(loaded, args.layer or usual, numbers)
  record = {
    'recipe': {
      'fingerprint': fingerprint(loaded),
      'pp': pp,
      'image_size': [*loaded.image_size],
      'layers': layers,
      'dtype': np.dtype(loaded.model.fields()['dtype']).name,
      'numbers': numbers,
    },
    'source': _lasting(args.source, loaded.step),
    'options': {'variant': args.variant, 'ema': args.ema, 'weights': args.weights},
    'folder': root,
    'vit_jax': __version__,
  }
  bad = {name: 'its name is not UTF-8' for name in names if not _is_utf8(name)}
  mesh = sharding.make_mesh()
  size = args.batch or _BATCH.get(jax.default_backend(), 256)
  size = -(-size // sharding.batch_divisor(mesh)) * sharding.batch_divisor(mesh)
  with feature_file.writing(out, record) as parts, jax.set_mesh(mesh):
    todo = [name for name in names if name not in parts.done and name not in bad]
    new = iter(todo)
    if before := len(parts.done):
      terminal.say(f'{out}: {len(parts.done & {*names}):,} of {len(names):,} are done.')
    shown = terminal.progress(todo, len(todo), 'embed', 'images')
    images = (root + name for name in shown)
    rows = inference.stream(loaded, images, SingleImage(pp), size, function, mesh)
    for part, why in rows:
      batch = [*itertools.islice(new, len(why))]
      why = _check_finite(part, why)
      bad |= {name: x for name, x in zip(batch, why, strict=True) if x}
      good = [i for i, x in enumerate(why) if x is None]
      parts.add([batch[i] for i in good], {k: x[good] for k, x in part.items()})
    if len(bad) == len(names):
      why = bad[names[0]]
      raise UserError(f'None of {len(names)} images has features: {why}.')
    bad_images = [{'path': name, 'reason': bad[name]} for name in sorted(bad)]
    parts.join(bad_images=bad_images)
  if args.json:
    record = {'images': len(parts.done), 'new': len(parts.done) - before}
    record |= {'layers': layers, 'bad_images': bad_images}
    cli.print_json({'out': str(out), **record})
    return 0
  shapes = ', '.join(f'{k} {" x ".join(map(str, x))}' for k, x in layers.items())
  print(f'{out}: {len(parts.done):,} images, {shapes}')
  for x in bad_images[:_MOST_NAMED]:
    print(printable(f'  left out: {x["path"]}: {x["reason"]}'))
  if len(bad) > _MOST_NAMED:
    print(f'  and {len(bad) - _MOST_NAMED:,} more, all in the metadata of the file')
  return 0


def _check_finite(rows: dict[str, np.ndarray], why: list) -> list[str | None]:
  """Adds a reason for images whose rows hold NaN or infinity."""
  finite = np.all(
    [np.isfinite(x.reshape(len(why), -1)).all(1) for x in rows.values()], 0
  )
  half = any(x.dtype == np.float16 for x in rows.values())
  reason = f'its features are not finite{" in float16: without --half" if half else ""}'
  return [x or (None if good else reason) for x, good in zip(why, finite, strict=True)]


def extractor(loaded, layers: list[str], numbers: str = 'float32') -> tuple:
  """Returns (function of (variables, batch) -> {layer: rows}, {layer: shape of a row}).

  Rows are [B, D] or maps [B, h, w, D]. A map of tokens has only the patches, which come last.

  Raises:
    UserError: for an unknown layer, or layers of different shapes.
  """
  import jax

  def function(variables, batch):
    # If only these two are needed, the last block may compute less.
    rest = {*layers} - {'pre_logits', 'logits'}
    y, out = loaded.model.apply(variables, batch['image'], features=bool(rest))
    rows = {**out, 'logits': y} | (loaded.model.maps(out) if rest else {})
    return {name: choose('layer', name, rows).astype(numbers) for name in layers}

  shape = (1, *loaded.image_size, loaded.channels)
  example = {'image': jax.ShapeDtypeStruct(shape, 'float32')}
  rows = jax.eval_shape(function, loaded.variables, example)
  shapes = {name: [*rows[name].shape[1:]] for name in layers}
  grids = {tuple(shape[:-1]) for shape in shapes.values()}
  if len(grids) > 1 or 1 in map(len, grids):
    raise UserError(
      f'--layer: {shapes} do not fit into one file: write a file for each.'
    )
  return function, shapes


def fingerprint(loaded) -> str:
  """Returns a fingerprint of all parameters."""
  from vit_jax.checkpoint import fingerprint

  return fingerprint.digest(fingerprint.fingerprints(loaded.variables))


def _lasting(name: str, step: int | None) -> str:
  """Returns a source that another command can load: an absolute path, with the step of a run."""
  from vit_jax.weights import runs

  if run := runs.find(name):
    return f'{run[0].absolute()}@{step}'
  return str(Path(name).absolute()) if Path(name).exists() else name


def _is_utf8(name: str) -> bool:
  return name == name.encode(errors='ignore').decode()


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax embed', description=__doc__.split('\n')[0])
  source.add_options(parser)
  add = parser.add_argument
  add('folder', metavar='FOLDER', help='of images, and all folders in it')
  add('--out', metavar='FILE.parquet', required=True, help='for the features')
  names = lambda text: list(dict.fromkeys(text.split(',')))
  layer = "layers, comma-separated; default: 'pre_logits', of CLIP 'logits'"
  add('--layer', metavar='NAME,...', type=names, help=layer)
  add('--half', action='store_true', help='write float16, half the size')
  dtype = "of the model; default: SOURCE's"
  add('--dtype', choices=('float32', 'bfloat16'), help=dtype)
  add('--pp', help='preprocessing in place of that of the weights')
  batch = 'images per step, at most; default: 256, on CPUs 32'
  add('--batch', type=cli.positive, help=batch)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
