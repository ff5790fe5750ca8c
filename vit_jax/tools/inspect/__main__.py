"""Parameters and GFLOPs of a model; a recipe's cost; the content of a file or a run.

  vit_jax inspect vit:B/16
  vit_jax inspect vit:L/16 --resolution 384 --set classifier=map --examples 303e6
  vit_jax inspect --config vit_b16:variant=L/16 --examples 14e6
  vit_jax inspect --config vit_b16 --mesh data=8,fsdp=4     # memory of each device
  .venv-tpu/bin/vit_jax inspect --config vit_b16 --tpu v3:4x4
  vit_jax inspect RUN            # config, checkpoints, the best one; or a FILE
  vit_jax inspect --zoo          # published weights by short names

Numbers come from shapes: no parameter is allocated and no accelerator is used, so that a
G/14 takes seconds on a laptop. --mesh and --tpu compile the training step: a minute or
more.
"""

import math
import os
import sys

from vit_jax import cli
from vit_jax.config import recipes
from vit_jax.errors import UserError
from vit_jax.tools.inspect import model, recipe, source, tpu

# Flags that go with each question, besides --json.
_ALLOWED = {
  'zoo': ('zoo',),
  'config': ('config', 'examples', 'mesh', 'tpu'),
  'source': ('model', 'set'),
  'model': ('model', 'set', 'resolution', 'classes', 'examples'),
}


def main(argv: list[str]) -> int:
  """Prints the report or its JSON; returns 0."""
  parser = _parser()
  args, rest = parser.parse_known_args(argv)
  if unknown := [a for a in rest if not (args.config and a.startswith('--config.'))]:
    parser.error(f'unrecognized arguments: {" ".join(unknown)}')
  question = _question(args, parser)
  subject = '--zoo' if args.zoo else args.config or args.model
  for name, value in vars(args).items():
    if name not in (*_ALLOWED[question], 'json') and value != parser.get_default(name):
      given = value if name == 'model' else f'--{name}'
      parser.error(f'{given} does not go with {subject}')
  if question == 'zoo':
    record, text = model.zoo()
  elif question == 'config':
    record, text = _recipe(args, [a.removeprefix('--config.') for a in rest])
  elif question == 'source':
    record = source.describe(args.model, args.set)
    text = source.render(record)
  else:
    classes = args.classes or None
    record = model.describe(
      args.model, args.resolution, classes, args.set, args.examples
    )
    text = model.render(record)
  if args.json:
    cli.print_json(record)
  else:
    print(text)
  return 0


def _question(args, parser) -> str:
  if args.zoo:
    return 'zoo'
  if args.config:
    return 'config'
  if args.model is None:
    parser.error('the following arguments are required: model, or --config')
  name = args.model.partition(':')[0]
  is_source = source.is_source(args.model)
  if name.endswith('.py') or (name in recipes() and not is_source):
    raise UserError(
      f'{args.model} is a config: write vit_jax inspect --config {args.model}.'
    )
  if '/' in name and not is_source:  # names of models have none there
    raise UserError(
      f'{args.model}: no such file or folder. A recipe is named after --config, '
      'such as --config vit_b16.'
    )
  return 'source' if is_source else 'model'


def _recipe(args, assignments: list[str]) -> tuple[dict, str]:
  if args.tpu and args.mesh:
    raise UserError(
      "--mesh goes without --tpu, whose mesh is the config's: --config.mesh.fsdp=4."
    )
  if args.examples == 0:
    raise UserError('--examples 0: an epoch has at least one image.')
  if args.tpu:
    tpu.prepare()
  if args.mesh:  # before JAX counts its devices
    devices = math.prod(args.mesh.values())
    os.environ['XLA_FLAGS'] = (
      f'{os.environ.get("XLA_FLAGS", "")} '
      f'--xla_force_host_platform_device_count={devices}'
    )
  config = recipe.load(args.config, assignments)
  record = {'config': args.config, **recipe.describe(config, args.examples)}
  text = recipe.render(record, args.config)
  if args.mesh:
    record['memory'] = recipe.memory(config, record, args.mesh)
    text += '\n\n' + recipe.render_memory(record['memory'])
  if args.tpu:
    record['tpu'] = tpu.inspect(config, record, args.tpu)
    text += '\n\n' + tpu.render(record['tpu'])
  return record, text


def _mesh(text: str) -> dict[str, int]:
  """Returns 'data=64,fsdp=16' as {'data': 64, 'fsdp': 16}."""
  sizes = {}
  for item in text.split(','):
    axis, _, size = item.partition('=')
    sizes[cli.words(('data', 'fsdp', 'tensor'))(axis)[0]] = cli.positive(size)
  return sizes


def _parser() -> cli.Parser:
  parser = cli.Parser(
    'vit_jax inspect', description=__doc__.split('\n')[0], allow_abbrev=False
  )
  add = parser.add_argument
  add(
    'model',
    nargs='?',
    help="'vit:B/16', a published name, a file of weights, or a run (RUN@best)",
  )
  add('--zoo', action='store_true', help='list the published weights')
  add(
    '--config',
    metavar='NAME|FILE.py[:ARGS]',
    help='steps, epochs and compute of a recipe; --config.KEY=VALUE sets a key of it',
  )
  add('--resolution', type=cli.resolution, default=(224, 224), help='224, or 224x160')
  add('--classes', type=cli.count, default=1000, help='0: no head')
  add('--set', action=cli.Fields, help='a field of the model: --set classifier=map')
  add(
    '--examples',
    type=cli.count,
    help='images of a training; with --config: of one epoch',
  )
  add(
    '--mesh',
    type=_mesh,
    metavar='AXIS=N,...',
    help='with --config: memory of each device of a mesh, such as data=64,fsdp=16',
  )
  add(
    '--tpu',
    metavar='SLICE',
    help='with --config: cycles and memory on a slice such as v3:16x16, chips along '
    'each axis, which need not be there (needs libtpu: make .venv-tpu). Generations: '
    f'{", ".join(tpu.GENERATIONS)}',
  )
  cli.add_json_option(parser)
  return parser


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'  # leave the accelerator to whoever trains on it
  sys.exit(cli.run(main))
