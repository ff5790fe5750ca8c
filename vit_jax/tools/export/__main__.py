"""Writes a model as a program that runs without this library.

  vit_jax export SOURCE model.stablehlo --to stablehlo [--platforms cpu,tpu,cuda]
  vit_jax export SOURCE FOLDER --to savedmodel [--platforms ...]

SOURCE is any source that `vit_jax.load` takes. The program takes preprocessed float32 images
[batch, H, W, C] and returns float32 outputs by name: `logits`, and the features that
`--layers` names. The preprocessing and the class names are in model.json beside the file, or
in the folder's assets.extra/vit_jax.json. The program is written under a temporary name and
takes its own name only if its outputs agree with those of the model.
"""

import sys
import tempfile
from pathlib import Path

from vit_jax import cli, files
from vit_jax.data import lazy_tf
from vit_jax.errors import RunError, UserError, choose
from vit_jax.tools import out_folder, source

# Each format is a module of this package.
FORMATS = ('stablehlo', 'savedmodel')
PLATFORMS = ('cpu', 'tpu', 'cuda', 'rocm')
_USUAL = 'cpu,tpu,cuda'
# Largest allowed difference between the outputs of the file and of the model, relative to the
# largest output. Other compilers add numbers in another order. In float32, this was measured to
# change outputs by less than 1e-6, and deep models may have 50 times that. Bfloat16 keeps 8
# bits, and a compiler may choose whether to round an intermediate result to it.
_TOLERANCE = {'float32': 5e-5, 'bfloat16': 5e-2}


def main(argv: list[str]) -> int:
  """Exports a model, and prints the files."""
  args = _parser().parse_args(argv)
  dest, platforms = files.local_path(args.dest, 'DEST'), _platforms(args)
  _check_free(dest, args.to)
  if args.to == 'savedmodel':
    # Load TensorFlow first, because it may be missing, and reading the weights takes time.
    lazy_tf.load()
  import numpy as np

  from vit_jax.tools.export import program, savedmodel, stablehlo

  writer = {'stablehlo': stablehlo, 'savedmodel': savedmodel}[args.to]
  loaded = source.load(args, **({'dtype': args.dtype} if args.dtype else {}))
  made = program.Program(loaded, args.layers, args.batch)
  about = program.describe(loaded, made, args.to, platforms)
  out_folder.make(dest.parent, 'DEST')
  with tempfile.TemporaryDirectory(prefix=f'.{dest.name}.', dir=dest.parent) as folder:
    path = Path(folder) / dest.name
    writer.write(made, path, about, platforms)
    difference = None
    if 'cpu' in platforms:
      images = np.random.default_rng(0).uniform(-1, 1, made.shape(2)).astype(np.float32)
      difference = _difference(made.run_on_cpu(images), writer.run(path, images))
      if not difference <= _TOLERANCE[made.dtype]:
        raise RunError(
          f'The outputs of the {args.to} file differ from those of {args.source} by '
          f'{difference:.1e} of the largest output: nothing was written.'
        )
    made_files = sorted(dest.parent / path.name for path in Path(folder).iterdir())
    for file in made_files:
      (Path(folder) / file.name).rename(file)
  record = {'source': args.source, 'step': loaded.step, 'to': args.to}
  record |= {'files': [str(file) for file in made_files], 'params': made.params}
  record |= {'platforms': platforms, 'outputs': list(about['outputs'])}
  record |= {'difference': difference}
  return cli.show(args, record, _render(record))


def _difference(expected: dict, actual: dict) -> float:
  """Returns the largest difference of the outputs, each relative to its largest value."""
  import numpy as np

  assert expected.keys() == actual.keys(), (list(expected), list(actual))
  worst = 0.0
  for name, reference in expected.items():
    assert actual[name].shape == reference.shape, name
    assert actual[name].dtype == np.float32, name
    scale = max(np.abs(reference).max(), np.finfo(np.float32).tiny)
    worst = max(worst, float(np.abs(actual[name] - reference).max() / scale))
  return worst


def _platforms(args) -> list[str]:
  platforms = (args.platforms or _USUAL).split(',')
  if 'gpu' in platforms:
    raise UserError("--platforms gpu: pass cuda for NVIDIA's GPUs or rocm for AMD's.")
  for name in platforms:
    choose('platform', name, PLATFORMS)
  return list(dict.fromkeys(platforms))


def _check_free(dest: Path, to: str) -> None:
  if to == 'stablehlo' and dest.suffix != '.stablehlo':
    raise UserError(f'{dest}: --to {to} writes a file whose name ends in .stablehlo.')
  if to == 'savedmodel' and dest.suffix:
    raise UserError(f'{dest}: --to {to} writes a folder.')
  out_folder.check_folder(str(dest.parent), 'DEST')
  for path in (dest, dest.with_suffix('.json')) if dest.suffix else (dest,):
    if path.exists():
      raise UserError(f'{path} is there already: choose another place, or remove it.')


def _render(record: dict) -> str:
  step = '' if record['step'] is None else f', step {record["step"]}'
  difference = record['difference']
  far = 'no platform cpu' if difference is None else f'{difference:.1e} apart'
  return '\n'.join(
    [
      f'{record["source"]}{step}: {record["params"]:,} parameters as {record["to"]} for '
      f'{", ".join(record["platforms"])}',
      f'  outputs: {", ".join(record["outputs"])}',
      *(f'  {path}' for path in record['files']),
      f'  {"not " * (difference is None)}compared with the model: {far}',
    ]
  )


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax export', description=__doc__.split('\n')[0])
  source.add_options(parser, names=True)
  add = parser.add_argument
  add('dest', metavar='DEST', help='FILE.stablehlo, or a folder')
  add('--to', choices=FORMATS, required=True)
  places = f'of {", ".join(PLATFORMS)}; default: {_USUAL}'
  add('--platforms', metavar='NAME,...', help=places)
  add('--batch', type=cli.positive, help='images; default: any number')
  names = lambda text: tuple(filter(None, text.split(',')))
  layers = 'features to return as well: pre_logits,block11'
  add('--layers', type=names, default=(), metavar='NAME,...', help=layers)
  add('--dtype', choices=tuple(_TOLERANCE), help='of compute; default: that of SOURCE')
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
