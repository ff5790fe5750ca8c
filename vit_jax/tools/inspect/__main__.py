"""Describes a model's size and cost, a recipe's cost, or the content of a file or a run.

  vit_jax inspect vit:L/16 [--resolution 384] [--set classifier=map] [--examples 303e6]
  vit_jax inspect --config vit_b16:variant=L/16 [--examples 14e6] [--mesh data=8,fsdp=4]
  .venv-tpu/bin/vit_jax inspect --config vit_b16 --examples 14e6 --tpu v3:4x4
  vit_jax inspect RUN|FILE
  vit_jax inspect --zoo

The numbers are computed from shapes: no parameter is allocated, and no accelerator is used.
`--mesh` and `--tpu` compile the training step, which takes a minute or more.
"""

import math
import os
import sys

from vit_jax import cli
from vit_jax.config import recipes
from vit_jax.errors import UserError, did_you_mean
from vit_jax.tools.inspect import tpu

# Question -> the arguments that go with it, besides --json.
_ALLOWED = {
  'zoo': ('zoo',),
  'config': ('config', 'examples', 'mesh', 'tpu'),
  'source': ('model', 'set'),
  'model': ('model', 'set', 'resolution', 'classes', 'examples'),
}


def main(argv: list[str]) -> int:
  """Prints the report or its JSON; returns 0."""
  parser = _parser()
  # argparse would take an assignment with a space in it for a model.
  assignments = [a for a in argv if a.startswith('--config.')]
  args = parser.parse_args([a for a in argv if a not in assignments])
  if assignments and not args.config:
    parser.error(f'unrecognized arguments: {" ".join(assignments)}')
  from vit_jax.tools.inspect import model, source

  question = _question(args, parser)
  subject = '--zoo' if args.zoo else args.config or args.model
  for name, value in vars(args).items():
    if name not in (*_ALLOWED[question], 'json') and value != parser.get_default(name):
      flag = value if name == 'model' else f'--{name}'
      parser.error(f'{flag} does not go with {subject}')
  if question == 'zoo':
    record, text = model.zoo()
  elif question == 'config':
    record, text = _recipe(args, [a.removeprefix('--config.') for a in assignments])
  elif question == 'source':
    record = source.describe(args.model, args.set)
    text = source.render(record)
  else:
    options = args.resolution, args.classes or None, args.set, args.examples
    record = model.describe(args.model, *options)
    text = model.render(record)
  return cli.show(args, record, text)


def _question(args, parser) -> str:
  from vit_jax import models
  from vit_jax.tools.inspect import source

  if args.zoo:
    return 'zoo'
  if args.config:
    return 'config'
  if args.model is None:
    parser.error('the following arguments are required: model, or --config')
  if source.is_source(args.model):
    return 'source'
  name = args.model.partition(':')[0]
  if name.endswith('.py') or name in recipes():
    raise UserError(f'{args.model} is a config: write --config {args.model}.')
  if '/' in name:
    # A model's name has no slash before the colon, so a path was meant.
    near = did_you_mean(name, models.names())
    raise UserError(
      f'{name}: no such file or folder. Write --config RECIPE or hf:OWNER/NAME.{near}'
    )
  return 'model'


def _recipe(args, assignments: list[str]) -> tuple[dict, str]:
  if args.tpu and args.mesh:
    raise UserError(
      '--mesh does not go with --tpu: set the mesh in the config, as --config.mesh.fsdp=4.'
    )
  if args.examples == 0:
    raise UserError('--examples 0: an epoch has at least one image.')
  if args.tpu:
    tpu.prepare()
  if args.mesh:
    # JAX has to read the flag before it counts its devices.
    count = f'--xla_force_host_platform_device_count={math.prod(args.mesh.values())}'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {count}'
  from vit_jax.tools.inspect import recipe

  config = recipe.load(args.config, assignments)
  record = {'config': args.config, **recipe.describe(config, args.examples)}
  texts = [recipe.render(record, args.config)]
  if args.mesh:
    record['memory'] = recipe.memory(config, record, args.mesh)
    texts.append(recipe.render_memory(record['memory']))
  if args.tpu:
    record['tpu'] = tpu.inspect(config, record, args.tpu)
    texts.append(tpu.render(record['tpu']))
  return record, '\n\n'.join(texts)


def _mesh(text: str) -> dict[str, int]:
  """Parses 'data=64,fsdp=16' to {'data': 64, 'fsdp': 16}."""
  sizes = {}
  for item in text.split(','):
    axis, _, size = item.partition('=')
    sizes[cli.words(('data', 'fsdp', 'tensor'))(axis)[0]] = cli.positive(size)
  return sizes


def _parser() -> cli.Parser:
  summary = __doc__.split('\n')[0]
  parser = cli.Parser('vit_jax inspect', description=summary, allow_abbrev=False)
  add = parser.add_argument
  add('model', nargs='?', help="'vit:B/16', a published name, a file, or a run")
  add('--zoo', action='store_true', help='list the published weights')
  add('--config', metavar='NAME|FILE.py[:ARGS]', help='a recipe; --config.KEY=VALUE')
  add('--resolution', type=cli.resolution, default=(224, 224), help='224, or 224x160')
  add('--classes', type=cli.count, default=1000, help='0: no head')
  add(
    '--set',
    action=cli.Fields,
    help='a field of the model, such as --set classifier=map',
  )
  add('--examples', type=cli.count, help='of a training; with --config of an epoch')
  add('--mesh', type=_mesh, metavar='AXIS=N,...', help='memory of each device')
  slices = (
    f'cycles and memory on a slice such as v3:16x16, of {", ".join(tpu.GENERATIONS)}'
  )
  add('--tpu', metavar='SLICE', help=slices)
  return parser


if __name__ == '__main__':
  # Leave the accelerator to a run that may train on it.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  sys.exit(cli.run(main))
