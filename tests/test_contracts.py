"""Every entry of every table keeps the contract of its kind."""

import inspect
import typing

import pytest

from vit_jax import contracts, evaluators, models, tasks, tune
from vit_jax.data import sources
from vit_jax.data.sources.base import Source
from vit_jax.models import vit
from vit_jax.models.base import OUTPUTS, Family
from vit_jax.optim.optimizers import OPTIMIZERS
from vit_jax.optim.schedules import DECAYS
from vit_jax.tune.method import Method
from vit_jax.weights import export, formats

TABLES = {
  contracts.Task: tasks.TASKS,
  contracts.Evaluator: evaluators.EVALUATORS,
  Method: tune.METHODS,
}
ENTRIES = [(kind, table[name]) for kind, table in TABLES.items() for name in table]


def keeps(cls: type, contract: type) -> None:
  """Checks a class's attributes, methods and their parameters, names and all."""
  for name, kind in typing.get_type_hints(contract, include_extras=True).items():
    if typing.get_origin(kind) is typing.ClassVar:
      assert hasattr(cls, name), name
  for name, method in vars(contract).items():
    if not callable(method) or method.__module__ != contract.__module__:
      continue  # a property, or made by Protocol
    theirs = inspect.signature(getattr(cls, name)).parameters
    for key, p in inspect.signature(method).parameters.items():
      if p.kind is not p.VAR_KEYWORD:
        assert key in theirs, f'{cls.__name__}.{name} lacks {key}'
    free = [
      key
      for key, p in theirs.items()
      if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]
    ours = list(inspect.signature(method).parameters)
    assert free == ours[: len(free)], f'{cls.__name__}.{name}'


@pytest.mark.parametrize(
  ('contract', 'cls'), ENTRIES, ids=[cls.__name__ for _, cls in ENTRIES]
)
def test_entries(contract, cls):
  keeps(cls, contract)


@pytest.mark.parametrize('name', models.MODELS)
def test_models(name):
  family = models.family(name)
  assert isinstance(family, Family)
  assert family.outputs in OUTPUTS
  parameters = inspect.signature(family.model.__call__).parameters.values()
  options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
  expected = list(inspect.signature(vit.ViT.__call__).parameters.values())[2:]
  kinds = lambda ps: [(p.name, p.kind, p.default) for p in ps]
  assert kinds(options) == kinds(expected)
  for fields in family.tiny:
    assert models.build(name, **fields) is not None


def test_sources():
  for name in sources.SOURCES:
    cls = sources.SOURCES[name]
    parameters = list(inspect.signature(cls).parameters.values())
    assert [p.name for p in parameters[:2]] == ['target', 'split'], name
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[2:]), name
    if isinstance(cls, type):
      keeps(cls, Source)


def test_tasks_name_outputs():
  assert all(tasks.TASKS[name].OUTPUTS in OUTPUTS for name in tasks.TASKS)


def test_metrics_are_declared():
  for name in evaluators.EVALUATORS:
    metrics = evaluators.EVALUATORS[name].METRICS
    assert all(isinstance(m, evaluators.Metric) for m in metrics.values()), name


def test_optimizers_and_decays_take_keywords_alone():
  for table in (OPTIMIZERS, DECAYS):
    for name in table:
      positional = inspect.signature(table[name]).parameters.keys()
      assert positional == table.signature(name).parameters.keys(), name


def test_formats():
  for entry in formats.all_formats():
    assert entry.family in models.MODELS
    assert isinstance(entry, formats.Format)
    assert isinstance(entry.name, str)
    assert isinstance(entry.marker, str | tuple)
    assert not entry.writer or entry.to in export.TO
