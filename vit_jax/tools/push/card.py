"""The model card, README.md of a model on the hub, made from facts about its source."""

import json
import re
from typing import Any, NamedTuple

from vit_jax.weights.published import Licence

UNKNOWN = 'unknown'  # an identifier of the hub's list
_LIBRARIES = {'timm': 'timm', 'hf': 'transformers', 'google': 'vit_jax'}


class Facts(NamedTuple):
  """What a card is made from.

  Attributes:
    repo: OWNER/NAME.
    format: of the files, 'timm', 'hf' or 'google'.
    model: family and size, 'vit:B/16', or the family alone.
    params: the number of parameters.
    image_size: (H, W) in pixels.
    pp: the evaluation pipeline.
    classes: the number of classes, None without a head.
    class_names: one per class, or None.
    licence: of the weights that it started from.
    asked: the licence that the user named instead, or None.
    base: OWNER/NAME on the hub that it was fine-tuned from, or None.
    config: of the run, as it was resolved; None for weights that no run here made.
    step: of the run.
    metrics: {name: number}, results of the evaluations after that step.
    percent: names of `metrics` that are fractions.
  """

  repo: str
  format: str
  model: str
  params: int
  image_size: tuple[int, int]
  pp: str
  classes: int | None
  class_names: list[str] | None
  licence: Licence
  asked: str | None
  base: str | None
  config: dict | None
  step: int | None
  metrics: dict[str, float]
  percent: set[str]


def text(facts: Facts) -> str:
  """Returns the card, Markdown that begins with the hub's metadata in YAML."""
  # JSON is valid YAML.
  front = [f'{key}: {json.dumps(value)}' for key, value in _metadata(facts).items()]
  parts = [
    '\n'.join(['---', *front, '---']),
    f'# {facts.repo.rpartition("/")[2]}',
    _about(facts),
    '## How to use it',
    _use(facts),
    *_results(facts),
    *_training(facts),
    '## Licence',
    _licence(facts),
  ]
  return '\n\n'.join(parts) + '\n'


def _metadata(facts: Facts) -> dict[str, Any]:
  task = 'image-feature-extraction' if facts.classes is None else 'image-classification'
  found = {
    'license': facts.asked or facts.licence.name or UNKNOWN,
    'library_name': _LIBRARIES[facts.format],
    'pipeline_tag': task,
    'tags': ['vit_jax', 'jax', facts.model.split(':')[0], task],
  }
  if facts.base:
    found['base_model'] = facts.base
  dataset = _dataset(facts)
  if dataset:
    found['datasets'] = [dataset]
  if scores := {k: v for k, v in facts.metrics.items() if k.endswith('/top1')}:
    found['metrics'] = ['accuracy']
    measured = [
      {'type': 'accuracy', 'value': round(value, 6), 'name': name}
      for name, value in scores.items()
    ]
    result = {'task': {'type': task}, 'metrics': measured}
    result['dataset'] = {'name': dataset or 'private data', 'type': dataset or 'other'}
    found['model-index'] = [{'name': facts.repo.partition('/')[2], 'results': [result]}]
  return found


def _dataset(facts: Facts) -> str | None:
  """Returns the hub's name of the training data; None for data of the user's own."""
  source = (facts.config or {}).get('data', {}).get('source')
  if not isinstance(source, str) or not source.startswith('tfds:'):
    return None
  name = re.split('[/:]', source.removeprefix('tfds:'))[0]
  return {'imagenet2012': 'imagenet-1k'}.get(name, name)


def _about(facts: Facts) -> str:
  height, width = facts.image_size
  head = 'no head: it gives features' if facts.classes is None else ''
  head = head or f'{facts.classes:,} classes'
  origin = f', from {_shown(facts.licence.origin)}' if facts.licence.origin else ''
  step = f', step {facts.step:,} of its run' if facts.step is not None else ''
  names = ''
  if facts.class_names:
    first = ', '.join(facts.class_names[:10])
    names = f'\n\nClasses: {first}{", ..." if len(facts.class_names) > 10 else "."}'
  return (
    f'`{facts.model}` with {facts.params:,} parameters, for images of {height} x {width} '
    f'pixels, {head}{origin}{step}. Made with vit_jax.{names}'
  )


def _use(facts: Facts) -> str:
  blocks = [
    'import vit_jax\n\n'
    f"loaded = vit_jax.load('hf:{facts.repo}')\n"
    "images = loaded.preprocess(['photo.jpg'])\n"
    'logits, features = loaded.model.apply(loaded.variables, images)'
  ]
  if facts.format == 'timm':
    blocks.append(
      f"import timm\n\nmodel = timm.create_model('hf-hub:{facts.repo}', pretrained=True)\n"
      'transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))'
    )
  if facts.format == 'hf':
    kind = 'AutoModel' if facts.classes is None else 'AutoModelForImageClassification'
    blocks.append(
      f'from transformers import AutoImageProcessor, {kind}\n\n'
      f"processor = AutoImageProcessor.from_pretrained('{facts.repo}')\n"
      f"model = {kind}.from_pretrained('{facts.repo}')"
    )
  code = [f'```python\n{block}\n```' for block in blocks]
  return '\n\n'.join([*code, f'Images are prepared by `{facts.pp}`.'])


def _results(facts: Facts) -> list[str]:
  if not facts.metrics:
    return []
  rows = ['| metric | value |', '|---|---|']
  for name, value in sorted(facts.metrics.items()):
    shown = f'{value:.2%}' if name in facts.percent else f'{value:.6g}'
    rows.append(f'| {name} | {shown} |')
  return ['## Results', f'At step {facts.step:,}:', '\n'.join(rows)]


def _training(facts: Facts) -> list[str]:
  if facts.config is None:
    return []
  recipe = json.dumps(public(facts.config), indent=1)
  return [
    '## Training',
    "The run's config, every key as it was used (`training_config.json`):",
    f'<details><summary>config</summary>\n\n```json\n{recipe}\n```\n\n</details>',
  ]


def _licence(facts: Facts) -> str:
  if facts.asked:
    return f'{facts.asked}, as its publisher states.'
  if facts.licence.name:
    return (
      f'{facts.licence.name}: that of the weights it came from, '
      f'{_shown(facts.licence.origin)}. The data that it was trained on may have terms of '
      'its own.'
    )
  if facts.licence.origin:
    return (
      f'Not known: none was found for the weights it came from, '
      f'{_shown(facts.licence.origin)}. Ask their publisher before you use it, and state '
      'it here.'
    )
  return (
    'Not stated yet: whoever trained this model has to choose one, and state it here.'
  )


def public(value):
  """Returns a config without class names, which the weights have, and without the
  folders of the machine that it was used on.
  """
  if isinstance(value, dict):
    return {
      k: public(v) for k, v in value.items() if k not in ('workdir', 'class_names')
    }
  if isinstance(value, list | tuple):
    return [public(item) for item in value]
  return _shown(value) if isinstance(value, str) else value


def _shown(text: str | None) -> str:
  """Returns 'folder:/home/me/photos' as 'folder:photos', gs://bucket/a unchanged."""
  return re.sub(
    r'(?<![\w:/])(folder:|records:|arrays:)?(~|\.{1,2})?/(?:[^/|]*/)*',
    lambda match: match[1] or '',
    str(text),
  )
