"""What a config asks for: steps, epochs, examples and compute, without opening its data.

The number of training examples comes from the caller or from `split_sizes`; only the
bundled sources are opened.
"""

import os

from vit_jax.check import reported
from vit_jax.errors import UserError


def load(spec: str, assignments: list[str]) -> dict:
  """Returns the checked config of 'NAME[:ARGS]' or 'FILE.py[:ARGS]'.

  Where the weights name the model, it is looked up by their name in the zoo, or read
  from them where they are a path; nothing is downloaded.

  Args:
    assignments: 'optim.lr=3e-4', as after `--config.` on the command line.

  Raises:
    UserError: as a run would, for anything in the config.
  """
  from vit_jax import config as config_lib
  from vit_jax.train import schema

  config = config_lib.load(spec)
  config_lib.override(config, assignments)
  return schema.check({**config, 'model': _model(config)})


def _model(config: dict) -> dict:
  """Returns the section `model`, its name filled in by the weights."""
  from vit_jax import check, models
  from vit_jax import config as config_lib
  from vit_jax.weights import complete, from_section, zoo

  model = config_lib.section({'model': {}, **config}, 'model')
  weights = config.get('weights')
  if not weights or 'name' in model or not weights.get('source'):
    return model
  check.bind('config.weights', weights, from_section)
  if entry := zoo.find(weights['source']):
    name, variant, fields = models.parse_name(entry.model)
    return {'name': name, 'variant': variant, **fields, **model}
  if os.path.exists(os.path.expanduser(weights['source'])):
    return complete(model, from_section(**weights))
  raise UserError(
    f'config.weights.source={weights["source"]!r} is neither a path nor a name of the zoo '
    'here, so that the model is not known: say it, --config.model.name=vit '
    '--config.model.variant=B/16.'
  )


def describe(config: dict, examples: int | None = None) -> dict:
  """Returns the sums of a checked config's training.

  Args:
    examples: of one epoch; None: of the split as `split_sizes` knows it.

  Returns:
    model, fields, resolution [H, W], channels; classes, or None where neither the
    config nor the table tell (the head is then left out of all sums); params, gflops
    (forward, per image); source, split, train_examples or None; batch_size, steps,
    epochs or None, examples (seen, steps x batch_size), exaflops of the training, as
    if all parameters were trained, tune: the method that says which are, beside: the
    task's own part of the parameters, which is in none of the sums, or None, and
    features: {name: [shape, dtype]} of what an example has besides its image.

  Raises:
    UserError: where the number of steps hangs on an unknown number of examples, the
      size of the images cannot be told from `pp`, or the optimizer refuses.
  """
  import jax

  from vit_jax import check, models, optim, tasks
  from vit_jax import config as config_lib
  from vit_jax.tools.inspect import activations, flops

  data, model = config['data'], dict(config['model'])
  source = opened(data)
  train_examples, classes = _known(config, data, source, examples)
  classes = classes if tasks.classifies(config) else None
  batch = data['batch_size']
  check.check('config.data.batch_size', batch, check.Count)
  steps = config_lib.total_steps(config, train_examples or 0, batch)
  family = models.family(**model)
  # A schedule may refuse so few steps.
  with reported('config.optim'):
    optim.build(**config['optim'], total_steps=steps, family=family)
  *resolution, channels = image_shape(data['pp'], source)
  fields = {'num_classes': classes, **model}
  forward, params, images = activations.trace(
    models.build(**fields), (*resolution, channels)
  )
  operations = flops.count(forward, params, images)
  name, variant = model.pop('name'), model.pop('variant', None)
  classes = model.pop('num_classes', classes)
  return {
    'model': f'{name}:{variant}' if variant else name,
    'fields': {key: str(value) for key, value in model.items()},
    'resolution': resolution,
    'channels': channels,
    'classes': classes,
    'params': sum(x.size for x in jax.tree.leaves(params)),
    'gflops': operations / 1e9,
    'source': data['source'],
    'split': data['split'],
    'train_examples': train_examples,
    'batch_size': batch,
    'steps': steps,
    'epochs': steps * batch / train_examples if train_examples else None,
    'examples': steps * batch,
    'exaflops': flops.exa_training(operations, steps * batch),
    'tune': config['tune']['method'],
    'beside': tasks.own(config),
    'features': _features(config, source, resolution, classes),
  }


def request(config: dict, record: dict, mesh: dict[str, int]) -> dict:
  """Returns the question to `tools.mesh` of a config and what `describe` says of it."""
  from vit_jax import tasks

  if tasks.classifies(config) and record['classes'] is None:
    raise UserError(
      f'The classes of {record["source"]!r} are not known here: name data that is there, if '
      'the config takes data=..., or set --config.model.num_classes=K.'
    )
  return {
    'model': {**config['model'], 'num_classes': record['classes']},
    'tune': config['tune'],
    'task': config['task'],
    'optim': config['optim'],
    'mesh': mesh,
    'sharding': config['sharding'],
    'batch': record['batch_size'],
    'image': [*record['resolution'], record['channels']],
    'features': record['features'],
  }


