"""Parameters, GFLOPs, training exaFLOPs and memory of a model, without running it.

  python -m vit_jax.tools.inspect vit:B/16
  python -m vit_jax.tools.inspect vit:L/16 --resolution 384 --set classifier=map
  python -m vit_jax.tools.inspect vit:B/16 --examples 303e6 --epochs 7 --json
  python -m vit_jax.tools.inspect --table paper     # Table 6 of the ViT paper beside ours
  python -m vit_jax.tools.inspect --zoo             # published weights by short names

Everything comes from the model's shapes: no parameter is allocated and no accelerator
is used, so a G/14 takes seconds on a laptop.
"""

import ast
import math
import os
import re
import sys

from vit_jax.errors import UserError
from vit_jax.tools import cli, paper_table


def main(argv: list[str]) -> int:
  """Prints the report (or its JSON) on the model named in `argv`; returns 0."""
  parser = _parser()
  args = parser.parse_args(argv)
  if args.table or args.zoo:
    return _print_table(args, parser)
  if args.model is None:
    parser.error('the following arguments are required: model')
  if args.batch < 1:
    raise UserError('--batch 0: at least one image per step.')
  fields = dict(_field(setting) for setting in args.set)
  examples = _examples_seen(args)
  record = inspect_model(
    args.model, args.resolution, args.classes or None, fields, args.batch, examples
  )
  if args.json:
    cli.print_json(record)
  else:
    print(_render(record))
  return 0


def _print_table(args, parser) -> int:
  asked = f'--table {args.table}' if args.table else '--zoo'
  for name, value in vars(args).items():
    if name in asked or name == 'json' or value == parser.get_default(name):
      continue
    given = value if name == 'model' else f'--{name}'
    raise UserError(
      f'{asked} has its own models and settings: leave out {given}, or {asked}.'
    )
  if args.zoo:
    return _print_zoo(args.json)
  rows = paper_table.rows()
  if args.json:
    cli.print_json({'table': args.table, 'rows': rows})
  else:
    print(paper_table.render(rows))
  return 0


