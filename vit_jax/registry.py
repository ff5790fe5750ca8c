"""Tables of named things: models, tasks, losses, sources, ... One class for all."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.errors import choose


class Registry(Mapping):
  """A table {name: object}, whose modules are imported when one of their names is used.

  A config file may add an entry of its own, without editing this package:

    losses.LOSSES.register('focal', focal)

  Args:
    noun: names an entry in errors, 'task'.
    entries: {name: 'module:attribute', or the object itself}.
  """

  def __init__(self, noun: str, entries: dict[str, Any]):
    self.noun = noun
    self._entries = dict(entries)
    self._ours = frozenset(entries)

  def __getitem__(self, name: str) -> Any:
    entry = choose(self.noun, name, self._entries)
    if isinstance(entry, str):
      module, _, attribute = entry.partition(':')
      entry = getattr(importlib.import_module(module), attribute)
      self._entries[name] = entry
    return entry

  def __contains__(self, name) -> bool:
    return name in self._entries

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def register(self, name: str, entry: Any) -> None:
    """Adds an entry. A name of this package cannot be taken."""
    if name in self._ours:
      raise ValueError(
        f'{self.noun} {name!r} is in vit_jax already: choose another name'
      )
    self._entries[name] = entry

  def signature(self, name: str) -> inspect.Signature:
    """Returns the keyword-only parameters of an entry: what a config may set.

    The others are passed by the run.
    """
    parameters = inspect.signature(self[name]).parameters.values()
    return inspect.Signature([p for p in parameters if p.kind is p.KEYWORD_ONLY])
