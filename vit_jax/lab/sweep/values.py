"""The values of `--set KEY=A,B`, and their names in the folders of runs."""

import hashlib
import re

from vit_jax import config as config_lib
from vit_jax.errors import UserError

_PAIRS = {'(': ')', '[': ']', '{': '}'}


def parse(assignment: str) -> tuple[str, list[str]]:
  """Returns (key, the texts of its values) of 'KEY=A,B'.

  Commas within brackets or quotes do not separate. A bare KEY is KEY=True.

  Raises:
    UserError: for an assignment that cannot be told apart into values.
  """
  key, equals, text = assignment.partition('=')
  if not key:
    raise UserError(f'{assignment!r}: expected KEY=VALUE, or KEY=VALUE,VALUE.')
  texts = _split(key, text) if equals else ['True']
  if key == 'resume_allow':  # a list in one text, as messages suggest it
    texts = [text]
  values = [config_lib.literal(item) for item in texts]
  for number, value in enumerate(values):
    if value in values[:number]:
      raise UserError(
        f'{assignment}: the value {texts[number]} is there twice. If that is a list, '
        f'write {key}=({text}).'
      )
  return key, texts


def _split(key: str, text: str) -> list[str]:
  items, start, closing, quote = [], 0, [], ''
  for place, letter in enumerate(text):
    if quote:
      quote = '' if letter == quote else quote
    elif letter in '\'"' and (closing or place == start):
      quote = letter
    elif letter in _PAIRS:
      closing.append(_PAIRS[letter])
    elif letter in _PAIRS.values():
      if not closing or closing.pop() != letter:
        raise UserError(
          f'{key}={text}: {letter!r} has no opening bracket. Quote a string: "...".'
        )
    elif letter == ',' and not closing:
      items.append(text[start:place])
      start = place + 1
  if closing or quote:
    missing = quote or closing[-1]
    raise UserError(f'{key}={text}: a {missing!r} is missing. Quote a text: "...".')
  items.append(text[start:])
  if not all(item.strip() for item in items):
    raise UserError(
      f'{key}={text}: a value is empty. Values are separated by single commas; an empty '
      'text is written "".'
    )
  return items


def name_of(key: str, value) -> str:
  """Returns 'optim.lr=0.001', in characters that the name of a folder can have.

  A value that such a name cannot show is told from others by a hash.
  """
  text = _shown(value)
  safe = re.sub(r'[^A-Za-z0-9._+-]+', '_', text)
  if safe != text:
    digest = hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()
    safe = f'{safe.strip("_")}-{digest[:6]}'
  return f'{key}={safe}'


def _shown(value) -> str:
  if isinstance(value, list) and all(isinstance(x, int | float) for x in value):
    return 'x'.join(map(str, value))
  return str(value)