def _print_zoo(as_json: bool) -> int:
  from vit_jax.weights import zoo

  if as_json:
    cli.print_json({'zoo': [entry._asdict() for entry in zoo.ENTRIES.values()]})
    return 0
  rows = [('name', 'model', 'px', 'classes', 'data', 'format')]
  for e in zoo.ENTRIES.values():
    classes = str(e.classes or 'none')
    rows.append((e.name, e.model, str(e.resolution), classes, e.data, e.dialect))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  for row in rows:
    print('  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
  print(
    '\nPixels in [-1, 1]; Apache-2.0. --json has the addresses. None of these files could '
    'be\ndownloaded where this list was made; "none": the published head is all zeros.'
  )
  return 0


def inspect_model(
  model: str,
  resolution: tuple[int, int] = (224, 224),
  num_classes: int | None = 1000,
  fields: dict | None = None,
  batch: int = 1,
  examples: float | None = None,
) -> dict:
  """Returns what the tool prints.

  Args:
    model: 'vit:B/16' or a published name.
    resolution: height and width of the images, in pixels.
    fields: more fields of the model, such as `{'classifier': 'map'}`.
    batch: images per device and step, for the memory.
    examples: images seen in a whole training (epochs x data set size), or None.

  Returns:
    params; modules (name -> parameters); tokens that the blocks see, None for models
    without; gflops forward per image (see `vit_jax.flops`); exaflops of the training
    or None; memory in bytes: float32 params and gradients, two float32 Adam moments,
    activations (see `saved_bytes`) and their total.

  Raises:
    UserError: for an unknown model or field, or a size that the patches do not tile.
  """
  import jax

  from vit_jax import flops, models

  fields = {'num_classes': num_classes, **(fields or {})}
  module = models.build(model, **fields)
  images = jax.ShapeDtypeStruct((1, *resolution, 3), 'float32')
  init = lambda module: jax.eval_shape(module.init, jax.random.key(0), images)['params']
  params = init(module)
  # A scanned stack has the same products and activations, and is traced as one block.
  traced = module.clone(scan=True) if hasattr(module, 'scan') else module
  traced_params = init(traced)

  def forward(params, images, train=False):
    rngs = {'dropout': jax.random.key(0)} if train else {}
    return traced.apply({'params': params}, images, train=train, rngs=rngs)

  _, out = jax.eval_shape(forward, traced_params, images)
  operations = flops.count(forward, traced_params, images)
  activations = saved_bytes(
    lambda params, images: forward(params, images, train=True)[0],
    traced_params,
    images,
  )
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
  return {
    'model': model,
    'fields': {key: str(value) for key, value in fields.items()},
    'resolution': list(resolution),
    'params': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'modules': _modules(params),
    'tokens': out['tokens'].shape[1] if 'tokens' in out else None,
    'gflops': operations / 1e9,
    'examples': examples,
    'exaflops': None if examples is None else flops.exa_training(operations, examples),
    'memory': {
      'batch': batch,
      'params': size,
      'gradients': size,
      'optimizer': 2 * size,
      'activations': activations * batch,
      'total': 4 * size + activations * batch,
    },
  }


def saved_bytes(fn, params, images) -> int:
  """Returns the bytes that the backward pass of `fn(params, images)` keeps.

  An estimate of training's activations: the residuals of `jax.vjp`, inputs and
  parameters not counted. XLA keeps a little less or more, and needs working space on
  top (with remat: that of the block which is recomputed). Compiled for S/16, batch 16,
  the CPU's temporary memory was 4 % above it.
  """
  import jax
  from jax.extend import core

  def residuals(params, images):
    return jax.vjp(lambda params: fn(params, images), params)[1]

  jaxpr = jax.make_jaxpr(residuals)(params, images).jaxpr
  saved = {v for v in jaxpr.outvars if isinstance(v, core.Var)} - set(jaxpr.invars)
  return sum(v.aval.size * v.aval.dtype.itemsize for v in saved)


def _modules(params) -> dict[str, int]:
  """Returns parameters per module, blocks that differ in their number as one."""
  from vit_jax import trees

  paths = {name: name.split('/') for name in trees.flatten(params)}
  stacks = {path[0] for path in paths.values() if len(path) > 1 and 'block' in path[1]}
  sizes: dict[str, int] = {}
  members: dict[str, set] = {}
  for name, leaf in trees.flatten(params).items():
    path = paths[name]
    module = '/'.join(path[: 2 if path[0] in stacks else 1])
    group = re.sub(r'([Bb]lock)_\d+$', r'\1_*', module)
    sizes[group] = sizes.get(group, 0) + leaf.size
    members.setdefault(group, set()).add(module)
  return {
    f'{group} (x{len(members[group])})' if len(members[group]) > 1 else group: size
    for group, size in sizes.items()
  }


def _render(record) -> str:
  height, width = record['resolution']
  lines = [f'{record["model"]} at {height}x{width} px', '']
  lines += [f'  {name:<34}{size:>15,}' for name, size in record['modules'].items()]
  lines += [f'  {"parameters":<34}{record["params"]:>15,}', '']
  if record['tokens']:
    lines.append(f'  tokens per image          {record["tokens"]:>9,}')
  lines.append(
    f'  forward, per image        {record["gflops"]:>9.2f} GFLOPs '
    '(products only, multiply-add = 2)'
  )
  if record['exaflops'] is not None:
    lines.append(
      f'  training, {record["examples"]:.3g} images'.ljust(28)
      + f'{record["exaflops"]:>9.4g} exaFLOPs (3 x forward)'
    )
  memory = record['memory']
  lines += ['', f'  training memory at batch {memory["batch"]} per device, estimated:']
  labels = {
    'params': 'parameters, float32',
    'gradients': 'gradients, float32',
    'optimizer': 'two Adam moments, float32',
    'activations': 'activations kept for backward',
    'total': 'total',
  }
  lines += [
    f'    {label:<30}{memory[key] / 2**30:>9.3f} GiB' for key, label in labels.items()
  ]
  return '\n'.join(lines)


def _parser() -> cli.Parser:
  parser = cli.Parser(
    prog='python -m vit_jax.tools.inspect', description=__doc__.split('\n')[0]
  )
  add = parser.add_argument
  add(
    'model',
    nargs='?',
    help="'vit:B/16', or a published name such as 'vit_base_patch16_224'",
  )
  add(
    '--table',
    choices=['paper'],
    help='instead of a model: exaFLOPs of the ViT paper (Table 6) beside ours',
  )
  add('--zoo', action='store_true', help='instead of a model: the published weights')
  add(
    '--resolution', type=_resolution, default=(224, 224), help='224, or 224x160 (HxW)'
  )
  add('--classes', type=_count, default=1000, help='0: no head')
  add(
    '--set',
    action='append',
    default=[],
    metavar='FIELD=VALUE',
    help='a field of the model: --set classifier=map --set dtype=bfloat16',
  )
  add('--batch', type=_count, default=1, help='images per device and step (memory)')
  add('--examples', type=_count, help='images seen; with --epochs: in the data set')
  add('--epochs', type=float)
  add('--steps', type=_count, help='with --batch, instead of --examples')
  add('--json', action='store_true', help='one JSON object instead of the report')
  return parser


def _count(text: str) -> int:
  value = float(text)  # '303e6' is easier to read than its digits
  if not value.is_integer() or value < 0:
    raise ValueError(text)
  return int(value)


_count.__name__ = 'whole number'  # argparse names it in its message


def _resolution(text: str) -> tuple[int, int]:
  height, _, width = text.partition('x')
  size = int(height), int(width or height)
  if min(size) < 1:
    raise ValueError(text)
  return size


_resolution.__name__ = 'resolution'


def _field(setting: str):
  name, equals, text = setting.partition('=')
  if not equals:
    raise UserError(f'--set {setting}: write FIELD=VALUE, such as classifier=map.')
  try:
    return name, ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return name, text


def _examples_seen(args) -> float | None:
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


if __name__ == '__main__':
  # Shapes alone are asked for: leave the accelerator to whoever trains on it.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  sys.exit(cli.run(main))
