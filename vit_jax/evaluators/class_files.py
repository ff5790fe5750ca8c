"""Files that say which classes of a model those of a data set are.

Either JSON, {"class of the data": ["n01440764", ...]}: WordNet ids, names or numbers of
the model's classes, [] for a class whose images are left out; or the folder `mappings`
that comes with ObjectNet (objectnet.dev, arXiv 1911.11110), whose names are:

  folder_to_objectnet_label.json     {"air_freshener": "Air freshener", ...}, 313 classes
  objectnet_to_imagenet_1k.json      {"Alarm clock": "analog clock; digital clock", ...},
                                     for those that are in ImageNet
  imagenet_to_label_2012_v2          a line for each class of ImageNet, in the order of the
                                     challenge's own numbers
  pytorch_to_imagenet_2012_id.json   {"0": 449, ...}: line, from 0, of each class in the
                                     order of WordNet ids
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.evaluators import class_names

_FOLDERS = 'folder_to_objectnet_label.json'
_CLASSES = 'objectnet_to_imagenet_1k.json'
_LINES = 'imagenet_to_label_2012_v2'
_NUMBERS = 'pytorch_to_imagenet_2012_id.json'


def beside(source: str) -> str | None:
  """Returns the folder `mappings` of ObjectNet that lies beside a folder of images."""
  scheme, _, target = source.partition(':')
  if scheme != 'folder':
    return None
  root = Path(os.path.abspath(os.path.expanduser(target)))
  found = root.parent / 'mappings'
  return str(found) if (found / _CLASSES).is_file() else None


def rows(
  path: str,
  source: str,
  names: Sequence[str] | None,
  model: Sequence[str] | None,
  number: int,
) -> tuple[list[list[int]], str]:
  """Returns ([the model's classes] for each class of a data set, a remark).

  Args:
    names: of the data's classes.
    model: of the model's.
    number: of the model's classes.

  Raises:
    UserError: for a file of another form, or classes that it or the model does not have.
  """
  if names is None:
    raise UserError(f'class_map: {source} does not name its classes.')
  table = read(Path(path).expanduser())
  if lost := [name for name in names if name not in table]:
    raise UserError(
      f'{path} does not have the class {lost[0]!r} of {source}; {len(lost):,} of '
      f'{len(names):,} are missing. Give [] for classes to leave out.'
    )
  places: dict[str, int] = {}
  if model:
    for read_as in (class_names.words, class_names.ids):
      places |= {name: i for i, name in enumerate(read_as(model))}

  def place(value):
    if isinstance(value, int) and 0 <= value < number:
      return value
    if value not in places:
      unknown = ", whose names are not known: give numbers, or for ObjectNet class_map='imagenet1k'"
      raise UserError(
        f'{path}: the model has no class {class_names.shown(str(value))} among its '
        f'{number:,}{"" if places else unknown}.'
      )
    return places[value]

  found = [[place(value) for value in table[name]] for name in names]
  mapped = sum(map(bool, found))
  if not mapped:
    raise UserError(f'{path} leaves out all classes of {source}.')
  rest = '; images of the others are left out' if mapped < len(found) else ''
  return found, f'{mapped:,} of {len(found):,} classes are mapped by {path}{rest}.'


def read(path: Path) -> dict[str, list[str | int]]:
  """Returns {class of the data: WordNet ids, names or numbers of the model's classes}.

  Raises:
    UserError: for a file that is missing, or of another form.
  """
  if path.is_dir():
    return _objectnet(path)
  table = _json(path)
  for name, row in table.items():
    if not isinstance(row, list) or not all(_is_class(x) for x in row):
      raise UserError(
        f'{path}: {name!r} has {row!r}, where a list of WordNet ids, names or numbers of '
        'classes is expected.'
      )
  return table


def _is_class(x) -> bool:
  return isinstance(x, str) or type(x) is int


def _objectnet(folder: Path) -> dict[str, list[str]]:
  labels, classes = _json(folder / _FOLDERS), _json(folder / _CLASSES)
  for file, table in ((_FOLDERS, labels), (_CLASSES, classes)):
    for name, text in table.items():
      if not isinstance(text, str):
        raise UserError(
          f'{folder / file}: {name!r} has {text!r}, where a text is expected.'
        )
  lines = [line.strip() for line in _text(folder / _LINES).splitlines()]
  ids = imagenet.wordnet_ids('imagenet1k')
  numbers = _json(folder / _NUMBERS)
  wordnet = {}
  for number, line in numbers.items():
    if (
      not number.isdecimal() or int(number) >= len(ids) or line not in range(len(lines))
    ):
      raise UserError(f'{folder / _NUMBERS}: {number!r}: {line!r} names no class.')
    wordnet[lines[line]] = ids[int(number)]
  out = {name: [] for name in labels}
  alike, others = 0, []
  for name, label in labels.items():
    for text in classes[label].split('; ') if label in classes else ():
      if text not in wordnet:
        raise UserError(f'{folder / _CLASSES}: {label!r}: no class is named {text!r}.')
      out[name].append(wordnet[text])
      if _lemmas(text) & _lemmas(imagenet.describe(wordnet[text])):
        alike += 1
      else:
        others.append(text)
  if len(others) > alike:  # lines counted from 1, say: the names are the neighbours'
    text = others[0]
    raise UserError(
      f'{folder / _NUMBERS} does not fit {_LINES}: {text!r} is said to be '
      f'{wordnet[text]}, which is {imagenet.describe(wordnet[text])!r}.'
    )
  return out


def _lemmas(text: str) -> set[str]:
  return {word.strip().lower() for word in text.split(',')}


def _json(path: Path) -> dict:
  text = _text(path)
  try:
    table = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'class_map: {path} is not JSON: {error}') from None
  if not isinstance(table, dict):
    raise UserError(f'class_map: {path} holds no object {{"class": ...}}.')
  return table


def _text(path: Path) -> str:
  if path.exists() and not path.is_file():  # a pipe would be waited for
    raise UserError(f'class_map: {path} is not a file.')
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, ValueError) as error:
    raise UserError(f'class_map: cannot read {path}: {error}') from None
