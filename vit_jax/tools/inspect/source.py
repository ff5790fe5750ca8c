"""Describes the content of a file of weights, or of a run's folder."""

import math
import os
from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import models, trees, weights
from vit_jax.errors import UserError, printable
from vit_jax.train import status
from vit_jax.weights import readers, runs, steps, zoo

_NAMES = 5  # class names that the text shows
_INTERRUPTED = 'interrupted: no process is in its folder; a rerun resumes it'


def is_source(name: str) -> bool:
  """Returns whether a name stands for weights (path, URL or zoo name), not for a model."""
  return (
    os.path.exists(os.path.expanduser(name))
    or name in zoo.ENTRIES
    or '://' in name
    or name.startswith('hf:')
    or name.endswith(readers.SUFFIXES)
    or runs.find(name) is not None
  )


def describe(source: str, fields: dict) -> dict:
  """Describes the content of a source, as `vit_jax.load` takes it.

  Args:
    fields: fields of the model that the file does not give, such as its `num_heads`.

  Returns:
    The rows of `render`, params (their number) and shapes {name: shape}. Of a run also
    config, total_steps, steps [{step, metrics}], metric, best, the step read, and trained,
    the number of parameters that it stores.
  """
  if (run := runs.find(source)) is None:
    return _describe_file(source, fields)
  if fields:
    raise UserError(
      f'{source} is a run, whose config names the model: leave out --set.'
    )
  return _describe_run(source, *run)


def _describe_file(source: str, fields: dict) -> dict:
  header = weights.read_header(source, **fields)
  shapes = {n: list(x) for n, x in header.shapes.items() if not trees.is_statistic(n)}
  plain = (str, int, float, bool, list, tuple, type(None))  # Types that JSON can hold.
  return {
    'source': source,
    'format': header.format,
    'model': header.family,
    'fields': {
      k: v if isinstance(v, plain) else str(v) for k, v in header.fields.items()
    },
    'image_size': header.image_size and list(header.image_size),
    'channels': header.channels,
    'class_names': header.class_names,
    'pp': header.pp,
    'params': _count(shapes),
    'shapes': shapes,
    'unused': header.unused,
  }


def _describe_run(source: str, folder: Path, choice: str | None) -> dict:
  config = config_lib.read(folder)
  saved = steps.Steps(folder, config)
  step = saved.choose(source, choice)
  if step is None:  # the newest step that is whole
    step = next((s for s in reversed(saved.steps) if saved.shapes(s)), None)
  shapes = (step is not None and saved.shapes(step)) or {}
  stored = {n: shape for n, (shape, is_stored) in shapes.items() if is_stored}
  shapes = {name: shape for name, (shape, _) in shapes.items()}
  *size, channels = config['resolved']['image_shape']
  fields = dict(config['model'])
  return {
    'source': source,
    'format': 'run',
    'model': fields.pop('name'),
    'fields': fields,
    'image_size': size,
    'channels': channels,
    'class_names': config['resolved'].get('class_names'),
    'pp': runs.read_pipeline(config),
    'params': _count(shapes),
    'trained': _count(stored),
    'shapes': shapes,
    'state': status.state(folder),
    'total_steps': config['resolved']['total_steps'],
    'steps': [{'step': s, 'metrics': saved.metrics[s]} for s in saved.steps],
    'metric': saved.metric,
    'best': saved.best,
    'step': step,
    'config': config,
  }


def render(record: dict) -> str:
  """Returns the record of `describe` as text."""
  lines = [f'{record["source"]}: {record["format"]} {record["model"]}', '']
  size, names = record['image_size'], record['class_names'] or []
  facts = {
    'fields': _pairs(record['fields']),
    'images': f'{f"{size[0]}x{size[1]}" if size else "unknown"} px, channels: '
    f'{record["channels"]}',
    'classes': names and printable(f'{len(names)}: {", ".join(names[:_NAMES])}'),
    'pp': record['pp'],
    'parameters': f'{record["params"]:,}',
    'unused': ', '.join(record.get('unused', [])),
  }
  if record['format'] == 'run':
    facts |= _run_facts(record)
  lines += [f'  {k:<12}{printable(x, chr(10))}' for k, x in facts.items() if x]
  if record['shapes']:
    rows = _group_blocks(record['model'], record['shapes'])
    width = max(len(name) for name, _ in rows)
    lines += ['', *(f'  {name:<{width}}  {shape}' for name, shape in rows)]
  return '\n'.join(lines)


def _pairs(section: dict) -> str:
  return ', '.join(f'{key}={value}' for key, value in section.items())


def _run_facts(record: dict) -> dict:
  config, metric, checkpoints = record['config'], record['metric'], []
  for row in record['steps']:
    text = f'{row["step"]:,}'
    if row['metrics'] is None:
      text += ' (damaged)'
    elif metric in row['metrics']:
      best = ', the best' * (row['step'] == record['best'])
      text += f' ({metric} {row["metrics"][metric]:.4g}{best})'
    checkpoints.append(text)
  facts = {
    'data': f'{config["data"]["source"]}, {config["data"].get("split", "")}',
    'optim': _pairs(config.get('optim', {})),
    'tune': _pairs(config.get('tune', {})),
    'state': _INTERRUPTED if record['state'] == 'interrupted' else record['state'],
    'steps': f'{record["total_steps"]:,}',
    'checkpoints': ', '.join(checkpoints) or 'none',
    'read': None if record['step'] is None else f'step {record["step"]:,}',
  }
  if teacher := config.get('task', {}).get('teacher'):
    facts['teacher'] = teacher['source']
  if record['trained'] != record['params']:
    source = config['weights'].get('source')
    facts['trained'] = f'{record["trained"]:,}; the others are those of {source}'
  return facts


def _group_blocks(model: str, shapes: dict) -> list[tuple[str, str]]:
  """Returns rows (name, shape). Blocks that differ only in their number share a row."""
  family, rows = models.family(model), {}
  for name, shape in shapes.items():
    stacked = family.stacked(name)
    key = (stacked[0] if stacked else name, tuple(shape))
    rows.setdefault(key, []).append(name)
  times = lambda names: f' x{len(names)}' if len(names) > 1 else ''
  return [(names[0], f'{shape}{times(names)}') for (_, shape), names in rows.items()]


def _count(shapes: dict) -> int:
  return sum(math.prod(shape) for shape in shapes.values())
