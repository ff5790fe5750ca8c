"""Computes steps, epochs, compute and memory of a config's training, without its data.

The number of training examples is an argument; only bundled sources are opened.
"""

import math
import os

import jax

from vit_jax import check, models, optim, sharding, tasks
from vit_jax import config as config_lib
from vit_jax.data import pipeline, sources
from vit_jax.data.features import ImageFeature, LabelFeature, TextFeature, own_classes
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.registry import Registry
from vit_jax.tools.inspect.model import cost
from vit_jax.train import flops, runtime, schema
from vit_jax.train.trainer import Trainer
from vit_jax.weights import complete, from_section, lacks_backbone, zoo

# Features of an example whose data is not opened, by the kind of a task's outputs.
_FEATURES = Registry('features of outputs', {})
_FREE = ('digits', 'digits_canvas', 'shapes', 'synthetic')  # sources that open quickly


def load(spec: str, assignments: list[str]) -> dict:
  """Returns the checked config of 'NAME[:ARGS]' or 'FILE.py[:ARGS]'.

  If the config leaves the model to its weights, the model is looked up by their name in the
  zoo, or read from their local file. Nothing is downloaded.

  Args:
    assignments: 'optim.lr=3e-4', as after `--config.` on the command line.
  """
  config = config_lib.load(spec)
  config_lib.override(config, assignments)
  return schema.check({**config, 'model': _model(config)})


def _model(config: dict) -> dict:
  """Returns the section `model`, with a name from the weights if it has none."""
  check.check('config.model', model := config.get('model', {}), dict)
  weights = config.get('weights')
  if not weights or not weights.get('source'):
    return model
  if 'name' in model and not lacks_backbone(model):
    return model
  check.bind('config.weights', weights, from_section)
  if entry := zoo.ENTRIES.get(weights['source']):
    name, variant, fields = models.parse_name(entry.model)
    named = {'name': name, 'variant': variant, **fields}
    return {**model, 'backbone': named} if 'name' in model else {**named, **model}
  if os.path.exists(os.path.expanduser(weights['source'])):
    return complete(model, from_section(**weights))
  raise UserError(
    f'config.weights.source={weights["source"]!r} is not a local file, so the model is '
    'unknown: name it with --config.model.name=vit --config.model.variant=B/16.'
  )


def describe(config: dict, examples: int | None = None) -> dict:
  """Describes the training of a checked config.

  Args:
    examples: images of one epoch; None: as many as the source has, if it opens quickly.

  Returns:
    The numbers that `render` prints. classes is None if it is unknown; the sums then lack
    the head. They always lack `beside`, the parameters that the task adds. features is
    {name: [shape, dtype]} of an example, except its image.
  """
  data, model = config['data'], dict(config['model'])
  source = open_bundled(data)
  epoch, classes = _size(config, source, examples)
  batch = data['batch_size']
  check.check('config.data.batch_size', batch, check.Count)
  steps = config_lib.total_steps(config, epoch or 0, batch)
  with check.prefix_errors('config.optim'):  # A schedule may reject so few steps.
    optim.build(**config['optim'], total_steps=steps, family=models.family(**model))
  _, spec = trace(config, source)
  *resolution, channels = spec['image'].shape[-3:]
  size = cost({'num_classes': classes, **model}, (*resolution, channels))
  name, variant = model.pop('name'), model.pop('variant', None)
  classes = model.pop('num_classes', classes)
  return {
    'model': f'{name}:{variant}' if variant else name,
    'fields': {key: str(value) for key, value in model.items()},
    'resolution': resolution,
    'channels': channels,
    'classes': classes,
    'params': size.parameters,
    'gflops': size.operations / 1e9,
    'source': data['source'],
    'split': data['split'],
    'train_examples': epoch,
    'batch_size': batch,
    'steps': steps,
    'epochs': steps * batch / epoch if epoch else None,
    'examples': steps * batch,
    'exaflops': flops.exa_training(size.operations, steps * batch),
    'tune': config['tune']['method'],
    'beside': tasks.class_of(config).OWN,
    'features': {
      name: [list(x.shape[1:]), str(x.dtype)]
      for name, x in spec.items()
      if name not in ('image', 'mask', 'index')
    },
  }


def trainer(config: dict, record: dict, mesh) -> Trainer:
  """Returns the `Trainer` of a checked config on a mesh, from shapes alone.

  Args:
    mesh: its devices may be fake, or descriptions as in `tpu.devices`.
  """
  if tasks.class_of(config).CLASSES and record['classes'] is None:
    raise UserError(
      f'The number of classes of {record["source"]!r} is unknown: pass '
      '--config.model.num_classes=K.'
    )
  schema.check_batch_size(config, mesh)
  preprocess, spec = trace(config, open_bundled(config['data']))
  model = {**config['model'], 'num_classes': record['classes']}
  section = {**config, 'model': model, 'steps': record['steps']}
  return Trainer(section, spec, mesh, preprocess.finish)


