"""Validates a config against the signatures of the code that reads it.

A section of a config holds the keyword arguments of one function or class. The parameters
are the keys, and their annotations are the types. `Annotated` adds ranges and choices:

  def sgd(*, momentum: Annotated[float, Range(0, 1, '[)')] = 0.9, nesterov: bool = False)

A config therefore cannot hold keys that no code reads. Every range stands in one place,
beside the code that needs it. A run checks everything once, before it opens data or weights.
"""

import ast
import contextlib
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from vit_jax.errors import UserError, choose, did_you_mean

INT32, FLOAT32 = 2**31 - 1, 3.4e38


# -- rules: callables (where, value, section), in `Annotated` -------------------------
# A rule checks any value but None, and raises UserError. `where` is the key's full name, and
# `section` is the dict that holds the key.


@dataclasses.dataclass(frozen=True)
class Range:
  """An interval of numbers: '[' and ']' include an end, '(' and ')' exclude it."""

  low: float
  high: float = math.inf
  ends: str = '[]'
  # Why there is a bound, for the error message.
  why: str = ''

  def __call__(self, where: str, value, section) -> None:
    above = value > self.low if self.ends[0] == '(' else value >= self.low
    below = value < self.high if self.ends[1] == ')' else value <= self.high
    if not (above and below):
      raise UserError(f'{where}={value!r}: expected a number in {self}.')

  def __str__(self) -> str:
    end = ')' if self.high == math.inf else self.ends[1]
    why = f' ({self.why})' if self.why else ''
    return f'{self.ends[0]}{self.low}, {self.high}{end}{why}'


class Section:
  """A rule for a section that `consumer` reads. The arguments are those of `bind`."""

  def __init__(self, consumer, provided: Sequence[str] = (), **extra):
    self.consumer, self.provided, self.extra = consumer, provided, extra

  def __call__(self, where: str, value, section) -> None:
    bind(where, value, self.consumer, self.provided, self.extra)


class Named:
  """A rule for a section whose key `key` names an entry of `table`.

  The entry's signature says which other keys the section may have.

  Args:
    extra: {key: annotation} of the keys that the run itself reads.
  """

  def __init__(self, table, key: str = 'name', **extra):
    self.table, self.key, self.extra = table, key, extra

  def __call__(self, where: str, value, section) -> None:
    if not isinstance(value, dict) or value.get(self.key) is None:
      raise UserError(f'{where}={value!r} lacks {self.key}.')
    check(f'{where}.{self.key}', value[self.key], str)
    signature = self.table.signature(value[self.key])
    bind(where, value, signature, extra={self.key: str, **self.extra})


class Call:
  """A rule for the text 'NAME' or 'NAME(option=value)' of an entry of `table`."""

  def __init__(self, table):
    self.table = table

  def __call__(self, where: str, value, section) -> None:
    with prefix_errors(where):
      name, options = parse_options(value)
      signature = self.table.signature(name)
    bind(f'{where} {name}', options, signature)


def nonempty(where: str, value, section) -> None:
  """Raises UserError for an empty list or section."""
  if not value:
    raise UserError(f'{where}={value!r}: expected one value or more.')


def distinct(where: str, value, section) -> None:
  """Raises UserError for a list that is empty or has a value twice."""
  if not 0 < len(value) == len({*value}):
    raise UserError(
      f'{where}={value!r}: expected one or more values, and no value twice.'
    )


def _period(where: str, value, section) -> None:
  if not ((isinstance(value, int) and 1 <= value <= INT32) or 0 < value <= 1):
    raise UserError(
      f'{where}={value!r}: expected 1 or more steps, or a fraction of the run up to 1.0.'
    )


Count = Annotated[int, Range(1, INT32)]
Size = Annotated[int, Range(1, 2**20)]
Depth = Annotated[int, Range(1, 1000, why='each layer is traced by itself')]
Share = Annotated[float, Range(0, 1, '[)')]
Fraction = Annotated[float, Range(0, 1)]
Factor = Annotated[float, Range(0, 1e6)]
Positive = Annotated[float, Range(0, FLOAT32, '(]')]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Period = Annotated[int | float, _period]


# -- checks ---------------------------------------------------------------------------


def bind(
  where: str,
  section: Any,
  consumer: Callable | inspect.Signature,
  provided: Sequence[str] = (),
  extra: dict[str, Any] | None = None,
) -> None:
  """Checks a section against the signature of the code that reads it, to any depth.

  Args:
    where: the name of the section in messages, 'config.optim'.
    provided: parameters that the run passes; a config may not set them.
    extra: {key: annotation} of keys that other code reads.
  """
  check(where, section, dict)
  if not isinstance(consumer, inspect.Signature):
    consumer = inspect.signature(consumer)
  parameters = {k: p for k, p in consumer.parameters.items() if k not in provided}
  kinds = {k: p.annotation for k, p in parameters.items()} | (extra or {})
  check_keys(where, section, kinds)
  required = [key for key, p in parameters.items() if p.default is p.empty]
  if missing := [key for key in required if key not in section]:
    raise UserError(f'{where} lacks {", ".join(missing)}.')
  for key, value in section.items():
    _check_type(f'{where}.{key}', value, kinds[key])
  # Check all types first, because a rule may read other keys of the section.
  for key, value in section.items():
    check(f'{where}.{key}', value, kinds[key], section)


def check_keys(where: str, section: dict, keys) -> None:
  """Raises UserError for an unknown key; the message lists the keys and suggests one."""
  for key in section:
    if key not in keys:
      raise UserError(
        f'Unknown key {where}.{key}: keys are {sorted(keys)}.{did_you_mean(key, keys)}'
      )


