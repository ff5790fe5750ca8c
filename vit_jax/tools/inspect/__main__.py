"""Parameters, GFLOPs and memory of a model, without running it; what a file or run holds.

  vit_jax inspect vit:B/16
  vit_jax inspect vit:L/16 --resolution 384 --set classifier=map
  vit_jax inspect vit:B/16 --examples 303e6 --epochs 7 --json
  vit_jax inspect vit:G/14 --mesh data=64,fsdp=16 --batch 16384 --hbm 32
  vit_jax inspect --config vit_b16:variant=L/16
  .venv-tpu/bin/vit_jax inspect --config vit_b16 --tpu v3:4x4
  vit_jax inspect RUN            # config, steps kept, the best; or a FILE
  vit_jax inspect --table paper     # Table 6 of the ViT paper beside ours
  vit_jax inspect --table swin      # Table 1 (b) of the Swin paper
  vit_jax inspect --table vpt       # parameters of every way to tune, and VPT's
  vit_jax inspect --zoo             # published weights by short names

Everything comes from the model's shapes: no parameter is allocated and no accelerator
is used, so a G/14 takes seconds on a laptop, and with --mesh, which compiles its train
step three times, a minute.
"""

import functools
import math
import os
import re
import sys

from vit_jax import cli
from vit_jax.config import recipes
from vit_jax.errors import UserError
from vit_jax.tools.inspect import (
  activations,
  arguments,
  mesh,
  paper_table,
  recipe,
  source,
  swin_table,
  tpu,
  vpt_table,
)
from vit_jax.tools.inspect import text as inspect_text
from vit_jax.tools.tpu import topology


def main(argv: list[str]) -> int:
  """Prints the report (or its JSON) on what `argv` asks for; returns 0."""
  parser = arguments.parser(__doc__.split('\n')[0])
  args, rest = parser.parse_known_args(argv)
  if unknown := [a for a in rest if not (args.config and a.startswith('--config.'))]:
    parser.error(f'unrecognized arguments: {" ".join(unknown)}')
  if args.table or args.zoo:
    asked = ('--zoo', 'zoo') if args.zoo else (f'--table {args.table}', 'table')
    arguments.refuse_others(args, parser, asked[0], asked[1:])
    record, text = _table(args)
  elif args.config:
    allowed = ('config', 'examples', 'mesh', 'hbm', 'tpu')
    arguments.refuse_others(args, parser, f'--config {args.config}', allowed)
    record, text = _recipe(args, [a.removeprefix('--config.') for a in rest])
  elif args.model is None:
    if args.tpu:
      parser.error('--tpu goes with --config')
    parser.error('the following arguments are required: model')
  elif _is_config(args.model):
    raise UserError(
      f'{args.model} is a config: write vit_jax inspect --config {args.model}.'
    )
  elif source.is_source(args.model):
    arguments.refuse_others(args, parser, args.model, ('model', 'set'))
    record = source.describe(args.model, arguments.fields(args))
    text = source.render(record)
  elif '/' in args.model.partition(':')[0]:  # names of models have none there
    raise UserError(
      f'{args.model}: no such file or folder. A recipe is asked about with --config, '
      'such as --config vit_b16.'
    )
  elif args.mesh:
    for name in ('examples', 'epochs', 'steps'):
      if getattr(args, name) is not None:
        raise UserError(f'--{name} goes without --mesh, which asks about one step.')
    record, text = _model_on_mesh(args)
  else:
    if args.tpu:
      raise UserError(
        f'--tpu goes with --config; of a model alone: vit_jax bench {args.model} --tpu '
        f'{args.tpu}.'
      )
    for name in ('hbm', 'sharding', 'optim'):
      if getattr(args, name) != parser.get_default(name):
        raise UserError(f'--{name} goes with --mesh, such as --mesh data=8,fsdp=4.')
    record = inspect_model(
      args.model,
      args.resolution,
      args.classes or None,
      arguments.fields(args),
      arguments.batch(args),
      arguments.examples_seen(args),
    )
    text = inspect_text.model(record)
  if args.json:
    cli.print_json(record)
  else:
    print(text)
  return 0


def _table(args) -> tuple[dict, str]:
  if args.zoo:
    from vit_jax.weights import zoo

    entries = list(zoo.ENTRIES.values())
    return {'zoo': [entry._asdict() for entry in entries]}, inspect_text.zoo(entries)
  table = {'paper': paper_table, 'swin': swin_table, 'vpt': vpt_table}[args.table]
  rows = table.rows()
  return {'table': args.table, 'rows': rows}, table.render(rows)