def memory(config: dict, record: dict, axes: dict[str, int]) -> dict:
  """Compiles the step for fake CPU devices on a mesh such as {'data': 8, 'fsdp': 4}.

  Returns:
    mesh, devices, and bytes of a device as XLA plans them: see `runtime.memory`.
  """
  devices = math.prod(axes.values())
  mesh = sharding.make_mesh(**{'data': 1, **axes}, devices=jax.devices()[:devices])
  with jax.set_mesh(mesh):
    # Skip LLVM's optimisations, which take half of the time and come after memory is planned.
    options = sharding.compiler_options() | {'xla_backend_optimization_level': '0'}
    program = trainer(config, record, mesh).lower().compile(options)
  return {'mesh': dict(mesh.shape), 'devices': devices, **runtime.memory(program)}


def render_memory(record: dict) -> str:
  """Returns the record of `memory` as text."""
  gib = lambda key: f'{record[key] / 2**30:.2f} GiB'
  axes = ', '.join(f'{k}={v}' for k, v in record['mesh'].items() if v > 1) or 'data=1'
  return (
    f'  Each of {record["devices"]} devices ({axes}) needs {gib("bytes")}: state and batch '
    f'{gib("argument_bytes")}, temporaries {gib("temp_bytes")}.\n'
    '  An accelerator needs down to half of these temporaries in bfloat16.'
  )


class _Closed(Source):
  """A source in place of data that is not opened. It has features, but no examples."""

  def __init__(self, config: dict):
    self.name, outputs = str(config['data']['source']), tasks.class_of(config).OUTPUTS
    features = {'label': LabelFeature(), 'text': TextFeature()}
    if outputs in _FEATURES:
      features = _FEATURES[outputs]
    self.features = {'image': ImageFeature(), **features}

  def __len__(self) -> int:
    return 0

  def read(self, indices) -> list[dict]:
    return []


def open_bundled(data: dict) -> Source | None:
  """Returns the source of a section `data` if it opens quickly, else None."""
  if str(data['source']).partition(':')[0] not in _FREE:
    return None
  options = data.get('source_options') or {}
  classes = data.get('classes')
  return sources.build(data['source'], data['split'], classes=classes, **options)


def trace(config: dict, source: Source | None) -> tuple[Preprocess, dict]:
  """Returns (the pipeline of a training, the spec of its batches): see `trace_batch`.

  Args:
    source: the result of `open_bundled`. None: the features are those of the task.
  """
  data, source = config['data'], _Closed(config) if source is None else source
  with check.prefix_errors(f'pp {data["pp"]!r}'):
    preprocess = Preprocess(data['pp'], source, source.num_classes or 1)
  return preprocess, pipeline.trace_batch(preprocess, data['batch_size'])


def _size(config, source, examples) -> tuple[int | None, int | None]:
  """Returns (examples of an epoch, classes for the head), None where unknown."""
  data = config['data']
  classes = len(data['classes']) if data.get('classes') else None
  if source is not None:
    own = own_classes(source.features, tasks.class_of(config).CLASSES or 'label')
    examples, classes = examples or len(source), len(own) if own else source.num_classes
  elif examples is None and config.get('epochs') is not None:
    raise UserError(
      f'The size of an epoch of {data["source"]!r} is unknown: pass --examples N.'
    )
  return examples, classes if tasks.class_of(config).CLASSES else None


def render(record: dict, spec: str) -> str:
  """Returns the record of `describe` as text."""
  height, width = record['resolution']
  # A task with parts of its own may see several crops, or run the model twice.
  counted = ' of the model alone, once an image' if record['beside'] else ''
  epoch = record['train_examples']
  rows = {
    'model': f'{record["model"]} at {height}x{width} px',
    'parameters': f'{record["params"]:,}',
    'data': f'{record["source"]}, {record["split"]}',
    'examples of an epoch': f'{epoch:,}' if epoch else 'unknown (--examples)',
    'batch size': f'{record["batch_size"]:,}',
    'steps': f'{record["steps"]:,}',
    'epochs': f'{record["epochs"]:.4g}' if epoch else 'unknown',
    'examples': f'{record["examples"]:,}',
    'forward, per image': f'{record["gflops"]:.4g} GFLOPs',
    'whole training': f'{record["exaflops"]:.4g} exaFLOPs (3 x forward{counted})',
  }
  if record['tune'] != 'full':
    rows['tune'] = f'{record["tune"]}: fewer exaFLOPs than that'
  if record['beside']:
    rows['not counted'] = (
      f'what the task {record["beside"]} adds to the model, or leaves out of an image'
    )
  elif record['classes'] is None:
    rows['not counted'] = 'the head: --config.model.num_classes=K'
  return '\n'.join([spec, '', *(f'  {label:<22}{x}' for label, x in rows.items())])
