"""Parameters and operations of a model, from its shapes."""

import functools
import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

from vit_jax import models, trees
from vit_jax.train import flops
from vit_jax.weights import adapt
from vit_jax.weights import zoo as weights_zoo


class Cost(NamedTuple):
  """The number of parameters, and of operations in the forward pass of one image."""

  parameters: int
  operations: int


def cost(section: dict, image_shape: Sequence[int]) -> Cost:
  """Computes the cost of a config's section `model`, with `num_classes`; nothing runs.

  Args:
    image_shape: [H, W, C].
  """
  return _cost(json.dumps(section, sort_keys=True), *image_shape)


# Cached, because runs of an experiment often share their model.
@functools.cache
def _cost(section: str, *shape: int) -> Cost:
  forward, variables, images = _trace(models.build(**json.loads(section)), shape)
  size = sum(x.size for x in jax.tree.leaves(variables['params']))
  return Cost(size, flops.count(forward, variables, images))


def _trace(module, shape: tuple[int, ...]) -> tuple:
  """Returns (forward, variables, a batch of one image), the last two as shapes.

  If the model can be scanned, `forward` and `variables` are those of the scanned model. It
  has the same products, but is traced as one block.
  """
  module = module.clone(scan=True) if hasattr(module, 'scan') else module
  images = jax.ShapeDtypeStruct((1, *shape), 'float32')
  return module.apply, module.shapes(shape), images


def describe(
  name: str,
  resolution: tuple[int, int] = (224, 224),
  num_classes: int | None = 1000,
  fields: dict | None = None,
  examples: float | None = None,
) -> dict:
  """Describes the model of a name such as 'vit:B/16', or of a published name.

  Args:
    fields: more fields of the model, such as `{'classifier': 'map'}`.
    examples: images of a whole training (epochs x data set size), or None.

  Returns:
    params; modules, {name: parameters}; tokens that the blocks see, None for models
    without; gflops, forward per image (see `flops`); exaflops of the training or None.
  """
  fields = dict(fields or {})
  # Only models with a head have this field.
  if 'num_classes' in models.signature(name).parameters:
    fields = {'num_classes': num_classes, **fields}
  module = models.build(name, **fields)
  forward, variables, images = _trace(module, (*resolution, 3))
  params = trees.flatten(variables['params'])
  # The model was traced with stacked blocks: separate them.
  if getattr(module, 'scan', None) is False:
    unstack = functools.partial(adapt.unstack, family=module.family)
    params = jax.eval_shape(unstack, params)
  operations = flops.count(forward, variables, images)
  _, out = jax.eval_shape(forward, variables, images)
  return {
    'model': name,
    'fields': {key: str(value) for key, value in fields.items()},
    'resolution': list(resolution),
    'params': sum(leaf.size for leaf in params.values()),
    'modules': _modules(params),
    'tokens': math.prod(out['tokens'].shape[1:-1]) if 'tokens' in out else None,
    'gflops': operations / 1e9,
    'examples': examples,
    'exaflops': None if examples is None else flops.exa_training(operations, examples),
  }


def _modules(params: dict) -> dict[str, int]:
  """Returns {module: number of parameters}, with all blocks of a kind as one module."""
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


def render(record: dict) -> str:
  """Returns the record of `describe` as text."""
  height, width = record['resolution']
  lines = [f'{record["model"]} at {height}x{width} px', '']
  lines += [f'  {name:<34}{size:>15,}' for name, size in record['modules'].items()]
  lines += [f'  {"parameters":<34}{record["params"]:>15,}', '']
  if record['tokens']:
    lines.append(f'  {"tokens per image":<34}{record["tokens"]:>15,}')
  lines.append(f'  {"GFLOPs forward, multiply-add = 2":<34}{record["gflops"]:>15.2f}')
  if record['exaflops'] is not None:
    label = f'exaFLOPs of {record["examples"]:.3g} images, x 3'
    lines.append(f'  {label:<34}{record["exaflops"]:>15.4g}')
  return '\n'.join(lines)


def zoo() -> tuple[dict, str]:
  """Returns the published weights as (record, text)."""
  entries = list(weights_zoo.ENTRIES.values())
  rows = [('name', 'model', 'px', 'classes', 'data', 'format', 'licence')]
  for e in entries:
    classes = str(e.classes or 'none')
    row = e.name, e.model, str(e.resolution), classes, e.data, e.format
    rows.append((*row, e.licence or 'not stated'))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  cells = lambda row: (c.ljust(w) for c, w in zip(row, widths, strict=True))
  lines = ['  '.join(cells(row)).rstrip() for row in rows]
  lines += ['', "Google's: pixels in [-1, 1]. Classes none: the published head is 0."]
  return {'zoo': [entry._asdict() for entry in entries]}, '\n'.join(lines)
