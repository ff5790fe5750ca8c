"""Arguments, overrides, and the check of every key."""

import pytest

from tests.support import naming
from vit_jax import config, config_check
from vit_jax.errors import UserError
from vit_jax.train import schema


def test_arguments_take_the_type_of_their_default():
  arg = config.parse_arg(
    'variant=L/16,epochs=3,flag=true,lr=1e-3',
    debug={},
    variant='B/16',
    epochs=90,
    flag=False,
    lr=1.0,
    seed=0,
  )
  assert vars(arg) == dict(variant='L/16', epochs=3, flag=True, lr=1e-3, seed=0)


def test_debug_is_a_bundle_that_other_arguments_override():
  arg = config.parse_arg('batch=4,debug', debug=dict(batch=2, n=1), batch=64, n=9)
  assert vars(arg) == dict(batch=4, n=1)


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('epoch=3', ('epoch=3', 'epochs')),
    ('epochs=many', ('epochs', 'many', 'int')),
    ('debgu', ('debgu', 'debug')),
  ],
)
def test_bad_arguments(text, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    config.parse_arg(text, debug={}, epochs=90)


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


@pytest.mark.parametrize(
  ('assignment', 'facts'),
  [
    ('optim=3', ('config.optim', 'lr')),
    ('optim.lr.x=3', ('config.optim.lr',)),
    ('optim.lr=fast', ('config.optim.lr=fast', 'float')),
    ('seed=True', ('config.seed=True', 'int')),
  ],
)
def test_bad_overrides(assignment, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    config.override({'optim': {'lr': 0.1}, 'seed': 1}, [assignment])


def consumer(a: int, *, b: float = 1.0, c: str | None = None, given=None):
  return a, b, c, given


def test_bind_knows_the_consumer():
  whole = dict(a=1, b=2, c=None, type='x')
  config_check.bind('config.s', whole, consumer, ('given',), {'type': str})
  for section, facts in [
    (dict(a=1, bb=2), ('config.s.bb', 'b')),
    (dict(a=1, given=2), ('config.s.given', 'a', 'b', 'c')),
    (dict(b=1.0), ('config.s', 'a')),
    (dict(a=1.5), ('config.s.a=1.5', 'int')),
    (dict(a=True), ('config.s.a=True', 'int')),
    (dict(a=1, c=3), ('config.s.c=3', 'str', 'None')),
    ([], ('config.s', '[]', 'dict')),
  ]:
    with pytest.raises(UserError, match=naming(*facts)):
      config_check.bind('config.s', section, consumer, ('given',))


DIGITS = dict(source='digits', split='train', pp='value_range(-1, 1)', batch_size=8)
SCHEDULE = ('cooldown', 'decay', 'decay_until', 'staircase', 'warmup')


@pytest.mark.parametrize(
  ('assignment', 'facts'),
  [  # the key, or value, and what is there to choose from: all of it
    ('optim.schedule.warmupp=3', ('optim.schedule.warmupp', 'end', *SCHEDULE)),
    ('optim.schedule={"decay": "rsqrt", "end": 1}', ('end', 'timescale', *SCHEDULE)),
    ('optim.schedule.warmup=x', ("config.optim.schedule.warmup='x'", 'int')),
    ('optim.schedule.hold=0.5', ('config.optim.schedule.hold', 'decay_until')),
    ('task.per=example', ('config.task.per', 'mixup_mode')),
    ('optim.swa={"strat": 1}', ('config.optim.swa.strat', 'start', 'every')),
    ('optim.lr_rules=[1]', ('config.optim.lr_rules=[1]', 'tuple[str, float]')),
    ('data.source_options.a=1', ('config.data.source_options.a', [])),
    ('data.cache=decode', ('config.data.cache', "'decode'", 'raw', 'decoded')),
    ('data.source=[{"source": "digits", "wieght": 1}]', ('data.source[0].wieght',)),
    (
      'data.source=[{"source": "synthetic", "options": {"sise": 8}}]',
      ('data.source[0].options.sise', 'channels', 'num_classes', 'size'),
    ),
    ('data.pp=value_range(-1)', ('config.data.pp', 'value_range(-1)')),
    ('data.pp=resize(8)', ('config.data.pp', 'value_range')),
    ('task.loss=sofmax', ('config.task.loss', "'sofmax'", 'softmax', 'sigmoid')),
    ('mesh.fspd=2', ('config.mesh.fspd', 'fsdp', 'data', 'tensor')),
    ('evals.test.data.ppp=x', ('config.evals.test.data.ppp', 'pp', 'workers')),
    ('evals.test.data.pp=reszie(8)', ('config.evals.test.data.pp', 'reszie', 'resize')),
    ('evals.few.datasets.a.tset=x', ('evals.few.datasets.a.tset', 'test', 'source')),
    ('evals.few.datasets.a.source_options.b=1', ('a.source_options.b', [])),
    (
      'evals.tset.use_ema=True',
      ('config.evals.tset', 'use_ema', 'few', 'Did', '"test"'),
    ),
    ('weights=/a/b.npz', ("config.weights='/a/b.npz'", 'config.weights.KEY=VALUE')),
    ('evals.few.protocol=swep', ('config.evals.few.protocol', 'fixed', 'sweep')),
    ('model.backbone={"name": "vit"}', ('config.model.backbone', 'depth')),
    ('epochs=1', ('steps', 'epochs')),
  ],
)
def test_every_key_of_every_depth_is_known_before_anything_is_opened(assignment, facts):
  few = {'datasets': {'a': dict(source='digits', train='train', test='test')}}
  c = {
    'model': {'name': 'vit', 'variant': 'mu/4'},
    'data': dict(DIGITS),
    'optim': {'name': 'adamw', 'lr': 1e-3, 'schedule': {'decay': 'cosine'}},
    'steps': 1,
    'task': {'name': 'classify'},
    'evals': {
      'test': {'type': 'classification', 'data': dict(DIGITS)},
      'few': {'type': 'fewshot', 'pp': DIGITS['pp'], 'batch_size': 8, **few},
    },
  }
  schema.check(c)
  config.override(c, [assignment])
  with pytest.raises(UserError, match=naming(*facts)):
    schema.check(c)


@pytest.mark.parametrize(
  ('given', 'steps'),
  [
    (dict(steps=7), 7),
    (dict(epochs=90), round(90 * 1_281_167 / 4096)),
    (dict(examples=10_000), 2),
    (dict(epochs=1e-9), 1),
  ],
)
def test_total_steps(given, steps):
  assert config.total_steps(given, 1_281_167, 4096) == steps


@pytest.mark.parametrize(
  ('given', 'facts'),
  [
    ({}, ('steps', 'epochs', 'examples')),
    (dict(steps=1, epochs=1), ("'steps': 1", "'epochs': 1", 'None')),
    (dict(steps=-1), ('config.steps=-1', 0)),
  ],
)
def test_exactly_one_duration(given, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    config.total_steps(given, 10, 2)


def test_differences():
  old, new = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 1, 'c': 4}, 'e': 5}
  assert config.differences(old, new) == {
    'a.c': (2, 4),
    'd': (3, None),
    'e': (None, 5),
  }


def test_missing_file_names_the_known_ones(tmp_path):
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
