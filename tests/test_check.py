"""The one validator: keys, types, ranges, choices, before anything is opened."""

import contextlib
import inspect
import typing
from collections.abc import Sequence
from typing import Annotated, Literal

import pytest

from tests.support import naming
from vit_jax import check, config, evaluators, models, optim, sharding, tasks, tune
from vit_jax.check import Range, bind
from vit_jax.checkpoint import checkpoints
from vit_jax.contracts import Evaluator
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluators.probe import DataSet
from vit_jax.optim import averages, optimizers, schedules
from vit_jax.registry import Registry
from vit_jax.train import evaluations, loggers, schema

HUGE = '99999999999999999999'


def consumer(
  a: int,
  *,
  b: Annotated[float, Range(0, 1, '[)')] = 0.5,
  c: Literal['x', 'y'] | None = None,
  d: Sequence[tuple[str, Annotated[float, Range(0, 2, '(]')]]] = (),
  e: dict[str, Annotated[dict, check.Section(lambda *, f: Range)]] | None = None,
  own=None,
):
  return a, b, c, d, e, own


@pytest.mark.parametrize(
  ('section', 'facts'),
  [
    (dict(a=1, bb=2), ('config.s.bb', 'b')),
    (dict(a=1, own=2), ('config.s.own', 'a', 'b', 'c')),
    (dict(b=0.5), ('config.s', 'a')),
    (dict(a=1.5), ('config.s.a=1.5', 'int')),
    (dict(a=True), ('config.s.a=True', 'int')),
    (dict(a=1, b=1), ('config.s.b=1', '[0, 1)')),
    (dict(a=1, b='x'), ("config.s.b='x'", 'float', '[0, 1)')),
    (dict(a=1, c=3), ('config.s.c=3', 'x', 'y', 'None')),
    (dict(a=1, c='z'), ('config.s.c', "'z'", 'x', 'y')),
    (dict(a=1, d=[('k', 0)]), ('config.s.d[0][1]=0', '(0, 2]')),
    (dict(a=1, d=[1]), ('config.s.d=[1]', 'str', 'float')),
    (dict(a=1, e={'k': {'g': 1}}), ('config.s.e.k.g', 'f')),
    ([], ('config.s', '[]', 'section')),
  ],
)
def test_bind(section, facts):
  whole = dict(a=1, b=0, c=None, d=[['k', 2]], e={'k': {'f': 1}}, type='x')
  bind('config.s', whole, consumer, ('own',), {'type': str})
  with pytest.raises(UserError, match=naming(*facts)) as error:
    bind('config.s', section, consumer, ('own',))
  assert '\n' not in str(error.value)


def test_ranges_know_their_ends():
  def inside(value, rule):
    with contextlib.suppress(UserError):
      return not rule('x', value, {})

  for ends, low, high in (('[]', 1, 1), ('[)', 1, 0), ('(]', 0, 1), ('()', 0, 0)):
    r = Range(0, 1, ends)
    assert [bool(inside(x, r)) for x in (0, 1, 0.5)] == [low, high, 1]
  assert not inside(float('nan'), Range(0, 1))
  assert str(Range(1, 2, '(]', 'why')) == '(1, 2] (why)'
  assert str(Range(1)) == '[1, inf)'


def test_a_registry_loads_late_and_takes_entries():
  table = Registry('thing', {'bad': 'no_such_module:x', 'loads': 'json:loads'})
  assert list(table) == ['bad', 'loads']
  assert table['loads']('1') == 1
  with pytest.raises(UserError, match=naming('thing', "'laods'", 'loads')):
    table['laods']
  table.register('mine', consumer)
  assert table['mine'] is consumer
  assert list(table.signature('mine').parameters) == ['b', 'c', 'd', 'e', 'own']
  with pytest.raises(ValueError, match='loads'):
    table.register('loads', consumer)


