"""The command line of `tools.inspect`."""

import ast
import math

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools.tpu.generations import GENERATIONS


def parser(description: str) -> cli.Parser:
  """Returns the parser of all flags."""
  built = cli.Parser(
    prog='vit_jax inspect',
    description=description,
    allow_abbrev=False,
  )
  add = built.add_argument
  add(
    'model',
    nargs='?',
    help="'vit:B/16', a published name such as 'vit_base_patch16_224', a file of weights, "
    'or a run (RUN@best)',
  )
  add(
    '--table',
    choices=['paper', 'swin', 'vpt'],
    help='instead of a model, beside ours: exaFLOPs of the ViT paper (Table 6), '
    'multiply-adds of the Swin paper (Table 1), parameters that VPT tunes (Table 1)',
  )
  add('--zoo', action='store_true', help='instead of a model: the published weights')
  add(
    '--config',
    metavar='NAME|FILE.py[:ARGS]',
    help='instead of a model: steps, epochs and compute of a recipe, and with --mesh its '
    'memory; --config.KEY=VALUE sets a key of it',
  )
  add(
    '--resolution',
    type=cli.resolution,
    default=(224, 224),
    help='224, or 224x160 (HxW)',
  )
  add('--classes', type=_count, default=1000, help='0: no head')
  add(
    '--set',
    action='append',
    default=[],
    metavar='FIELD=VALUE',
    help='a field of the model: --set classifier=map --set dtype=bfloat16',
  )
  add('--dtype', help='of compute, such as bfloat16: as --set dtype=bfloat16')
  add(
    '--batch',
    type=_count,
    default=1,
    help='images per device and step (memory); with --mesh: of all devices',
  )
  add(
    '--mesh',
    metavar='AXIS=N,...',
    help='what each device of a mesh holds in training, such as data=64,fsdp=16',
  )
  add(
    '--tpu',
    metavar='SLICE',
    help='with --config: compile the recipe for a slice such as v3:16x16, chips along each '
    'axis, which need not be there: minutes (needs libtpu: make .venv-tpu). Generations: '
    f'{", ".join(GENERATIONS)}',
  )
  add(
    '--hbm', type=_gib, metavar='GIB', help="a device's memory: does it fit? (--mesh)"
  )
  add('--sharding', default='fsdp', help='fsdp, fsdp_tensor or replicate (--mesh)')
  add(
    '--optim',
    default='adamw',
    metavar='NAME[,KEY=VALUE...]',
    help='an optimizer: adamw,moment_dtype=bfloat16,ema=0.999 (--mesh)',
  )
  add(
    '--examples',
    type=_count,
    help='images seen; with --epochs or --config: in one epoch',
  )
  add('--epochs', type=float)
  add('--steps', type=_count, help='of --batch images, instead of --examples')
  cli.add_json_option(built)
  return built


def _count(text: str) -> int:
  value = float(text)  # '303e6' is easier to read than its digits
  if not value.is_integer() or value < 0:
    raise ValueError(text)
  return int(value)


_count.__name__ = 'whole number'  # argparse names it in its message


def _gib(text: str) -> float:
  value = float(text)
  if not math.isfinite(value) or value <= 0:
    raise ValueError(text)
  return value


_gib.__name__ = 'number of GiB'


def field(setting: str, flag: str) -> tuple[str, object]:
  """Returns (name, value) of 'FIELD=VALUE', the value a Python literal or a text.

  Raises:
    UserError: for a text without '='; it names the flag.
  """
  name, equals, text = setting.partition('=')
  if not equals:
    raise UserError(f'{flag} {setting}: write FIELD=VALUE, such as classifier=map.')
  try:
    return name, ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return name, text


def examples_seen(args) -> float | None:
  """Returns the images of a whole training, None if it was not asked about."""
  if args.steps is not None:
    if args.examples is not None or args.epochs is not None:
      raise UserError('--steps goes with --batch, not with --examples or --epochs.')
    return args.steps * args.batch
  if args.epochs is None:
    return args.examples
  if args.examples is None:
    raise UserError('--epochs needs --examples, the size of the data set.')
  if not math.isfinite(args.epochs) or args.epochs < 0:
    raise UserError(f'--epochs {args.epochs}: write a number that is not negative.')
  return args.epochs * args.examples


def refuse_others(args, parser, asked: str, allowed: tuple[str, ...]) -> None:
  """Raises UserError for a flag beside what was asked for and what may go with it."""
  for name, value in vars(args).items():
    if name in (*allowed, 'json') or value == parser.get_default(name):
      continue
    given = value if name == 'model' else f'--{name}'
    raise UserError(
      f'{asked} has its own models and settings: leave out {given}, or {asked}.'
    )


def optimizer(text: str) -> dict:
  """Returns the section `optim` of 'adamw,moment_dtype=bfloat16,ema=0.999'."""
  name, *rest = text.split(',')
  # The rate is asked for by every optimizer, and memory does not depend on it.
  return {'name': name, 'lr': 1e-3, **dict(field(x, '--optim') for x in rest)}


def fields(args) -> dict:
  """Returns the fields of the model that were set."""
  given = dict(field(setting, '--set') for setting in args.set)
  if args.dtype:
    if 'dtype' in given:
      raise UserError('--dtype and --set dtype=... say the same: leave out one.')
    given['dtype'] = args.dtype
  return given


def batch(args) -> int:
  """Returns the number of images; UserError for none."""
  if args.batch < 1:
    raise UserError('--batch 0: at least one image per step.')
  return args.batch
