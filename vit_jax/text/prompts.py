"""Prompts: texts that describe classes, for classification without training.

As in CLIP (arXiv 2103.00020, section 3.1.4), a class is the mean of the vectors of many
prompts. `prompts.json` has what OpenAI published in the notebook
Prompt_Engineering_for_ImageNet, as open_clip 3.3 ships it (MIT licence): 80 templates for
ImageNet, 7 templates that do nearly as well, and names of the 1,000 classes, which are edited
so that each has one meaning ('crane bird').
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
  """Returns templates, which contain {} in place of the class.

  Args:
    name: one of TEMPLATES, a template such as 'a photo of a {}.', or a file with one
      template per line; None: the text is the name of the class alone.
  """
  if name is None:
    return ('{}',)
  if name in TEMPLATES:
    return _read_published()[name]
  lines = [name] if '{}' in name else _lines(name)
  if not lines:
    raise UserError(
      f'Templates {name!r}: expected one of {[*TEMPLATES]}, a file, or a text with {{}} '
      f'for the class.{did_you_mean(name, TEMPLATES)}'
    )
  if odd := [line for line in lines if '{}' not in line]:
    raise UserError(f'{name}: template {odd[0]!r} has no place {{}} for the class.')
  return lines


def labels(text: str) -> list[str]:
  """Parses classes from 'a cat,a dog', or reads them from a file with one class per line."""
  names = [part.strip() for part in _lines(text) or text.split(',')]
  if not all(names) or len({*names}) < len(names):
    raise UserError(
      f'Labels {text!r}: expected labels separated by commas, without duplicates.'
    )
  return names


def _lines(name: str) -> list[str] | None:
  """Returns the non-empty lines of a file, or None if it does not exist."""
  path = os.path.expanduser(name)
  if os.path.isfile(path):
    with files.reading(name):
      lines = Path(path).read_text(encoding='utf-8').splitlines()
      return [line for line in lines if line.strip()]


def words(class_names: Sequence[str]) -> list[str]:
  """Returns the words that stand for the classes of a data set in prompts.

  Classes of ImageNet, given by WordNet id or by the names of `imagenet.class_names`, get their
  published names. In other names '_' becomes a space.
  """
  ids, ours = imagenet.wordnet_ids('imagenet1k'), imagenet.class_names('imagenet1k')
  edited = _read_published()['imagenet1k']
  # Compare the whole list, because two of its classes have the same name.
  if list(class_names) == ours:
    return edited
  published = dict(zip([*ours, *ids], [*edited] * 2, strict=True))
  return [published.get(name, name.replace('_', ' ')) for name in class_names]
