"""Rename tables: rules that pair names of a published file with ours, both ways."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import transforms


class Rule(NamedTuple):
  """`theirs` holds what the parameters `ours` hold.

  Both are templates: {i} stands for a number, {rest} for any text, {i+1} for the number
  one higher, {i+01} the same with two digits. A rule that only loads is one of an older
  spelling: it is passed over when writing.
  """

  theirs: str
  ours: str | tuple[str, ...]
  transform: transforms.Transform = transforms.same
  only_load: bool = False

  @property
  def targets(self) -> tuple[str, ...]:
    return (self.ours,) if isinstance(self.ours, str) else self.ours


_TOKEN = re.compile(r'\{(\w+?)(?:\+(0?1))?\}')


@functools.cache
def _regex(template: str) -> re.Pattern:
  pieces, end = [], 0
  for token in _TOKEN.finditer(template):
    pieces.append(re.escape(template[end : token.start()]))
    pieces.append(f'(?P<{token[1]}>{".+" if token[1] == "rest" else "[0-9]+"})')
    end = token.end()
  return re.compile(''.join(pieces) + re.escape(template[end:]))


def _match(template: str, name: str) -> dict | None:
  """Returns {token: value} if `name` is of this form."""
  match = _regex(template).fullmatch(name)
  if not match:
    return None
  values = {}
  for key, plus in _TOKEN.findall(template):
    values[key] = match[key] if key == 'rest' else int(match[key]) - bool(plus)
  return values


def _fill(template: str, values: dict) -> str:
  def text(token):
    key, plus = token.groups()
    value = values[key]
    return str(value) if not plus else f'{value + 1:0{len(plus)}d}'

  return _TOKEN.sub(text, template)


def to_ours(
  arrays: dict[str, np.ndarray], rules: Iterable[Rule], heads: int | None
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns ({our name: array}, names that no rule knows).

  Args:
    arrays: the file's.
    rules: the first whose `theirs` matches is taken.
    heads: number of attention heads, None where no rule needs it.

  Raises:
    UserError: for an array whose shape a rule cannot take apart, or a name twice.
  """
  rules, flat, unknown = list(rules), {}, []
  for name, x in arrays.items():
    for rule in rules:
      values = _match(rule.theirs, name)
      if values is not None:
        break
    else:
      unknown.append(name)
      continue
    try:
      ours = rule.transform.load(x, heads)
    except (ValueError, IndexError) as error:
      raise UserError(f'{name} of shape {x.shape} cannot be read: {error}.') from None
    for target, part in zip(rule.targets, ours, strict=True):
      target = _fill(target, values)
      if target in flat:
        raise UserError(f'The file gives {target} twice; the second time as {name}.')
      flat[target] = part
  return flat, unknown


def to_theirs(
  flat: dict[str, np.ndarray], rules: Iterable[Rule], heads: int | None, format: str
) -> dict[str, np.ndarray]:
  """Returns {their name: array}, sorted by name; the inverse of `to_ours`.

  Raises:
    UserError: for a parameter that the format has no name for.
  """
  rules = [rule for rule in rules if not rule.only_load]
  left, out = dict(flat), {}
  for name in flat:
    if name not in left:  # taken along with another
      continue
    for rule in rules:
      values = next(
        (v for t in rule.targets if (v := _match(t, name)) is not None), None
      )
      if values is None:
        continue
      parts = [left.pop(_fill(target, values)) for target in rule.targets]
      try:
        out[_fill(rule.theirs, values)] = rule.transform.save(parts, heads)
      except ValueError as error:
        raise UserError(
          f'{name} has no place in the format {format}: {error}.'
        ) from None
      break
    else:
      raise UserError(
        f'{name} has no place in the format {format}: it has no such part.'
      )
  return {name: np.ascontiguousarray(out[name]) for name in sorted(out)}
