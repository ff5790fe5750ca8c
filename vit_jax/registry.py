"""Tables of named things: models, tasks, losses, sources, ... One class for all."""

import importlib
import inspect
from collections import UserDict
from typing import Any

from vit_jax.errors import choose

OTHERS = ', or one that a config file registers (--import FILE.py)'


class Registry(UserDict):
  """A table {name: object}, whose modules are imported when one of their names is used.

  A config file may add an entry of its own, without editing this package:

    losses.LOSSES.register('focal', focal)

  Args:
    noun: names an entry in errors, 'task'.
    entries: {name: 'module:attribute', or the object itself}.
  """

  def __init__(self, noun: str, entries: dict[str, Any]):
    super().__init__(entries)
    self.noun = noun
    self._ours = frozenset(entries)

  def __getitem__(self, name: str) -> Any:
    entry = choose(self.noun, name, self.data, OTHERS)
    if isinstance(entry, str):
      module, _, attribute = entry.partition(':')
      entry = self.data[name] = getattr(importlib.import_module(module), attribute)
    return entry

  def register(self, name: str, entry: Any) -> None:
    """Adds an entry. A name of this package cannot be taken."""
    if name in self._ours:
      raise ValueError(f'{self.noun} {name!r} is in vit_jax already')
    self.data[name] = entry

  def signature(self, name: str) -> inspect.Signature:
    """Returns the keyword-only parameters of an entry, which a config may set.

    A class that passes `**options` to its base has the parameters of the base, too.
    """
    entry, keys = self[name], {}
    for reader in entry.__mro__ if isinstance(entry, type) else [entry]:
      parameters = inspect.signature(reader).parameters.values()
      keys = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY} | keys
      if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        break
    return inspect.Signature(list(keys.values()))
