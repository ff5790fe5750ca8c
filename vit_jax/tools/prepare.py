"""Writes a data set that `tfds:NAME` reads, from archives, folders or lists of labels.

  vit_jax prepare imagenet21k --from winter21_whole.tar.gz --data_dir D
  vit_jax prepare images --from FOLDER --name pets --data_dir D
  vit_jax prepare images --from LABELS.csv images.tar --name pets \\
      --data_dir D --split train=90%,val=10%

Nothing is unpacked. Rerunning the same command resumes an interrupted run. A report of
counts per class, and of files left out, is written beside the data. --max_side 512 makes
large images smaller, once. With --beam_runner it runs on a cluster.
"""

import sys

from vit_jax import cli
from vit_jax.errors import Preempted, UserError


def main(argv: list[str]) -> int:
  """Prepares and prints the report, less the counts of single classes."""
  args = _parser().parse_args(argv)
  from vit_jax.data.prepare import beam, imagenet21k, images, report, writer

  options = [f'--{o}' for o in filter(None, args.beam_pipeline_options.split(','))]
  if options and not args.beam_runner:
    raise UserError('--beam_pipeline_options goes with --beam_runner.')
  if args.beam_runner:
    beam.load_beam()  # before the input is looked through
  common = dict(version=args.version, max_side=args.max_side)
  common['ranges'] = bool(args.beam_runner)
  if args.data_set == 'imagenet21k':
    plan = imagenet21k.plan(args.sources[0], **common)
  else:
    plan = images.plan(args.sources, args.name, split=args.split, **common)
  how = dict(file_format=args.file_format, log=_log)
  try:
    if args.beam_runner:
      how |= dict(runner=args.beam_runner, options=options)
      directory, result = beam.prepare(plan, args.data_dir, **how)
    else:
      directory, result = writer.prepare(plan, args.data_dir, **how)
  except KeyboardInterrupt:
    raise Preempted('Stopped. Rerun the same command to resume.') from None
  if args.json:
    for record in result['splits'].values():
      del record['counts']
    cli.print_json({'directory': directory, **result})
    return 0
  print(report.summary(result))
  print(f'Written to {directory}; report.txt there has all counts.')
  print(f"Read it as 'tfds:{plan.name}', with TFDS_DATA_DIR={args.data_dir}")
  return 0


def _log(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _parser() -> cli.Parser:
  parser = cli.Parser(
    'vit_jax prepare', description=__doc__.split('\n')[0], allow_abbrev=False
  )
  kinds = parser.add_subparsers(dest='data_set', required=True, metavar='DATA_SET')
  synsets = kinds.add_parser('imagenet21k', help='from its tar of one tar a class')
  synsets.add_argument(
    '--from',
    dest='sources',
    nargs=1,
    required=True,
    metavar='TAR',
    help='winter21_whole.tar.gz, fall11_whole.tar, or the folder of their tars',
  )
  own = kinds.add_parser('images', help='from folders, tars, or a list of labels')
  own.add_argument(
    '--from',
    dest='sources',
    nargs='+',
    required=True,
    metavar='PATH',
    help='a folder of classes; tars (of folders of classes, or one a class); or LABELS '
    '(.csv, .tsv, .jsonl: path,label[,label...]) and, if elsewhere, the folder or tars '
    'of its images',
  )
  own.add_argument('--name', required=True, help="lower-case: 'my_pets'")
  own.add_argument(
    '--split', help="'train=90%%,val=10%%', by file names; default: by folders"
  )
  for one in (synsets, own):
    one.add_argument('--data_dir', required=True, help="TFDS's: gets NAME/VERSION")
    one.add_argument('--version', default='1.0.0', help='default: 1.0.0')
    one.add_argument(
      '--max_side',
      type=int,
      metavar='PIXELS',
      help='make images whose longer side is larger smaller, as JPEG of quality 95',
    )
    one.add_argument(
      '--file_format', choices=('array_record', 'tfrecord'), default='array_record'
    )
    one.add_argument(
      '--beam_runner', help='DataflowRunner, FlinkRunner, DirectRunner, ...'
    )
    one.add_argument(
      '--beam_pipeline_options',
      default='',
      metavar='KEY=VALUE,...',
      help='project=P,region=R,temp_location=gs://B/tmp,...',
    )
    cli.add_json_option(one)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