def digits() -> dict:
  data = dict(source='digits', split='train', pp='value_range(-1, 1)', batch_size=8)
  return {
    'model': {'name': 'vit', 'variant': 'mu/4'},
    'data': dict(data),
    'optim': {'name': 'adamw', 'lr': 1e-3, 'schedule': {'decay': 'cosine'}},
    'steps': 1,
    'task': {'name': 'classify'},
    'evals': {
      'test': {'type': 'classification', 'data': dict(data)},
      'few': {
        'type': 'fewshot',
        'pp': data['pp'],
        'batch_size': 8,
        'datasets': {'a': dict(source='digits', train='train', test='test')},
      },
    },
  }


SCHEDULE = ('cooldown', 'decay', 'decay_until', 'staircase', 'warmup')

# (assignment, the whole key, and the allowed values or keys)
REFUSED = [
  # keys, at every depth
  ('optim.schedule.warmupp=3', ('optim.schedule.warmupp', 'end', *SCHEDULE)),
  ('optim.swa={"strat": 1}', ('config.optim.swa.strat', 'start', 'every')),
  ('data.source=[{"source": "digits", "wieght": 1}]', ('data.source[0].wieght',)),
  (
    'data.source=[{"source": "synthetic", "options": {"sise": 8}}]',
    ('data.source[0].options.sise', 'num_classes', 'size'),
  ),
  ('evals.few.datasets.a.tset=x', ('evals.few.datasets.a.tset', 'test', 'source')),
  ('evals.tset.use_ema=True', ('config.evals.tset', 'few', 'Did', '"test"')),
  ('model.backbone={"name": "vit"}', ('config.model.backbone', 'depth')),
  ('epochs=1', ('steps', 'epochs')),
  # types
  ('optim.schedule.warmup=x', ("config.optim.schedule.warmup='x'", 'int')),
  ('optim.wd_rules=[["a"]]', ('config.optim.wd_rules', 'float')),
  ('weights=/a/b.npz', ("config.weights='/a/b.npz'", 'config.weights.KEY=VALUE')),
  ('evals.few.seeds=[0,0]', ('config.evals.few.seeds=[0, 0]', 'twice')),
  # choices
  ('data.pp=value_range(2)', ('config.data.pp', 'value_range(2)')),
  ('evals.test.data.pp=reszie(8)', ('config.evals.test.data.pp', 'reszie', 'resize')),
  ('evals=None', ('config.evals=None', 'few', '--config.evals={}')),
  ('task.loss=sofmax', ('config.task.loss', "'sofmax'", 'softmax', 'sigmoid')),
  ('optim.schedule.decay=cosin', ('cosin', 'cosine')),
  ('optim.moment_dtype=abc', ('config.optim.moment_dtype', "'abc'", 'bfloat16')),
  ('checkpoint.best=test/nosuch', ('test/nosuch', 'top1')),
  # numbers
  (f'model.depth={HUGE}', ('config.model.depth', 64)),
  ('model.patch_size=(0,0)', ('config.model.patch_size[0]=0', 1)),
  ('model.head_bias_init=1e999', ('config.model.head_bias_init=inf', 'finite')),
  ('model.dropout=1', ('config.model.dropout', '[0, 1)')),
  ('optim.schedule={"decay": "multistep", "at": [0.5, 0.5]}', ('at', 'rising')),
  ('optim.lr_rules=[[".*",-1]]', ('config.optim.lr_rules[0][1]', 'config.tune')),
  ('optim={"name": "sgd", "lr": 1, "ema": 0.9, "swa": {}}', ('swa', 'ema', 'None')),
  ('data.workers=100000', ('config.data.workers=100000', 'processors')),
  ('data.pp=resize(100000)|value_range(-1,1)', ('resize(100000)', 'megapixels')),
  ('checkpoint.every=1.5', ('config.checkpoint.every=1.5', '1.0')),
  (f'data.source_options.a={"[" * 5000}', ('config.data.source_options.a', '[]')),
]


@pytest.mark.parametrize(
  ('assignment', 'facts'), REFUSED, ids=[row[0][:40] for row in REFUSED]
)
def test_nonsense_is_refused_before_anything_is_opened(assignment, facts):
  def checked(c):
    config.override(c, [assignment])
    schema.check(c)

  schema.check(digits())
  with pytest.raises(UserError, match=naming(*facts)) as error:
    checked(digits())
  assert '\n' not in str(error.value)


