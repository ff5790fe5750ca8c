"""The config file of docs/guides/extending.md trains: parts of one's own, no line changed."""

import json

import pytest

from tests.support import commands, naming, runs
from tests.support.documents import blocks
from vit_jax import config, evaluators, losses, models, tasks
from vit_jax.data import sources
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.tools import evaluate
from vit_jax.train import program, run, schema

PAGE = runs.ROOT / 'docs' / 'guides' / 'extending.md'


@pytest.fixture
def mine(tmp_path, monkeypatch):
  """Returns the page's config file; what it registers is gone afterwards."""
  tables = losses.LOSSES, tasks.TASKS, evaluators.EVALUATORS, sources.SOURCES
  tables += models.MODELS, registry.OPS
  for table in tables:
    monkeypatch.setattr(table, 'data', dict(table.data))
  runs.on_one_device(monkeypatch)
  path = tmp_path / 'mine.py'
  path.write_text('\n\n'.join(blocks(PAGE, 'py')))
  return path


def test_a_config_file_registers_its_parts(mine, tmp_path, monkeypatch, capsys):
  before = [(table, dict(table.data)) for table in (losses.LOSSES, sources.SOURCES)]
  c = config.load(f'{mine}:steps=2')
  c['model']['mlp_dim'] = 16
  _, rows = run.train(c, tmp_path / 'run')
  row = {k: v for row in rows for k, v in row.items()}
  assert 0.5 <= row['sure/confidence'] <= 1
  assert row['sure/examples'] == 64
  assert program.import_option(f'{mine}:steps=2') == f' --import {mine}'
  assert row['test/loss'] < 0.69  # the task's, poly: below the entropy of two classes
  # To another process its names are unknown, unless a tool is given the file.
  for table, ours in before:
    monkeypatch.setattr(table, 'data', ours)
  capsys.readouterr()
  args = evaluate.main, capsys, tmp_path / 'run', '--json'
  commands.assert_refused(*args[:2], args[2:], ("'poly'", '--import FILE.py'))
  code, out, _ = commands.run(*args, '--import', mine)
  assert code == 0
  assert json.loads(out)['loss'] == pytest.approx(row['test/loss'], rel=1e-5)


def test_its_keys_are_checked(mine):
  c = config.load(str(mine))
  for assignment, facts in (
    ('model.widht=8', ('config.model.widht', 'width')),
    ('model.name=edgs', ("'edgs'", 'edges')),
    ('task.rewrad=1', ('config.task.rewrad', 'reward')),
    ('evals.test.loss=ploy', ("'ploy'", 'poly')),
    ('task.loss=poly(epsilom=1)', ('config.task.loss poly.epsilom', 'epsilon')),
    ('task.loss=poly(epsilon="x")', ("config.task.loss poly.epsilon='x'", 'float')),
    ('task.loss=poly(1)', ('config.task.loss', 'poly(option=value)')),
    ('task.loss=poly(', ('config.task.loss', "'poly('")),
    ('data.source_options={"contrat": 1}', ('contrat', 'contrast')),
  ):
    wrong = config.load(str(mine))
    config.override(wrong, [assignment])
    with pytest.raises(UserError, match=naming(*facts)):
      schema.check(wrong)
  schema.check(c)
