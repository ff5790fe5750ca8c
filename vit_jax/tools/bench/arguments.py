"""The command line of `tools.bench`."""

import argparse
from pathlib import Path

from vit_jax import check, cli, tune
from vit_jax.errors import UserError, did_you_mean
from vit_jax.tools.gpu import devices
from vit_jax.tools.gpu.devices import GPUS
from vit_jax.tools.inspect import arguments
from vit_jax.tools.tpu import generations

MODES = ('train', 'forward')
DTYPES = ('float32', 'bfloat16')


def parse(argv: list[str], description: str):
  """Returns the arguments; lists where a flag takes several values.

  Raises:
    UserError: for an unknown flag or value, or one without the flag it belongs to.
  """
  parser = cli.Parser(
    prog='vit_jax bench',
    description=description,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('model', metavar='MODEL', help="'vit:B/16', or a name such as mixer_b16_224")
  add(
    '--mode',
    type=_several(MODES),
    default=list(MODES),
    help='train, forward or (the default) both: train,forward',
  )
  add(
    '--dtype',
    type=_several(DTYPES),
    help='of compute: float32 (default on CPUs), bfloat16 (elsewhere), or both with a '
    'comma',
  )
  add(
    '--batch',
    type=_batches,
    metavar='N[,N...]',
    help='images in a step; default 8 on CPUs, 128 elsewhere, 64 with --tpu or --gpu; the '
    'best of several is marked',
  )
  add('--resolution', type=cli.positive, default=224, help='pixels, a square')
  add(
    '--steps',
    type=cli.positive,
    help='to time in each row, with --vs on each side; default: as many as take 10 s',
  )
  add(
    '--set',
    action='append',
    default=[],
    metavar='FIELD=VALUE',
    help='a field of the model: --set remat=full --set num_classes=10',
  )
  add(
    '--tune',
    action='append',
    default=[],
    metavar='KEY=VALUE',
    help="a key of the config's section tune: --tune method=lora --tune rank=8",
  )
  add(
    '--tpu',
    type=_slices,
    metavar='SLICE[,SLICE...]',
    help="compile for one device of TPUs that need not be there, 'v3,v5e:2x2' or 'all' of "
    f'{", ".join(generations.GENERATIONS)} (needs libtpu: make .venv-tpu)',
  )
  add(
    '--gpu',
    type=_gpus,
    metavar='GPU[,GPU...]',
    help=f"compile for one of GPUs that need not be there, {', '.join(GPUS)} or 'all' "
    "(needs JAX's plugin for CUDA: make .venv-gpu)",
  )
  add(
    '--vs',
    choices=['timm', 'big_vision'],
    help="timm's PyTorch model in turns with ours; with --tpu or --gpu: big_vision's "
    'program',
  )
  add('--big_vision', metavar='PATH', help='with --vs big_vision: its checkout')
  add(
    '--torch-python',
    dest='python',
    metavar='PYTHON',
    help='with --vs: the interpreter of an environment with torch and timm, where this '
    'one has none',
  )
  add(
    '--torch-compile',
    action=argparse.BooleanOptionalAction,
    help='with --vs: torch.compile; default on GPUs, not on CPUs',
  )
  add(
    '--rounds', type=cli.positive, help='with --vs timm: turns of each side, default 7'
  )
  cli.add_json_option(parser)
  add('--out', metavar='FILE.json', help='where to keep the results')
  args = parser.parse_args(argv)
  for name, flag in (
    ('python', '--torch-python'),
    ('torch_compile', '--torch-compile'),
    ('rounds', '--rounds'),
  ):
    if getattr(args, name) is not None and args.vs != 'timm':
      parser.error(f'{flag} goes with --vs timm')
  if args.tune and args.vs:
    parser.error('--tune goes without --vs: a peer trains everything')
  if args.tpu and args.gpu:
    parser.error('--tpu and --gpu: one at a time, each has an environment of its own')
  ahead = '--tpu' if args.tpu else '--gpu' if args.gpu else None
  if ahead and (args.steps or args.vs == 'timm'):
    parser.error(
      f'{ahead} compiles and runs nothing: leave out --steps and --vs timm; beside another '
      'program: --vs big_vision --big_vision PATH'
    )
  wanted = args.vs == 'big_vision'
  if wanted != bool(args.big_vision) or (wanted and not ahead):
    parser.error(
      '--vs big_vision goes with --tpu SLICE or --gpu GPU, and --big_vision PATH'
    )
  if args.python and not Path(args.python).exists():
    parser.error(f'--torch-python {args.python}: there is no such file')
  args.rounds = args.rounds or 7
  return args


def fields(args) -> dict:
  """Returns the fields of the model that were set, 1000 classes by default."""
  given = arguments.fields(argparse.Namespace(set=args.set, dtype=None))
  if 'dtype' in given:
    raise UserError('--set dtype=...: write --dtype, which takes several.')
  return {'num_classes': 1000, **given}


def tuning(args) -> dict:
  """Returns the config's section `tune`; UserError for what it cannot be."""
  section = dict(arguments.field(s, '--tune') for s in args.tune) or {'method': 'full'}
  if 'method' not in section:
    raise UserError(
      f'--tune {args.tune[0]} belongs to a method: --tune method=NAME, one of '
      f'{sorted(tune.METHODS)}.'
    )
  signature = tune.METHODS.signature(section['method'])
  check.bind('--tune', section, signature, extra={'method': str})
  return section


def settings(args) -> list[str]:
  """Returns what was set of the model and its tuning, as the tables show it."""
  return [*args.set, *(f'tune.{setting}' for setting in args.tune)]


def _several(allowed: tuple[str, ...]):
  """Returns the argument type of a comma-separated list of words."""

  def parse(text: str) -> list[str]:
    words = list(dict.fromkeys(text.split(',')))
    for word in words:
      if word not in allowed:
        hint = did_you_mean(word, allowed)
        raise argparse.ArgumentTypeError(f'{word!r} is not one of {allowed}.{hint}')
    return words

  return parse


def _devices(table, parse):
  """Returns the argument type of a comma-separated list of devices, or 'all' of them."""

  def several(text: str) -> list[str]:
    names = list(table) if text == 'all' else text.split(',')
    try:
      return [parse(name) for name in names]
    except UserError as error:
      raise argparse.ArgumentTypeError(str(error)) from None

  return several


_slices = _devices(
  generations.GENERATIONS, lambda name: ':'.join(generations.parse(name))
)
_gpus = _devices(GPUS, devices.parse)


def _batches(text: str) -> list[int]:
  return [cli.positive(part) for part in text.split(',')]
