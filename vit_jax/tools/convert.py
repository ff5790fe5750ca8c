"""Writes weights in the format of another library.

  vit_jax convert SOURCE DEST [--to google|timm|hf|authors|open_clip|detectron2]
  vit_jax convert CLIP DEST.npz --labels 'a cat,a dog' [--templates openai]

SOURCE is any source that `vit_jax.load` takes. DEST is FILE.npz (google), or
FILE.safetensors or a folder (timm, hf, open_clip, detectron2; 'authors' has the names in the
code of the paper's authors). `timm.create_model('local-dir:FOLDER', pretrained=True)`,
transformers' `from_pretrained('FOLDER')` and `open_clip.create_model('local-dir:FOLDER')`
read such a folder. A model that the format cannot express is an error.

LoRA's matrices are merged into the kernels. No format can express other parameters that
tuning adds. `--tuned_only` writes only the trained parameters, for
`vit_jax.load(SOURCE, tune=DEST)`. The frozen parameters of a run are read from the weights
that it started from.

`--labels`, for CLIP or SigLIP, writes a classifier: the image tower with a head made of the
texts' vectors. `vit_jax predict DEST.npz` then needs no text tower, and
`--config=finetune:weights=DEST.npz,keep_head=True` starts from that head.
"""

import sys
from pathlib import Path

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools import source, zero_shot

_PICKLE = 'no pickle is written, but PyTorch also loads FILE.safetensors --to timm'
_ONNX = 'convert to FOLDER --to timm, then torch.onnx.export: see the guide Export'
# Suffix that cannot be written -> what to do instead.
_INSTEAD = {'.onnx': _ONNX, **dict.fromkeys(('.pt', '.pth', '.bin', '.ckpt'), _PICKLE)}


def main(argv: list[str]) -> int:
  """Converts weights, and prints the files."""
  args = _parser().parse_args(argv)
  to = _format(args)
  from vit_jax import weights

  options = dict(variant=args.variant, ema=args.ema, weights=args.weights)
  if args.labels or args.templates:
    loaded = _zero_shot(args, weights.load(args.source, **options))
  else:
    loaded = weights.read(args.source, **options)
  if args.tuned_only:
    files, params = _write_tuned(loaded, args.source, args.dest)
  else:
    files, params = weights.write(loaded, args.dest, to)
  files = [str(path) for path in files]
  record = {'files': files, 'to': to or 'tuned', 'params': params}
  how = f'written as {to}' if to else 'that were tuned'
  lines = f'{args.source} ({loaded.origin})', f'{params:,} parameters {how}:', *files
  record |= {'source': args.source, 'step': loaded.step}
  return cli.show(args, record, '\n  '.join(lines))


def _zero_shot(args, loaded):
  """Returns the classifier that --labels and --templates describe, as a source."""
  from vit_jax import trees, weights

  loaded = zero_shot.classifier(args, loaded)
  model, flat = loaded.model, trees.flatten_variables(loaded.variables)
  return weights.Source(
    source=loaded.source,
    format=loaded.format,
    family=model.family_name,
    fields=model.fields(),
    image_size=loaded.image_size,
    channels=loaded.channels,
    class_names=loaded.class_names,
    pp=loaded.pp,
    flat=flat,
  )


def _write_tuned(loaded, source: str, dest: str) -> tuple[list[Path], int]:
  from vit_jax import config as config_lib
  from vit_jax import models
  from vit_jax.weights import export, runs, steps, tuned

  if (run := runs.find(source)) is None:
    raise UserError(f'--tuned_only is for runs; {source} is a {loaded.format} file.')
  config = config_lib.read(run[0])
  shapes = steps.Steps(run[0], config).shapes(loaded.step)
  stored = {name for name, (_, is_stored) in shapes.items() if is_stored}
  family = models.family(loaded.family, **loaded.fields)
  every = loaded.flat | loaded.added
  # A run stores the blocks of a scanned model as one array, so look for its name too.
  trained = [n for n in every if {n, *(family.stacked(n) or ())[:1]} & stored]
  files = export.save(
    dest, *tuned.make_record(loaded, trained, config['weights'] or {})
  )
  return files, sum(every[name].size for name in trained)


def _format(args) -> str | None:
  """Returns the format of DEST; None for tuned parameters, which have a format of our own."""
  if args.tuned_only:
    if args.to:
      raise UserError('--tuned_only writes parameters under our names: leave out --to.')
    return None
  suffix = Path(args.dest).suffix
  if instead := _INSTEAD.get(suffix):
    raise UserError(f'{args.dest}: {instead}.')
  if args.to is None and suffix != '.npz':
    raise UserError(f'{args.dest}: pass --to timm or --to hf, or a FILE.npz (google).')
  to = args.to or 'google'
  if (to == 'google') != (suffix == '.npz'):
    raise UserError(f'{args.dest}: only google files are .npz.')
  return to


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax convert', description=__doc__.split('\n')[0])
  source.add_options(parser, resolution=False)
  add = parser.add_argument
  add('dest', metavar='DEST', help='.npz, .safetensors, or a folder')
  add('--to', choices=('google', 'timm', 'hf', 'authors', 'open_clip', 'detectron2'))
  add('--tuned_only', action='store_true', help='the trained parameters alone')
  zero_shot.add_options(parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
