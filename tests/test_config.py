"""Arguments, overrides, and the check of every key."""

import pytest

from tests.support import naming
from vit_jax import config
from vit_jax.errors import UserError


def test_arguments_take_the_type_of_their_default():
  defaults = dict(variant='B/16', epochs=90, flag=False, lr=1.0, seed=0)
  arg = config.parse_arg(
    'variant=L/16,flag=true,debug,lr=1e-3', debug=dict(epochs=1, lr=2.0), **defaults
  )
  # `debug` is a bundle that other arguments override.
  assert vars(arg) == dict(variant='L/16', epochs=1, flag=True, lr=1e-3, seed=0)


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('epoch=3', ('epoch=3', 'epochs')),
    ('epochs=many', ('epochs', 'many', 'int')),
    ('lr=nan', ('lr', 'nan', 'float')),
    ('lr=1e999', ('lr', '1e999', 'float')),
    ('flag=2', ('flag', '2', 'bool')),
    ('debgu', ('debgu', 'debug')),
    ('epochs=3,steps=5', ('steps=5', 'epochs=3', 'one')),
  ],
)
def test_bad_arguments(text, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    config.parse_arg(text, debug={}, epochs=90, steps=0, lr=1.0, flag=True)


def test_overrides():
  c = {'optim': {'lr': 0.1, 'schedule': {'warmup': 5}}, 'log': {'every': 9}, 'a': 'x'}
  words = ['optim.lr=1', 'optim.schedule.warmup=7', 'log.profile', 'log.every=0.5']
  config.override(c, [*words, 'a=b/c', 'new.k=(1,2)'])
  assert c == {
    'optim': {'lr': 1, 'schedule': {'warmup': 7}},
    'log': {'profile': True, 'every': 0.5},
    'a': 'b/c',
    'new': {'k': [1, 2]},
  }
  for assignment, facts in (
    ('optim=3', ('config.optim', 'lr')),
    ('a.b=3', ('config.a',)),
  ):
    with pytest.raises(UserError, match=naming(*facts)):
      config.override(c, [assignment])


@pytest.mark.parametrize(
  ('duration', 'expected'),
  [
    (dict(steps=7), 7),
    (dict(steps=1e4), 10_000),
    (dict(epochs=90), round(90 * 1_281_167 / 4096)),
    (dict(examples=10_000), 2),
    (dict(epochs=1e-9), 1),
    ({}, ('steps', 'epochs', 'examples')),
    (dict(steps=1, epochs=1), ("'steps': 1", "'epochs': 1", 'None')),
    (dict(steps=1.5), ('config.steps=1.5', 'int')),
    (dict(epochs=10**9), ('config.epochs=1000000000', 2**31 - 1)),
  ],
)
def test_total_steps(duration, expected):
  if isinstance(expected, int):
    assert config.total_steps(duration, 1_281_167, 4096) == expected
  else:
    with pytest.raises(UserError, match=naming(*expected)):
      config.total_steps(duration, 1_281_167, 4096)


def test_differences():
  old, new = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 1, 'c': 4}, 'e': 5}
  assert config.differences(old, new) == {'a.c': (2, 4), 'd': (3, None), 'e': (None, 5)}


def test_a_missing_file_names_one_that_exists(tmp_path):
  (tmp_path / 'vit_b16.py').write_text('')
  with pytest.raises(UserError, match=naming('vit_b61.py', 'vit_b16.py')):
    config.load(f'{tmp_path}/vit_b61.py')
  with pytest.raises(UserError, match=naming('vit_b16.py', 'get_config')):
    config.load(f'{tmp_path}/vit_b16.py')


def test_a_config_may_import_the_files_beside_it(tmp_path):
  for folder, value in (('a', 1), ('b', 2)):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / 'shared.py').write_text(f'STEPS = {value}\n')
    file = tmp_path / folder / 'mine.py'
    file.write_text(
      'import shared\ndef get_config(arg): return dict(steps=shared.STEPS)'
    )
    assert config.load(str(file)) == {'steps': value}