def _features(config: dict, source, size: list[int], classes) -> dict[str, list]:
  """Returns {name: [shape, dtype]} of what an example has besides its image.

  No op resizes what else a source declares, so that its shape is the batch's.

  Args:
    source: as `opened` returns it. None: there are objects, if the task is to find them,
      else a label.
    size: [H, W] of the images.
    classes: their number, or None.
  """
  from vit_jax import tasks
  from vit_jax.data.features import Feature, LabelFeature
  from vit_jax.data.ops import registry
  from vit_jax.detection.data import objects

  ops = registry.parse(config['data']['pp'])
  if source is not None:
    declared = source.features
  elif tasks.outputs(config) == 'boxes':
    declared = objects.BOXES
  else:
    declared = {'label': LabelFeature()}
  lengths = {}
  for op in ops:
    lengths |= op.apply.lengths if op.name == 'pad_to' else {}
  found = {}
  for name, feature in declared.items():
    if isinstance(feature, LabelFeature):
      one_hot = tasks.classifies(config) and any(op.kind == 'label' for op in ops)
      found[name] = [[classes], 'float32'] if one_hot else [[], 'int32']
    elif isinstance(feature, Feature) and not feature.ragged:
      found[name] = [list(feature.shape), feature.dtype]
    elif isinstance(feature, Feature) and name in lengths:  # else the task will refuse
      found[name] = [[lengths[name], *feature.shape[1:]], feature.dtype]
      found[f'{name}_mask'] = [[lengths[name]], 'float32']
  if any(op.name == 'canvas' for op in ops):
    found['image_mask'] = [list(size), 'uint8']
  return found


def opened(data: dict):
  """Returns the source where to open it costs nothing, else None."""
  from vit_jax.data import sources

  name = str(data['source']).partition(':')[0]  # of a mixture: none of these
  if name not in ('digits', 'digits_canvas', 'shapes', 'synthetic'):
    return None
  options = data.get('source_options') or {}
  classes = data.get('classes')
  return sources.build(data['source'], data['split'], classes=classes, **options)


def _known(config, data, opened, examples) -> tuple[int | None, int | None]:
  """Returns (examples of an epoch, classes), each None if not known."""
  from vit_jax import tasks
  from vit_jax.data.features import own_classes
  from vit_jax.tools.inspect import split_sizes

  if opened is not None:
    own = own_classes(opened.features, tasks.classes(config) or 'label')
    return examples or len(opened), len(own) if own else opened.num_classes
  found = split_sizes.find(data['source'])
  classes = found.classes if found else None
  if chosen := data.get('classes'):  # how many examples those have, no table knows
    if examples is None and config.get('epochs') is not None:
      raise UserError(
        f'How many examples of config.data.classes={chosen} {data["source"]!r} has is not '
        'known without opening it: pass --examples N, the number of one epoch.'
      )
    return examples, len(chosen)
  if examples is None and (found or config.get('epochs') is not None):
    examples = split_sizes.count(data['source'], data['split'])
  return examples, classes


def image_shape(pp: str, source=None) -> tuple[int, int, int]:
  """Returns [H, W, C] of the images that a pipeline makes, from its text.

  Args:
    source: a `data.base.Source` whose images have a shape, where one is open.

  Raises:
    UserError: if no op gives the images one size.
  """
  from vit_jax.data.ops import arguments, registry

  shape = getattr(source, 'image_shape', None)
  size, channels = (shape[:2], shape[2]) if shape else (None, 3)
  for op in registry.parse(pp):
    given = op.arguments
    if 'size' in given:
      size = arguments.size_pair(given['size'])
    elif 'smaller_size' in given:  # the other side follows the image's
      size = None
    elif 'pixels' in given and size is not None:  # trim
      size = tuple(side - 2 * given['pixels'] for side in size)
    channels = given.get('channels', channels)
  if size is None:
    raise UserError(
      f'pp {pp!r} leaves the size of the images open: add resize(size) or a crop.'
    )
  return (*size, channels)


def render(record: dict, spec: str) -> str:
  """Returns the record of `describe` as text."""
  height, width = record['resolution']
  known = record['train_examples']
  rows = [
    ('model', f'{record["model"]} at {height}x{width} px'),
    ('parameters', f'{record["params"]:,}'),
    ('data', f'{record["source"]}, {record["split"]}'),
    ('examples of an epoch', f'{known:,}' if known else 'not known (--examples)'),
    ('batch size', f'{record["batch_size"]:,}'),
    ('steps', f'{record["steps"]:,}'),
    ('epochs', f'{record["epochs"]:.4g}' if known else 'not known'),
    ('examples', f'{record["examples"]:,}'),
    ('forward, per image', f'{record["gflops"]:.4g} GFLOPs'),
    ('whole training', f'{record["exaflops"]:.4g} exaFLOPs (3 x forward)'),
  ]
  if record['tune'] != 'full':
    rows.append(('', f'less with tune.method={record["tune"]}'))
  lines = [spec, ''] + [f'  {label:<22}{value}' for label, value in rows]
  if record['beside']:
    lines += [
      '',
      f'  What the task {record["beside"]} adds to the model is not counted.',
    ]
  elif record['classes'] is None:
    lines += ['', '  The classes are not known: the head is not counted.']
    lines[-1] += ' --config.model.num_classes=K'
  return '\n'.join(lines)