def test_an_evaluation_has_the_loss_of_the_task():
  c = digits()
  c['task']['loss'] = 'sigmoid'
  evals = schema.check(c)['evals']
  assert (evals['test']['loss'], 'loss' in evals['few']) == ('sigmoid', False)
  c['evals']['test']['loss'] = 'softmax'
  assert schema.check(c)['evals']['test']['loss'] == 'softmax'


def test_an_evaluator_of_ones_own_may_open_its_data_itself(monkeypatch, tmp_path):
  class Mine(Evaluator):
    def __init__(self, mesh, check_stop, model=None, *, data: dict):
      super().__init__(mesh, check_stop, model)
      self.data = data

  monkeypatch.setitem(evaluators.EVALUATORS.data, 'mine', Mine)
  c = digits()
  c['model']['num_classes'] = 10
  c['evals'] = {'test': {'type': 'mine', 'data': {'source': 'digits'}}}
  c = {**schema.check(c), 'resolved': {'class_names': None, 'image_shape': [8, 8, 1]}}
  evals = evaluations.build(c, tmp_path, None, None)
  assert evals['test'].evaluator.data['model_classes'] == 10
  evaluations.check_sizes(c, evals, any_size=False)
  assert evaluations.describe(evals) == []


def consumers():
  """Yields (name, signature) of every reader of a section."""
  yield from ((f'model {n}', models.signature(n)) for n in models.MODELS)
  yield from ((f'optim {n}', optim.signature(n)) for n in optimizers.OPTIMIZERS)
  tables = tasks.TASKS, tune.METHODS, evaluators.EVALUATORS, schedules.DECAYS
  yield from ((n, table.signature(n)) for table in tables for n in table)
  yield from ((n, sources.SOURCES.signature(n)) for n in sources.SOURCES)
  readers = schedules.make_schedule, averages.swa, sharding.make_mesh, DataSet
  readers += loggers.Log, checkpoints.Checkpoints, pipeline.TrainBatches
  yield from ((r.__name__, inspect.signature(r)) for r in readers)


RUN = {'lr', 'total_steps', 'host', 'hosts', 'model_classes'}  # passed by the run


def bare_ints(kind) -> bool:
  """Whether an annotation has an int without a range."""
  if kind is int:
    return True
  if typing.get_origin(kind) is Annotated:
    return not any(callable(r) for r in kind.__metadata__)
  return any(map(bare_ints, typing.get_args(kind)))


def test_every_whole_number_has_a_range():
  for name, signature in consumers():
    for key, p in signature.parameters.items():
      assert key in RUN or not bare_ints(p.annotation), f'{name}.{key}'


@pytest.mark.parametrize(
  ('value', 'facts'),
  [
    ({1}, ('config.x', 'set')),
    (10**30, ('config.x', 64)),
    (2**63, ('config.x', 64)),
    (float('nan'), ('config.x=nan', 'finite')),
    ([0, {'a': float('inf')}], ('config.x[1].a=inf', 'finite')),
  ],
)
def test_values_that_json_cannot_hold(value, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    check.check_json('config.x', value)


@pytest.mark.parametrize(
  ('key', 'keys', 'near'),
  [
    ('learning_rate', ['lr', 'wd'], 'lr'),
    ('weight_decay', ['lr', 'wd'], 'wd'),
    ('learning_rate', ['data', 'optim'], 'optim.lr'),
    ('num_workers', ['batch_size', 'workers'], 'workers'),
    ('max_epochs', ['data', 'epochs'], 'epochs'),
    ('Batch-Size', ['data'], 'data.batch_size'),
  ],
)
def test_the_usual_names_of_keys_are_understood(key, keys, near):
  with pytest.raises(UserError, match=naming(key, f'Did you mean "{near}"')):
    check.check_keys('config', {key: 1}, keys)
