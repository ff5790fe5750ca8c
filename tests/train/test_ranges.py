"""Every number of a config has a range, checked before anything is opened."""

import importlib
import inspect
import re

import pytest

from tests.support import naming
from vit_jax import config, evaluators, models, optim, sharding, tasks, tune
from vit_jax.checkpoint import checkpoints
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluators import batches
from vit_jax.evaluators.features import DataSet
from vit_jax.optim import averages, optimizers, schedules
from vit_jax.train import metrics, ranges, schema

HUGE = '99999999999999999999'

# (assignment, whole key or op in the message, what is allowed)
REFUSED = [
  (f'epochs={HUGE}', 'config.epochs', ranges.INT32),
  ('epochs=1e300', 'config.epochs', ranges.INT32),
  ('epochs=1e999', 'config.epochs=inf', ranges.INT32),
  (f'model.depth={HUGE}', 'config.model.depth', 1000),
  ('model.depth=1001', 'config.model.depth', 1000),
  (f'model.num_classes={HUGE}', 'config.model.num_classes', ranges.INT32),
  (f'model.norm_eps={HUGE}', 'config.model.norm_eps', '(0, 1]'),
  ('model.norm_eps=-1.0', 'config.model.norm_eps', '(0, 1]'),
  ('model.patch_size=(0,0)', 'config.model.patch_size[0]', '[1, 4096]'),
  ('model.patch_size=(-4,-4)', 'config.model.patch_size[0]', '[1, 4096]'),
  ('model.head_bias_init=1e999', 'config.model.head_bias_init', '10000.0]'),
  ('model.dropout=1', 'config.model.dropout', '[0, 1)'),
  (f'task.cutmix={HUGE}', 'config.task.cutmix', '[0, 1000.0]'),
  ('task.mixup=1e999', 'config.task.mixup', '[0, 1000.0]'),
  ('optim.schedule.decay={}', 'decay', 'cosine'),
  ('optim.schedule.end=-1', 'config.optim.schedule.end', '[0, 1]'),
  ('optim.wd_rules=(1,2)', 'config.optim.wd_rules', 'float'),
  ('optim.wd_rules=[["a"]]', 'config.optim.wd_rules', 'float'),
  ('optim.lr_rules=(1,2)', 'config.optim.lr_rules', 'float'),
  ('optim.lr_rules=[[".*",1e999]]', 'config.optim.lr_rules[0][1]', 'config.tune'),
  ('optim.lr_rules=[[".*",-1]]', 'config.optim.lr_rules[0][1]', 'config.tune'),
  (f'optim.b1={HUGE}', 'config.optim.b1', '[0, 1)'),
  ('optim.b1=1.0', 'config.optim.b1=1.0', '[0, 1)'),
  ('optim.b1=-1.0', 'config.optim.b1=-1.0', '[0, 1)'),
  ('optim.b2=1.5', 'config.optim.b2', '[0, 1)'),
  ('optim.eps=1e999', 'config.optim.eps=inf', '(0, 1]'),
  ('optim.eps=-1e999', 'config.optim.eps=-inf', '(0, 1]'),
  ('optim.lr=1e999', 'config.optim.lr', '(0, 3.4e+38]'),
  ('optim.wd=1e18', 'config.optim.wd', '10000.0]'),
  ('data.workers=100000', 'config.data.workers=100000', 'processors'),
  ('data.workers=0', 'config.data.workers=0', ranges.WORKERS),
  (f'data.batch_size={HUGE}', 'config.data.batch_size', 2**24),
  (f'evals.test.data.batch_size={HUGE}', 'config.evals.test.data.batch_size', 2**24),
  ('data.prefetch=100000', 'config.data.prefetch', 1024),
  ('data.pp=resize(100000)|value_range(-1,1)', 'resize(100000)', 'megapixels'),
  (f'data.pp=resize({HUGE})|value_range(-1,1)', 'resize', HUGE),
  (f'data.pp=resize({"-" * 5000}1)|value_range(-1,1)', 'config.data.pp', 'op'),
  (f'data.pp=resize({"(" * 5000})|value_range(-1,1)', 'config.data.pp', 'op'),
  ('data.pp=resize_small(8001)|value_range(-1,1)', 'smaller_size', 8000),
  ('data.pp=value_range(-1e400, 1)', 'config.data.pp', 'finite'),
  ('seed=-1', 'config.seed=-1', 2**63 - 1),
  ('mesh.data=-2', 'config.mesh.data=-2', -1),
  ('log.every=0', 'config.log.every=0', 1),
  ('checkpoint.every=1e999', 'config.checkpoint.every=inf', ranges.INT32),
  ('checkpoint.best=test/nosuch', 'test/nosuch', 'top1'),
  ('optim.nobody=1e999', 'config.optim.nobody=inf', '3.4e+38'),
  (f'data.source_options.a={"[" * 5000}', 'config.data.source_options.a', '[]'),
]


