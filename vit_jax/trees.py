"""Trees whose leaves have path names, and rules that select leaves by name.

Everything that selects parameters (weight decay, freezing, learning-rate factors,
sharding, skipping at load) is one mechanism: an ordered list of `(regex, value)`,
matched in full against 'a/b/c' paths, the first match wins.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from vit_jax.errors import UserError

Rules = Iterable[tuple[str, Any]]
# The collection with the running statistics of batch norms.
STATS = 'batch_stats'


def name_of(path) -> str:
  """Returns the 'a/b/c' name of a JAX key path (dict keys, fields, indices)."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def flatten(tree) -> dict[str, Any]:
  """Returns `{'a/b/c': leaf}` in tree order; `None` is not a leaf."""
  return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def unflatten(flat: dict[str, Any]) -> dict:
  """Returns nested dicts from `{'a/b/c': leaf}`, the inverse of `flatten` on dicts."""
  tree: dict = {}
  for name, leaf in flat.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def flatten_variables(variables: dict) -> dict[str, Any]:
  """Flattens a model's variables, which are collections of nested dicts, to {name: leaf}.

  Parameters keep their names, 'a/b/kernel'. Batch statistics are 'batch_stats/a/b/mean'.
  """
  stats = {STATS: x} if (x := variables.get(STATS)) else {}
  return flatten(variables['params']) | flatten(stats)


def unflatten_variables(flat: dict[str, Any]) -> dict:
  """Returns the collections {'params': ..., ...}, the inverse of `flatten_variables`."""
  params = {name: x for name, x in flat.items() if not is_statistic(name)}
  stats = {name: x for name, x in flat.items() if is_statistic(name)}
  return {'params': unflatten(params), **unflatten(stats)}


def is_statistic(name: str) -> bool:
  """Whether a name is that of a batch statistic, see `flatten_variables`."""
  return name.startswith(f'{STATS}/')


def map_named(fn: Callable, tree, *rest):
  """Maps `fn(name, leaf, *other_leaves)` over a tree, keeping its structure."""
  return jax.tree.map_with_path(lambda p, *xs: fn(name_of(p), *xs), tree, *rest)


def matches(regex: str, name: str) -> bool:
  """Whether a rule's regex matches all of `name`."""
  try:
    return re.fullmatch(regex, name) is not None
  except re.error as error:
    raise UserError(f'Rule {regex!r} is not a regular expression: {error}.') from None


def first_match(rules: Rules, name: str) -> Any:
  """Returns the value of the first rule whose regex matches all of `name`."""
  for regex, value in rules:
    if matches(regex, name):
      return value
  raise UserError(f"No rule matches {name!r}: end the list with ('.*', default).")


def select(rules: Rules, tree):
  """Returns a tree like `tree`, whose leaves are the values of the rules that match them."""
  rules = list(rules)
  return map_named(lambda name, _: first_match(rules, name), tree)


def partition(tree: dict, rules: Rules) -> tuple[dict, dict]:
  """Splits a tree into the leaves whose first matching rule has a true value, and the rest."""
  chosen, rest = {}, {}
  for name, leaf in flatten(tree).items():
    (chosen if first_match(rules, name) else rest)[name] = leaf
  return unflatten(chosen), unflatten(rest)


def combine(a: dict, b: dict) -> dict:
  """Joins two nested dicts, which have no leaf of the same name."""
  both = dict(a)
  for key, value in b.items():
    both[key] = combine(a[key], value) if key in a else value
  return both
