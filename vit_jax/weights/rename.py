"""Rename tables: rules that pair names of a published file with ours, both ways."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vit_jax import trees
from vit_jax.weights import transforms as t


class Rule(NamedTuple):
  """Says that the array `theirs` of a file holds the parameters `ours`.

  Names are templates: {i} stands for a number, {rest} for any text, {i+1} for the number plus
  one, and {i+01} for the same in two digits. A rule with `only_load` is an older or newer
  spelling, which is read but never written.
  """

  theirs: str
  ours: str | tuple[str, ...]
  transform: t.Transform = t.same
  only_load: bool = False

  @property
  def targets(self) -> tuple[str, ...]:
    return (self.ours,) if isinstance(self.ours, str) else self.ours


Table = tuple[Rule, ...]
Arrays = dict[str, np.ndarray]


def table(*parts) -> Table:
  """Flattens lists of rules, nested to any depth, into one table."""
  rules = []
  for part in parts:
    rules += [part] if isinstance(part, Rule) else table(*part)
  return tuple(rules)


def nest_name(name: str, prefix: str) -> str:
  """Returns the name of a submodel's variable in the model that contains it."""
  stats = f'{trees.STATS}/' if trees.is_statistic(name) else ''
  return f'{stats}{prefix}{name.removeprefix(stats)}'


def nest_rules(rules: Iterable[Rule], theirs: str = '', ours: str = '') -> Table:
  """Puts prefixes before the names in the rules of a submodel."""
  return tuple(
    r._replace(
      theirs=theirs + r.theirs, ours=tuple(nest_name(n, ours) for n in r.targets)
    )
    for r in rules
  )


def respell(rules: Iterable[Rule], *changes: tuple[str, str]) -> Table:
  """Returns rules for other spellings of the file's names.

  They are used for loading only, never for writing.

  Args:
    changes: pairs of a regex and its replacement, applied in order.
  """
  out = []
  for rule in rules:
    name = rule.theirs
    for regex, new in changes:
      name = re.sub(regex, new, name)
    if name != rule.theirs:
      out.append(rule._replace(theirs=name, only_load=True))
  return tuple(out)


def add_bare_names(rules: Table, prefix: str) -> Table:
  """Adds the names of transformers' bare model, which lack the prefix.

  transformers has a class with a head and a bare class for each model.
  """
  return table(rules, respell(rules, (f'^{re.escape(prefix)}', '')))


# -- renaming -------------------------------------------------------------------------

_TOKEN = re.compile(r'\{(\w+?)(?:\+(\d+))?\}')


@functools.cache
def _regex(template: str) -> re.Pattern:
  pieces, end = [], 0
  for token in _TOKEN.finditer(template):
    pieces.append(re.escape(template[end : token.start()]))
    pieces.append(f'(?P<{token[1]}>{".+" if token[1] == "rest" else "[0-9]+"})')
    end = token.end()
  return re.compile(''.join(pieces) + re.escape(template[end:]))


def _match(template: str, name: str) -> dict | None:
  """Returns {token: value} if `name` matches the template, else None."""
  match = _regex(template).fullmatch(name)
  if not match:
    return None
  return {
    key: match[key] if key == 'rest' else int(match[key]) - int(plus or 0)
    for key, plus in _TOKEN.findall(template)
  }


def _fill(template: str, values: dict) -> str:
  def text(token):
    key, plus = token.groups()
    value = values[key]
    return str(value) if not plus else f'{value + int(plus):0{len(plus)}d}'

  return _TOKEN.sub(text, template)


def to_ours(arrays: Arrays, rules: Iterable[Rule]) -> tuple[Arrays, list[str]]:
  """Returns ({our name: array}, names that no rule matches). The first match wins."""
  rules, flat, unknown = list(rules), {}, []
  for name, x in arrays.items():
    matches = ((r, v) for r in rules if (v := _match(r.theirs, name)) is not None)
    rule, values = next(matches, (None, None))
    if rule is None:
      unknown.append(name)
      continue
    try:
      parts = rule.transform.load(x)
    except (ValueError, IndexError) as error:
      raise ValueError(f'{name} of shape {x.shape} does not fit: {error}') from None
    for target, part in zip(rule.targets, parts, strict=True):
      target = _fill(target, values)
      if target in flat:
        raise ValueError(f'two arrays hold {target}, the second is {name}')
      flat[target] = part
  return flat, unknown


def to_theirs(flat: Arrays, rules: Iterable[Rule]) -> Arrays:
  """Returns {their name: array}, sorted by name; the inverse of `to_ours`."""
  targets = [(x, rule) for rule in rules if not rule.only_load for x in rule.targets]
  rest, out = dict(flat), {}
  for name in flat:
    if name not in rest:  # It was written together with another parameter.
      continue
    matches = ((r, v) for x, r in targets if (v := _match(x, name)) is not None)
    rule, values = next(matches, (None, None))
    if rule is None:
      raise ValueError(f'{name} has no place in this format')
    parts = [rest.pop(_fill(target, values)) for target in rule.targets]
    try:
      out[_fill(rule.theirs, values)] = rule.transform.save(parts)
    except ValueError as error:
      raise ValueError(f'{name} has no place in this format: {error}') from None
  return {name: np.ascontiguousarray(out[name]) for name in sorted(out)}
