"""Tables of named things: models, tasks, ops, formats, ... There is one class for all.

Rings are packages on top of the core, which knows only their names. The `__init__` of a ring
declares the entries that the ring adds to the tables:

  ENTRIES = {'task': {'detect': 'my_ring.tasks:Detect'}, 'op': {...}, ...}

A table reads them when it is first used. A ring that is missing adds nothing.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections import UserDict
from typing import Any

from vit_jax.errors import choose

RINGS = ('vit_jax.detection', 'vit_jax.learn', 'vit_jax.lab')
# Names of the tables of the core. They are the keys that a ring's ENTRIES may have.
TABLES = (
  'model',
  'loss',
  'kind of class weights',
  'optimizer',
  'decay',
  'task',
  'method of config.tune',
  'source',
  'target of a source',
  'source of TFDS',
  'sampling',
  'op',
  'evaluator type',
  'format',
  'start',
  'command',
  'figure',
  'figure of runs',
  'features of outputs',
  'options of predict',
  'part of predict',
  'part of evaluate',
  'part of a page',
)
# Installed packages register rings of their own in this group of entry points.
GROUP = 'vit_jax.rings'


@functools.cache
def rings() -> dict[str, dict[str, dict] | None]:
  """Returns {module of a ring: its ENTRIES, or None if the ring is missing}.

  Raises:
    ValueError: for entries of a table that is not in TABLES.
  """
  entries_of: dict[str, dict[str, dict] | None] = {}
  others = importlib.metadata.entry_points(group=GROUP)
  for name in (*RINGS, *sorted(point.value for point in others)):
    try:
      entries = importlib.import_module(name).ENTRIES
    except ModuleNotFoundError as error:
      if error.name != name:
        raise
      entries = None
    for table in entries or {}:
      if table not in TABLES:
        raise ValueError(f'{name}: ENTRIES has {table!r}: expected one of {TABLES}')
    entries_of[name] = entries
  return entries_of


def _load(place: str) -> Any:
  """Returns the object at 'module:attribute'."""
  module, _, attribute = place.partition(':')
  return getattr(importlib.import_module(module), attribute)


class Registry(UserDict):
  """A table {name: object}. The module of an entry is imported when its name is used.

  The entries of the core come first, then those of the rings. A config file may add an entry
  of its own, without editing this package:

    losses.LOSSES.register('poly', poly)

  Args:
    noun: the word for an entry in errors, such as 'task'; also the key in ENTRIES of a ring.
    entries: {name: 'module:attribute', or the object itself}.
    rings_first: whether the entries of the rings come first, if the order matters.
  """

  # Whether an entry has been registered, for any table.
  extended = False

  def __init__(self, noun: str, entries: dict[Any, Any], rings_first: bool = False):
    self.noun = noun
    self._core = entries
    self._rings_first = rings_first

  # This replaces the attribute `data`, which `UserDict.__init__` would fill at once.
  @functools.cached_property
  def data(self) -> dict[Any, Any]:
    """{name: entry}. Once an entry is imported, its object replaces it."""
    return dict(self._initial)

  @functools.cached_property
  def _initial(self) -> dict[Any, Any]:
    """{name: entry} of the core and of the rings."""
    theirs: dict[Any, Any] = {}
    for ring, entries in rings().items():
      for name, entry in (entries or {}).get(self.noun, {}).items():
        if name in self._core or name in theirs:
          raise ValueError(f'{ring}: {self.noun} {name!r} already exists')
        theirs[name] = entry
    return {**theirs, **self._core} if self._rings_first else {**self._core, **theirs}

  def __getitem__(self, name) -> Any:
    entry = choose(self.noun, name, self.data, _others())
    if isinstance(entry, str):
      entry = self.data[name] = _load(entry)
    return entry

  def register(self, name: str, entry: Any) -> None:
    """Adds an entry; raises ValueError if this package or a ring has its name already."""
    if name in self._initial:
      raise ValueError(f'{self.noun} {name!r} already exists in vit_jax')
    self.data[name] = entry
    Registry.extended = True

  def signature(self, name: str) -> inspect.Signature:
    """Returns the keyword-only parameters of an entry, which a config may set.

    A class that passes `**options` to its base also has the parameters of the base.
    """
    entry, keys = self[name], {}
    for reader in entry.__mro__ if isinstance(entry, type) else [entry]:
      parameters = inspect.signature(reader).parameters.values()
      keys = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY} | keys
      if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        break
    return inspect.Signature(list(keys.values()))


def _others() -> str:
  """Returns the end of a list of names in a message, which says where others come from."""
  hint = ', or one that a config file registers (--import FILE.py)'
  for name, entries in rings().items():
    if entries is None:
      hint += f'; {name}, which may have more, is missing'
  return hint
