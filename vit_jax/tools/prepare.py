"""Writes a data set that `tfds:NAME` reads, from archives or folders of images.

  vit_jax prepare imagenet21k --from winter21_whole.tar.gz --data_dir D
  vit_jax prepare images --from FOLDER --name pets --data_dir D
  vit_jax prepare images --from train.tar val.tar --name pets --data_dir D

Nothing is unpacked. Broken images are left out and listed. `--max_side 512` stores large
images in a smaller size. With `--beam_runner` it runs on a cluster.
"""

import contextlib
import sys
import tempfile

from vit_jax import cli, files
from vit_jax.data import prepare
from vit_jax.errors import UserError


def main(argv: list[str]) -> int:
  """Prepares a data set, and prints its splits and the broken images."""
  args = _parser().parse_args(argv)
  options = [f'--{o}' for o in filter(None, args.beam_pipeline_options.split(','))]
  if options and not args.beam_runner:
    raise UserError('--beam_pipeline_options goes with --beam_runner.')
  config = prepare.download_config(args.beam_runner, options)
  kind = prepare.IMAGENET21K
  if args.data_set == 'images':
    kind = prepare.images(args.name)
  final = files.path(args.data_dir) / kind.name / args.version
  if final.exists():
    raise UserError(
      f'{final} exists: choose another --version or --name, or delete it.'
    )
  builder, broken = prepare.builder(
    *(kind, args.sources, str(final.parent.parent)),
    version=args.version,
    max_side=args.max_side,
    beam=bool(args.beam_runner),
  )
  # TFDS prints its progress. It also makes folders for downloads, although there are none.
  with tempfile.TemporaryDirectory() as unused, contextlib.redirect_stdout(sys.stderr):
    builder.download_and_prepare(download_dir=unused, download_config=config)
  sizes = {name: info.num_examples for name, info in builder.info.splits.items()}
  classes = builder.info.features['label'].num_classes
  if args.json:
    record = {'directory': str(final), 'splits': sizes, 'num_classes': classes}
    cli.print_json(record | {'broken': None if args.beam_runner else dict(broken)})
    return 0
  for name, reason in broken:
    print(f'left out: {name}: {reason}')
  counts = ', '.join(f'{name}: {size:,} images' for name, size in sizes.items())
  print(f'{counts}; {classes:,} classes. Written to {final}')
  print(f"Read it as 'tfds:{kind.name}', with TFDS_DATA_DIR={args.data_dir}")
  return 0


def _parser() -> cli.Parser:
  parser = cli.Parser(
    'vit_jax prepare',
    description=__doc__.split('\n')[0],
    allow_abbrev=False,
    json=False,
  )
  kinds = parser.add_subparsers(dest='data_set', required=True, metavar='DATA_SET')
  synsets = kinds.add_parser('imagenet21k', help='from its tar of one tar per class')
  own = kinds.add_parser('images', help='from folders or tars of classes')
  own.add_argument('--name', required=True, help="lower-case: 'my_pets'")
  for one in (synsets, own):
    add = one.add_argument
    paths = 'folders of classes, or tars; splits are named train, val or test'
    add('--from', dest='sources', nargs='+', required=True, metavar='PATH', help=paths)
    add('--data_dir', required=True, help="TFDS's: gets NAME/VERSION")
    add('--version', default='1.0.0', help='default: 1.0.0')
    add('--max_side', type=cli.positive, metavar='PIXELS', help='shrink larger images')
    add('--beam_runner', help='DataflowRunner, FlinkRunner, DirectRunner, ...')
    beam = 'project=P,region=R,temp_location=gs://B/tmp,...'
    add('--beam_pipeline_options', default='', metavar='KEY=VALUE,...', help=beam)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
