"""Names and rules."""

import ast
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import naming
from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.weights.adapt import merge


def test_names_of_dicts_tuples_and_dataclasses():
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Box:
    params: dict
    rest: tuple

  tree = Box({'a': {'b': 1}}, (2, [3, None]))
  assert trees.flatten(tree) == {'params/a/b': 1, 'rest/0': 2, 'rest/1/0': 3}


def test_optimizer_moments_end_in_the_parameters_name():
  params = {'block': {'kernel': jnp.zeros((2, 2))}}
  names = trees.flatten(optax.adam(1e-3).init(params))
  assert [n for n in names if n.endswith('mu/block/kernel')]
  assert [n for n in names if n.endswith('nu/block/kernel')]


def test_unflatten_inverts_flatten():
  tree = {'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}
  assert trees.unflatten(trees.flatten(tree)) == tree


def test_first_match_wins_and_matches_in_full():
  rules = [('head/.*', 1), ('.*/kernel', 2), ('.*', 3)]
  tree = {'head': {'kernel': 0}, 'body': {'kernel': 0, 'kernels': 0}}
  assert trees.select(rules, tree) == {
    'head': {'kernel': 1},
    'body': {'kernel': 2, 'kernels': 3},
  }


def test_partition_and_combine_are_inverse():
  tree = {'head': {'kernel': 0}, 'body': {'a': {'kernel': 1, 'bias': 2}, 'b': 3}}
  chosen, rest = trees.partition(tree, [('.*/kernel', True), ('.*', False)])
  assert chosen == {'head': {'kernel': 0}, 'body': {'a': {'kernel': 1}}}
  assert rest == {'body': {'a': {'bias': 2}, 'b': 3}}
  assert trees.combine(chosen, rest) == trees.combine(rest, chosen) == tree
  assert trees.combine(tree, {}) == tree


def test_rules_must_be_total_and_valid():
  with pytest.raises(UserError, match=naming("'b'", "'.*'")):
    trees.select([('a', 1)], {'b': np.zeros(1)})
  with pytest.raises(UserError, match=naming("'('")):
    trees.select([('(', 1)], {'b': np.zeros(1)})


def test_merge_takes_everything_or_says_why():
  shapes = {'a/k': (2, 3), 'b/k': (4,), 'head/k': (5,)}
  source = {'a/k': np.ones((2, 3)), 'b/k': np.ones(4), 'head/k': np.ones(7)}
  with pytest.raises(ValueError, match=naming('head/k', (7,), (5,))):
    merge(shapes, source)
  taken, report = merge(shapes, source, skip=['head/.*'])
  assert list(taken) == report.taken == ['a/k', 'b/k']
  assert (report.reinitialized, report.unused) == (['head/k'], ['head/k'])
  with pytest.raises(ValueError, match=naming('b/k', 'c/k')):
    merge({'b/k': (4,)}, {'c/k': np.ones(4)})


def test_the_hint_of_a_merge_names_exactly_the_parameters_that_differ():
  shapes = {'a/b/k': (2,), 'a/b/c': (2,), 'a/d/k': (2,), 'e/k': (2,), 'e/f': (2,)}
  source = {name: np.ones(2) for name in shapes if name != 'a/d/k'}
  source |= {'e/k': np.ones(3), 'batch_stats/g/mean': np.ones(1)}
  with pytest.raises(ValueError, match='skip') as error:
    merge(shapes, source)
  hint = ast.literal_eval(re.search(r'\[.*\]', str(error.value))[0])
  assert hint == ['a/d/.*', 'e/k', 'g/.*']
  assert merge(shapes, source, hint)[1].taken == ['a/b/k', 'a/b/c', 'e/f']