def _recipe(args, assignments: list[str]) -> tuple[dict, str]:
  if args.tpu and (args.mesh or args.hbm is not None):
    given = '--mesh' if args.mesh else '--hbm'
    raise UserError(
      f'{given} goes without --tpu, which knows the memory of its devices; their mesh is '
      "the config's: --config.mesh.fsdp=4."
    )
  if args.hbm is not None and not args.mesh:
    raise UserError('--hbm goes with --mesh, such as --mesh data=8,fsdp=4.')
  if args.examples is not None and args.examples < 1:
    raise UserError('--examples 0: at least one image in an epoch.')
  if args.tpu:
    topology.prepare()
  config = recipe.load(args.config, assignments)
  record = {'config': args.config, **recipe.describe(config, args.examples)}
  text = recipe.render(record, args.config)
  if args.mesh:
    request = recipe.request(config, record, mesh.parse(args.mesh))
    record['memory'] = mesh.inspect(request, args.hbm)
    text += '\n\n' + inspect_text.mesh(record['memory'])
  if args.tpu:
    request = recipe.request(config, record, {})
    record['tpu'] = tpu.inspect(request, record, config['mesh'], args.tpu)
    text += '\n\n' + tpu.render(record['tpu'])
  return record, text


def _is_config(text: str) -> bool:
  name = text.partition(':')[0]
  return name.endswith('.py') or (name in recipes() and not source.is_source(text))


def _model_on_mesh(args) -> tuple[dict, str]:
  from vit_jax import check, models, optim, sharding

  axes = mesh.parse(args.mesh)
  name, variant, fields = models.parse_name(args.model)
  fields |= {'num_classes': args.classes, **arguments.fields(args)}
  if not fields['num_classes']:
    raise UserError('--mesh asks about training, which needs classes: not --classes 0.')
  models.build(name, variant, **fields)
  sharding.resolve_rules(args.sharding)
  section = arguments.optimizer(args.optim)
  check.bind('config.optim', section, optim.signature(section['name']))
  record = mesh.inspect(
    {
      'model': {'name': name, 'variant': variant, **fields},
      'task': {'name': 'classify'},
      'optim': section,
      'mesh': axes,
      'sharding': args.sharding,
      'batch': arguments.batch(args),
      'image': [*args.resolution, 3],
      'features': {'label': [[], 'int32']},
    },
    args.hbm,
  )
  record = {'model': args.model, 'resolution': list(args.resolution), **record}
  height, width = args.resolution
  text = f'{args.model} at {height}x{width} px, {record["params"]:,} parameters\n\n'
  return record, text + inspect_text.mesh(record)


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
    without; gflops forward per image (see `vit_jax.tools.inspect.flops`); exaflops of the training
    or None; memory in bytes: float32 params and gradients, two float32 Adam moments,
    activations (see `activations.saved_bytes`) and their total.

  Raises:
    UserError: for an unknown model or field, or a size that the patches do not tile.
  """
  import jax

  from vit_jax import models, trees
  from vit_jax.tools.inspect import flops
  from vit_jax.weights import adapt

  fields = dict(fields or {})
  if 'num_classes' in models.signature(model).parameters:  # else it has no head
    fields = {'num_classes': num_classes, **fields}
  module = models.build(model, **fields)
  forward, traced_params, images = activations.trace(module, (*resolution, 3))
  params = trees.flatten(traced_params)
  if getattr(module, 'scan', None) is False:  # it was traced as one block
    unstack = functools.partial(adapt.unstack, family=models.family_of(module))
    params = jax.eval_shape(unstack, params)
  operations, (_, out) = flops.count_and_shapes(forward, traced_params, images)
  each, constant = activations.per_image(
    lambda params, images: forward(params, images, train=True)[0],
    traced_params,
    jax.ShapeDtypeStruct(images.shape[1:], images.dtype),
  )
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
  return {
    'model': model,
    'fields': {key: str(value) for key, value in fields.items()},
    'resolution': list(resolution),
    'params': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'modules': _modules(params),
    'tokens': math.prod(out['tokens'].shape[1:-1]) if 'tokens' in out else None,
    'gflops': operations / 1e9,
    'examples': examples,
    'exaflops': None if examples is None else flops.exa_training(operations, examples),
    'memory': {
      'batch': batch,
      'params': size,
      'gradients': size,
      'optimizer': 2 * size,
      'activations': each * batch + constant,
      'total': 4 * size + each * batch + constant,
    },
  }


def _modules(params: dict) -> dict[str, int]:
  """Returns parameters per module, blocks that differ in their number as one."""
  paths = {name: name.split('/') for name in params}
  stacks = {path[0] for path in paths.values() if len(path) > 1 and 'block' in path[1]}
  sizes: dict[str, int] = {}
  members: dict[str, set] = {}
  for name, leaf in params.items():
    path = paths[name]
    module = '/'.join(path[: 2 if path[0] in stacks else 1])
    group = re.sub(r'([Bb]lock)_\d+$', r'\1_*', module)
    sizes[group] = sizes.get(group, 0) + leaf.size
    members.setdefault(group, set()).add(module)
  return {
    f'{group} (x{len(members[group])})' if len(members[group]) > 1 else group: size
    for group, size in sizes.items()
  }


if __name__ == '__main__':
  # Shapes alone are asked for: leave the accelerator to whoever trains on it.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  sys.exit(cli.run(main))