def digits() -> dict:
  data = dict(source='digits', split='train', pp='value_range(-1, 1)', batch_size=8)
  return {
    'model': {'name': 'vit', 'variant': 'mu/4'},
    'data': dict(data),
    'optim': {'name': 'adamw', 'lr': 1e-3},
    'epochs': 1,
    'task': {'name': 'classify'},
    'evals': {'test': {'type': 'classification', 'data': dict(data)}},
  }


@pytest.mark.parametrize(
  ('assignment', 'key', 'allowed'), REFUSED, ids=[row[0][:40] for row in REFUSED]
)
def test_nonsense_is_refused(assignment, key, allowed):
  c = digits()
  config.override(c, [assignment])
  with pytest.raises(UserError, match=naming(key, allowed)) as error:
    schema.check(c)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('value', ['nan', 'inf', '1e999'])
def test_a_files_arguments_are_finite(value):
  with pytest.raises(UserError, match=naming('epochs', value, 'float')):
    config.parse_arg(f'epochs={value}', debug={}, epochs=90.0)


def test_no_more_steps_than_are_counted():
  with pytest.raises(UserError, match=naming('config.epochs=2000000', ranges.INT32)):
    config.total_steps({'epochs': 2_000_000}, 10**9, 8)


def declared_numbers():
  """Yields the path of every number that some consumer takes."""

  def of(where, signature, without=()):
    for key, p in signature.parameters.items():
      kind = str(p.annotation)
      if re.search(r'\b(int|float)\b', kind) and key not in without:
        rules = '[0][1]' if 'tuple[str, float]' in kind else ''
        items = '[0]' if re.search(r'(list|tuple)\[(int|float)', kind) else ''
        yield f'{where}.{key}{rules or items}'

  for name in models.MODELS:
    yield from of('model', models.signature(name))
  given = (*optim.RUN, 'lr')
  for name in optimizers.OPTIMIZERS:
    yield from of('optim', optim.signature(name))
  for consumer in (schedules.make_schedule, *schedules.DECAYS.values()):
    yield from of('optim.schedule', inspect.signature(consumer), given)
  yield from of('optim.swa', inspect.signature(averages.swa), given)
  for name in tasks.TASKS:
    yield from of('task', tasks.signature(name))
  for name in tune.METHODS:
    yield from of('tune', tune.signature(name))
  for name in evaluators.EVALUATORS:
    yield from of('evals.x', evaluators.signature(name))
  yield from of('evals.x.datasets.y', inspect.signature(DataSet))
  yield from of('checkpoint', inspect.signature(checkpoints.Checkpoints))
  yield from of('log', inspect.signature(metrics.Log))
  yield from of('mesh', inspect.signature(sharding.make_mesh))
  batches = inspect.signature(pipeline.TrainBatches)
  for where in ('data', 'evals.x.data'):
    yield from of(where, batches, ('host', 'hosts', 'model_classes'))
  for module, name, _ in sources.SOURCES.values():
    source = getattr(importlib.import_module(module), name)
    for where in ('data.source_options', 'data.source[0].options'):
      yield from of(where, inspect.signature(source))
  yield from (f'data.source[0].{key}' for key in ('weight', 'label_offset'))
  yield from ('steps', 'epochs', 'examples', 'seed', 'max_bad_steps', 'evals.x.every')


def test_every_number_has_a_range():
  paths = set(declared_numbers())
  assert len(paths) > 80
  assert [path for path in sorted(paths) if ranges.of(path) is ranges.ANY] == []


def test_a_batch_that_is_mostly_padding(monkeypatch):
  mesh = sharding.make_mesh()
  data = dict(source='digits', split='test', pp='value_range(-1, 1)')
  with pytest.raises(UserError, match=naming('batch_size=1000000', 360, 4096)):
    batches.open_batches(mesh, **data, batch_size=1_000_000)
  # As many as the machine has memory for.
  monkeypatch.setattr(batches.machine, 'memory', lambda: 90_000)
  with pytest.raises(UserError, match=naming('batch_size=2048', 'GiB', 'prefetch=2')):
    batches.open_batches(mesh, **data, batch_size=2048)
