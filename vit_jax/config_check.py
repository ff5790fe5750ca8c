"""The check of every key of a config, against the code that reads it.

A section is bound to the signature of its consumer: the keys are its parameters, the types
their annotations, so that a config can hold nothing that nothing reads.
"""

import inspect
import math
import types
import typing
from collections.abc import Sequence

from vit_jax.errors import UserError, choose, did_you_mean

# Keys of the first release -> their names today.
RENAMED = {
  'config.optim.schedule.stairs': 'staircase',
  'config.optim.schedule.hold': 'decay_until',
  'config.task.switch': 'switch_prob',
  'config.task.per': 'mixup_mode',
}


def bind(where: str, section, consumer, provided=(), extra=None) -> None:
  """Checks a section against the signature of the code that consumes it, to any depth.

  A parameter annotated `Annotated[type, check]` is a sub-section, or a text with rules
  of its own: `check(where, value, section)` is called for a value other than None, with
  the section in which it stands, and raises. See `keys_of`, `each_of` and `one_of`.

  Args:
    where: the section's name in messages, 'config.optim'.
    consumer: a callable or an `inspect.Signature`.
    provided: names of parameters that the run itself passes; not settable.
    extra: {key: annotation} of what another reader takes off before the consumer.

  Raises:
    UserError: for unknown or missing keys, or a value of a plainly wrong type.
  """
  if not isinstance(section, dict):
    raise UserError(f'{where}: expected a section (a dict), not {section!r}.')
  signature = consumer
  if not isinstance(consumer, inspect.Signature):
    signature = inspect.signature(consumer)
  known = {k: p for k, p in signature.parameters.items() if k not in provided}
  open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
  assert not open_ended, f'{where}: a consumer must spell out its parameters'
  kinds = {k: p.annotation for k, p in known.items()} | (extra or {})
  known_keys(where, section, kinds)
  required = [key for key, p in known.items() if p.default is p.empty]
  if missing := [key for key in required if key not in section]:
    raise UserError(f'{where} lacks {missing}.')
  for key, value in section.items():
    check_type(f'{where}.{key}', value, kinds[key])
  for key, value in section.items():  # a check may look at the other keys
    if typing.get_origin(kinds[key]) is typing.Annotated and value is not None:
      (check,) = kinds[key].__metadata__
      check(f'{where}.{key}', value, section)


def check_plain(where: str, value) -> None:
  """Raises UserError, naming the key, for a value that config.json could not hold."""
  if isinstance(value, dict):
    for key, item in value.items():
      check_plain(f'{where}.{key}', item)
  elif isinstance(value, list | tuple):
    for i, item in enumerate(value):
      check_plain(f'{where}[{i}]', item)
  elif not isinstance(value, bool | int | float | str | None):
    raise UserError(
      f'{where} is of type {type(value).__name__}: expected a number, a text, None, or '
      'lists and dicts of them.'
    )


def known_keys(where: str, section: dict, known) -> None:
  """Raises UserError for keys that nothing reads: it lists the known, and the closest."""
  for key in section:
    if key not in known:
      new = RENAMED.get(f'{where}.{key}')
      hint = f' It is named "{new}" now.' if new else did_you_mean(key, known)
      raise UserError(f'Unknown key {where}.{key}: known are {sorted(known)}.{hint}')


def keys_of(consumer, provided=()):
  """Returns the check of a sub-section that `consumer` reads; arguments as of `bind`."""
  return lambda where, section, _: bind(where, section, consumer, provided)


def each_of(check):
  """Returns the check of a sub-section {any name: value}, of each of its values."""

  def check_each(where, section, _):
    for key, value in section.items():
      check(f'{where}.{key}', value, section)

  return check_each


def one_of(known):
  """Returns the check of a value that must be one of a few."""
  return lambda where, value, _: choose(where, value, known)


def in_range(least: float, most: float = math.inf, below: float = math.inf):
  """Returns the check of a number in [least, most], and less than `below`."""
  bounds = f'{least} or more' if most == below == math.inf else f'[{least}, {most}]'
  bounds = f'[{least}, {below})' if below < math.inf else bounds

  def check(where, value, _):
    if not least <= value <= most or not value < below:
      raise UserError(f'{where}={value}: expected {bounds}.')

  return check


def whole_numbers(where: str, values, least: int) -> tuple[int, ...]:
  """Returns a list's whole numbers; UserError for none, others or too small ones."""
  if not values or not all(type(v) is int and v >= least for v in values):
    raise UserError(
      f'{where}={values!r}: expected a list of whole numbers, {least} or more.'
    )
  return tuple(values)


def check_type(where: str, value, kind) -> None:
  """Refuses a value of plainly another type; UserError naming `where`.

  Args:
    kind: an annotation. int, float, str, bool, None, dict, lists and tuples, and unions
      of them are checked, floats taking ints; what JSON has no word for takes anything.
  """
  if typing.get_origin(kind) is typing.Annotated:
    kind = kind.__origin__
  if not _fits(value, kind):
    if kind is dict:
      raise UserError(
        f'{where}={value!r}: expected a section, whose keys are set one by one: '
        f'{where}.KEY=VALUE.'
      )
    names = kind.__name__ if type(kind) is type else str(kind).replace(' | ', ' or ')
    names = names.replace('collections.abc.', '')
    raise UserError(f'{where}={value!r}: expected {names}.')


def _fits(value, kind) -> bool:
  if isinstance(kind, types.UnionType):
    return any(_fits(value, k) for k in kind.__args__)
  origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
  if origin in (list, tuple, Sequence):
    if not isinstance(value, list | tuple):
      return False
    if args and (origin is not tuple or args[-1] is ...):  # any number of one kind
      args = args[:1] * len(value)
    return not args or (len(args) == len(value) and all(map(_fits, value, args)))
  if origin in (int, float):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (origin is float or isinstance(value, int))
  if origin in (str, bool, dict, types.NoneType):
    return isinstance(value, origin)
  return True
