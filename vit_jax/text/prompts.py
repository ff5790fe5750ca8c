"""Texts for a class, by which an image and text model classifies without training.

CLIP, arXiv 2103.00020, section 3.1.4: the class is the mean of many prompts. `prompts.json`
has what OpenAI published in the notebook Prompt_Engineering_for_ImageNet, as open_clip 3.3
ships it (MIT licence): 80 templates for ImageNet, 7 that do nearly as well, and names of
the 1,000 classes, edited to mean one thing each ('crane bird').
"""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vit_jax import files, imagenet
from vit_jax.errors import UserError, did_you_mean

TEMPLATES = ('openai', 'simple')


@functools.cache
def _read_published() -> dict[str, list[str]]:
  return json.loads(Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))


def templates(name: str | None) -> Sequence[str]:
  """Returns templates with a place {} for a class.

  Args:
    name: one of TEMPLATES, a template such as 'a photo of a {}.', or a file with one a
      line; None: the class alone.
  """
  if name is None:
    return ('{}',)
  if name in TEMPLATES:
    return _read_published()[name]
  lines = [name] if '{}' in name else _lines(name)
  if not lines:
    raise UserError(
      f'Templates {name!r}: one of {[*TEMPLATES]}, a file, or a text with {{}} for the '
      f'class.{did_you_mean(name, TEMPLATES)}'
    )
  if odd := [line for line in lines if '{}' not in line]:
    raise UserError(f'{name}: template {odd[0]!r} has no place {{}} for the class.')
  return lines


def labels(text: str) -> list[str]:
  """Returns the classes in 'a cat,a dog', or of a file with one a line."""
  names = [part.strip() for part in _lines(text) or text.split(',')]
  if not all(names) or len({*names}) < len(names):
    raise UserError(f'Labels {text!r}: expected several, by commas, none twice.')
  return names


def _lines(name: str) -> list[str] | None:
  """Returns the non-empty lines of a file, None if the file does not exist."""
  path = os.path.expanduser(name)
  if os.path.isfile(path):
    with files.reading(name):
      lines = Path(path).read_text(encoding='utf-8').splitlines()
      return [line for line in lines if line.strip()]


def words(class_names: Sequence[str]) -> list[str]:
  """Returns the classes of a data set as texts have them.

  Classes of ImageNet, by WordNet id or by the names of `imagenet.class_names`, have their
  published names; in others '_' is a space.
  """
  ids, ours = imagenet.wordnet_ids('imagenet1k'), imagenet.class_names('imagenet1k')
  edited = _read_published()['imagenet1k']
  if list(class_names) == ours:  # two classes have one name there
    return edited
  published = dict(zip([*ours, *ids], [*edited] * 2, strict=True))
  return [published.get(name, name.replace('_', ' ')) for name in class_names]