def check(where: str, value, kind, section: dict | None = None) -> None:
  """Checks a value against an annotation.

  Args:
    kind: int, float (which accepts ints), str, bool, None, dict, list, tuple, and unions,
      `Literal` and `Annotated` of them, to any depth. Any other annotation accepts any value.
  """
  _check_type(where, value, kind)
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    check(where, value, args[0], section)
    if value is not None:
      for rule in kind.__metadata__:
        rule(where, value, section or {})
  elif _is_union(kind):
    check(where, value, next(k for k in args if _fits(value, k)), section)
  elif origin is Literal:
    choose(where, value, args)
  elif origin is dict:
    for key, item in value.items():
      check(f'{where}.{key}', item, args[1], value)
  elif args and origin in (list, tuple, Sequence):
    for i, (item, item_kind) in enumerate(zip(value, _items(kind, value), strict=True)):
      check(f'{where}[{i}]', item, item_kind, section)


def check_json(where: str, value) -> None:
  """Raises UserError for a value that config.json cannot hold, at any depth."""
  if isinstance(value, dict):
    for key, item in value.items():
      check_json(f'{where}.{key}', item)
  elif isinstance(value, list | tuple):
    for i, item in enumerate(value):
      check_json(f'{where}[{i}]', item)
  elif not isinstance(value, bool | int | float | str | None):
    raise UserError(f'{where} is of type {type(value).__name__}, which JSON lacks.')
  elif isinstance(value, int) and abs(value) >= 2**63:
    raise UserError(f'{where} is an integer of more than 64 bits: write it as a float.')
  elif isinstance(value, float) and not abs(value) <= FLOAT32:
    raise UserError(f'{where}={value}: expected a finite number, up to {FLOAT32}.')


def parse_call(text: str) -> tuple[str, list, dict]:
  """Parses 'NAME' or 'NAME(1, key=2)' to (name, arguments, keyword arguments).

  Raises:
    ValueError: for other text, or for arguments that are not plain literals.
  """
  try:
    node = ast.parse(text.strip(), mode='eval').body
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
      raise ValueError('it has no name')
    args = [ast.literal_eval(arg) for arg in getattr(node, 'args', ())]
    keywords = getattr(node, 'keywords', ())
    options = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    check_json(text, [args, options])
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    reason = getattr(error, 'msg', error)
    raise ValueError(
      f'{text!r}: expected NAME, or NAME(...) with literal arguments ({reason})'
    ) from None
  return function.id, args, options


def parse_options(text: str) -> tuple[str, dict]:
  """Parses 'NAME' or 'NAME(option=value)'; raises ValueError for an option without a name."""
  name, args, options = parse_call(text)
  if args:
    raise ValueError(f'give the options of {text!r} by name, {name}(option=value)')
  return name, options


@contextlib.contextmanager
def prefix_errors(where: str) -> Iterator[None]:
  """Context manager that turns a ValueError into a UserError that begins with `where`.

  A subclass of UserError, such as DataError, passes unchanged.
  """
  try:
    yield
  except ValueError as error:
    if isinstance(error, UserError) and type(error) is not UserError:
      raise
    prefix = '' if str(error).startswith(where) else f'{where}: '
    raise UserError(f'{prefix}{error}') from error


# -- types ----------------------------------------------------------------------------


def _check_type(where: str, value, kind) -> None:
  if _fits(value, kind):
    return
  if _bare(kind) is dict:
    raise UserError(f'{where}={value!r}: expected a section: set {where}.KEY=VALUE.')
  raise UserError(f'{where}={value!r}: expected {_describe(kind)}.')


def _is_union(kind) -> bool:
  return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _bare(kind):
  return kind.__origin__ if typing.get_origin(kind) is Annotated else kind


def _items(kind, value) -> Sequence:
  """Returns the annotation of each item of a list or tuple."""
  args = typing.get_args(kind)
  if typing.get_origin(kind) is tuple and args[-1] is not ...:
    return args
  return args[:1] * len(value)


def _fits(value, kind) -> bool:
  """Whether a value has the type of an annotation; does not apply the rules."""
  kind = _bare(kind)
  origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
  if _is_union(kind):
    return any(_fits(value, k) for k in args)
  if origin is Literal:
    return isinstance(value, tuple(map(type, args)))
  if origin in (list, tuple, Sequence):
    if not isinstance(value, list | tuple):
      return False
    kinds = _items(kind, value) if args else ()
    return not args or (len(kinds) == len(value) and all(map(_fits, value, kinds)))
  if origin in (int, float):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (origin is float or isinstance(value, int))
  if origin in (str, bool, dict, types.NoneType):
    return isinstance(value, origin)
  return True


def _describe(kind) -> str:
  """Describes an annotation for a message: 'int in [1, 1000] or None'."""
  if typing.get_origin(kind) is Annotated:
    ranges = [f' in {rule}' for rule in kind.__metadata__ if isinstance(rule, Range)]
    return _describe(kind.__origin__) + ''.join(ranges)
  if _is_union(kind):
    return ' or '.join(map(_describe, typing.get_args(kind)))
  if typing.get_origin(kind) is Literal:
    return f'one of {list(typing.get_args(kind))}'
  if args := [a for a in typing.get_args(kind) if a is not ...]:
    name = 'list' if typing.get_origin(kind) is not dict else 'section'
    return f'{name} of {", ".join(map(_describe, args))}'
  return 'None' if kind is types.NoneType else getattr(kind, '__name__', str(kind))
