"""The teacher of a run: its section in the config, and its arrays. See `tasks.distill`."""

import numpy as np

from vit_jax import models, tasks, weights
from vit_jax.check import prefix_errors
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match
from vit_jax.tasks.distill import TEACHER
from vit_jax.weights import pipelines

_WHERE = 'config.task.teacher'


def complete(config: dict, older: dict | None) -> dict:
  """Puts a section about the teacher in the place of its source, see `distill.Teacher`.

  Args:
    config: the config of a run, with the classes and the image shape of its data.
    older: the config of the run that is resumed, whose section is taken.

  Raises:
    UserError: for a teacher with other classes, or whose images cannot be computed from those
      of the student.
  """
  if 'teacher' not in config['task']:
    return config
  source = config['task']['teacher']
  if older:
    section = older['task'].get('teacher')
    section = {**section, 'source': source} if section else source
    classes = older['model']['num_classes'], older['resolved']['class_names']
  else:
    with prefix_errors(_WHERE):
      header = weights.read_header(source)
      section = {'source': source, **_describe(header, config)}
    classes = header.fields.get('num_classes'), header.class_names
  config = config | {'task': config['task'] | {'teacher': section}}
  if config['model']['num_classes'] is not None or not tasks.class_of(config).CLASSES:
    return config
  # The images have no labels.
  number, names = classes
  return config | {
    'model': config['model'] | {'num_classes': number},
    'resolved': config['resolved'] | {'class_names': names},
  }


def _describe(header: weights.Header, config: dict) -> dict:
  *_, channels = config['resolved']['image_shape']
  if channels != header.channels:
    raise UserError(
      f'{header.source} takes {header.channels}-channel images, but config.data.pp gives '
      f'{channels}.'
    )
  models.build(header.family, **header.fields).check_outputs('classes', header.source)
  if tasks.class_of(config).CLASSES:
    _check_classes(header, config)
  size = header.usual_size()
  levels = []
  for pp in (config['data']['pp'], pipelines.build(header, size)):
    if (pair := pipelines.read_levels(pp)) is None:
      raise UserError(
        f'The pixels that {header.source} takes cannot be computed: {pp!r} has no '
        'value_range(lo, hi).'
      )
    levels.append(np.array(pair))
  (mean, std), (own_mean, own_std) = levels
  of_channels = lambda x: x[:channels].tolist()
  return {
    'model': {'name': header.family, **header.fields},
    'image_size': list(size),
    'scale': of_channels(std / own_std),
    'shift': of_channels((mean - own_mean) / own_std),
  }


def _check_classes(header: weights.Header, config: dict) -> None:
  """Raises UserError unless the teacher has the classes of the student."""
  number, own = config['model']['num_classes'], header.fields.get('num_classes')
  if own is None:
    raise UserError(
      f'{header.source} has no classes: fine-tune it on such data first, or learn its '
      'features with config.task.name=distill_features.'
    )
  if number is None:
    return
  names, theirs = config['resolved']['class_names'], header.class_names
  pairs = list(zip(*map(class_match.ids, (names or [], theirs or [])), strict=False))
  if number != own:
    why = f'it has {own} classes, and the data has {number}'
  elif wrong := [pair for pair in pairs if pair[0] != pair[1]]:
    why = f'class {pairs.index(wrong[0])} is {wrong[0][1]!r}, and {wrong[0][0]!r} in the data'
  else:
    return
  raise UserError(
    f'{header.source}: {why}: a teacher has the same classes in the same order. Fine-tune it '
    'on such data first.'
  )


def read(trainer, config: dict) -> dict[str, np.ndarray]:
  """Returns {name: array} of the teacher's variables, {} for a run without a teacher."""
  if not (section := config['task'].get('teacher')):
    return {}
  with prefix_errors(_WHERE):
    header = weights.read_header(section['source'])
    size = tuple(section['image_size'])
    flat, _ = weights.fit_section(header, {}, trainer.task.teacher.model, size)
  return {f'{TEACHER}/{name}': x for name, x in flat.items()}
