"""The scripts in benchmarks/: tables from results, and comparisons with PyTorch's side."""

import datetime
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax import cli, config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / 'benchmarks'

# Answers as input_torch and detection_torch do: a turn takes 10 ms.
WORKER = """
import json, sys
for line in sys.stdin:
  message = json.loads(line)
  if 'check' in message:
    reply = {'torch': '9'}
  elif 'build' in message:
    reply = {'transform': message['build'].get('transform'), 'params': 7}
  else:
    reply = {'wall': 0.01, 'cpu': 0.01}
  print(json.dumps(reply), flush=True)
"""


def script(name):
  spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def table(monkeypatch):
  module = script('table')

  def run(*args):
    monkeypatch.setattr(sys, 'argv', ['table.py', *map(str, args)])
    return module.main()

  module.run = run
  return module


def bench_record(date='2030-01-02T03:04:05+00:00', rate=1234.56, ratio=1.5, **row):
  row = {
    **{'model': 'vit:S/16', 'set': [], 'mode': 'train', 'dtype': 'float32'},
    **{'batch': 8, 'resolution': 224, 'error': None, 'best': True},
    **{'images_per_s': rate, 'mfu': 0.5},
    **({'timm': {'images_per_s': 10.04, 'ratio': ratio, 'cpu_ratio': 1.25}}),
    **row,
  }
  return {
    'tool': 'bench',
    'date': date,
    'command': 'python -m vit_jax.tools.bench',
    'machine': {'device': 'A CPU', 'platform': 'cpu', 'cores': 2, 'load': 0.1},
    'versions': {'jax': '1.2', 'numpy': '3'},
    'rows': [row, {**row, 'batch': 16, 'best': False}, {**row, 'error': 'full'}],
  }


def input_record():
  rates = {'images_per_s_per_core': 300.4}
  row = {'mode': 'train', 'pp': 'decode|flip_lr', **rates}
  row['torchvision'] = {**rates, 'ratio': 2, 'cpu_ratio': 3}
  return {**bench_record(), 'tool': 'input_pipeline', 'rows': [row]}


@pytest.fixture
def files(tmp_path):
  """A page with the two comments, and a folder of results."""
  page, results = tmp_path / 'speed.md', tmp_path / 'results'
  page.write_text('Before.\n<!-- benchmarks -->\n<!-- /benchmarks -->\nAfter.\n')
  results.mkdir()
  return page, results


def save(results, *records):
  for i, record in enumerate(records):
    (results / f'{i}.json').write_text(json.dumps(record))


def test_the_table_is_written_between_the_comments(table, files, capsys):
  page, results = files
  save(results, bench_record(), input_record())
  args = ('--page', page, '--results', results)
  assert table.run(*args, '--check') == 1
  assert f'{page}' in capsys.readouterr().out
  assert page.read_text().count('\n') == 4  # only looked at
  assert table.run(*args) == 0
  assert table.run(*args, '--check') == 0
  text = page.read_text()
  assert text.startswith('Before.\n<!-- benchmarks -->\n| model |')
  assert text.endswith('\n<!-- /benchmarks -->\nAfter.\n')
  row = '| `vit:S/16` | train | float32 | 8 | 224 | 1,235 | 50% | 10 | 1.5 | 1.25 | 1 |'
  assert row in text
  assert text.count('vit:S/16') == 1  # neither the smaller rate nor the one that failed
  assert r'| train | `decode\|flip_lr` | 300 | 300 | 2 | 3 | 1 |' in text
  assert '\n1. A CPU, 2 cores, 2030-01-02: jax 1.2; load before: 0.1. `python' in text


def test_the_newest_result_of_a_setting_counts(table, files):
  page, results = files
  newer = bench_record('2031-01-01T00:00:00+00:00', 999.4)
  other = bench_record(mode='forward', timm=None)
  save(results, newer, bench_record(), other)
  table.run('--page', page, '--results', results)
  text = page.read_text()
  assert '| train | float32 | 8 | 224 | 999 |' in text
  assert '1,235 | 50% |  |  |  |' in text  # the one that was not beside timm
  assert text.count('| train |') == 1


@pytest.mark.parametrize(
  'text', ['', '<!-- benchmarks -->', '<!-- /benchmarks -->\n<!-- benchmarks -->\n']
)
def test_a_page_without_the_comments_is_left_as_it_is(table, files, text):
  page, results = files
  save(results, bench_record())
  page.write_text(text)
  with pytest.raises(
    SystemExit, match=naming('<!-- benchmarks -->', '<!-- /benchmarks -->')
  ):
    table.run('--page', page, '--results', results)
  assert page.read_text() == text


def test_no_results(table, files):
  with pytest.raises(SystemExit, match=naming(files[1])):
    table.run('--page', files[0], '--results', files[1])


def test_the_results_that_are_kept_make_a_table(table):
  records = table.load(FOLDER / 'results')
  assert records
  text = table.render(records)
  for record in records:
    assert record['command'] in text
    assert '/home/' not in json.dumps(record)


def test_the_page_is_up_to_date(table):
  assert table.run('--check') == 0


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
  module = script('input_pipeline')
  worker = tmp_path / 'worker.py'
  worker.write_text(WORKER)
  monkeypatch.setattr(module, 'SCRIPT', worker)
  return module


def test_images_have_the_detail_of_photographs(pipeline, tmp_path):
  pipeline.make_images(tmp_path, 4)
  paths = sorted(tmp_path.glob('train/*/*.jpg'))
  assert [path.parent.name for path in paths] == ['class0'] * 2 + ['class1'] * 2
  for path in paths:
    with Image.open(path) as image:
      pixels, size = np.asarray(image), image.size
    assert 300 <= min(size) <= max(size) <= 700
    # ImageNet's files have 2 to 6 bits a pixel at a spread of about 60.
    assert 1 < 8 * path.stat().st_size / (size[0] * size[1]) < 6
    assert 30 < pixels.std() < 80


@pytest.mark.slow
def test_the_input_pipeline_is_compared(pipeline, tmp_path, capsys):
  out = tmp_path / 'result.json'
  argv = ['--torch-python', sys.executable, '--images', '6', '--batch', '4']
  argv += ['--batches', '2', '--rounds', '2', '--out', str(out)]
  assert cli.run(pipeline.main, argv) == 0
  assert 'images/s per core' in capsys.readouterr().out
  record = json.loads(out.read_text())
  assert record['tool'] == 'input_pipeline'
  assert record['versions']['torch'] == '9'
  assert '--torch-python PYTHON' in record['command']
  assert [row['mode'] for row in record['rows']] == list(pipeline.MODES)
  for row in record['rows']:
    theirs = row['torchvision']
    assert theirs['images_per_s'] == 8 / 0.01
    assert 0 < theirs['ratio_min'] <= theirs['ratio'] <= theirs['ratio_max']
    assert row['images_per_s_per_core'] <= row['images_per_s']
  # What it wrote is what the table reads.
  assert '| evaluate |' in script('table').render([record])


def test_bad_arguments_are_one_line(pipeline, capsys):
  assert cli.run(pipeline.main, ['--torch-python', 'no/python']) == 2
  assert 'no/python' in capsys.readouterr().err
  assert cli.run(pipeline.main, []) == 2
  assert '--torch-python' in capsys.readouterr().err


# -- detection.py ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_of_detection_is_compared(tmp_path, monkeypatch, capsys):
  module = script('detection')
  worker = tmp_path / 'worker.py'
  worker.write_text(WORKER)
  monkeypatch.setattr(module, 'SCRIPT', worker)
  small = {'num_queries': 4, 'width': 16, 'mlp_dim': 16, 'num_heads': 2}
  small |= {'encoder_depth': 1, 'decoder_depth': 1}
  small['backbone'] = dict(name='resnet', depths=(1, 1), widths=(32, 32), stem_width=8)
  monkeypatch.setattr(module, 'FIELDS', module.FIELDS | small)
  monkeypatch.setattr(module, 'PLACES', 4)
  argv = ['--torch-python', sys.executable, '--size', '32', '32', '--rounds', '2']
  assert cli.run(module.main, [*argv, '--objects', '3']) == 0
  out = capsys.readouterr().out
  assert 'transformers 0.01 s' in out
  assert 'parameters here, 7 there' in out
  assert cli.run(module.main, [*argv, '--objects', '5']) == 2
  assert '--objects 5' in capsys.readouterr().err


# -- slices.py -------------------------------------------------------------------------


def test_every_config_names_its_slices_and_was_compiled_for_them():
  slices = script('slices')
  kept = json.loads(slices.KEPT.read_text(encoding='utf-8'))
  said = {name: slices.slices(path) for name, path in config.recipes().items()}
  for name, variants in slices.VARIANTS.items():
    said |= {f'{name}:{variant}': named for variant, named in variants.items()}
  assert {name: tuple(rows) for name, rows in kept.items()} == said, (
    'name `Smallest slices: v3:AxB or v5e:CxD` in the docstring of a config and run '
    '.venv-tpu/bin/python benchmarks/slices.py NAME'
  )
  assert slices.SHOWN.read_text(encoding='utf-8') == slices.table(kept)
  for rows in kept.values():
    for row in rows.values():
      assert row['bytes'] <= row['hbm']


def test_a_slice_is_asked_of_the_inspector(monkeypatch, tmp_path, capsys):
  slices = script('slices')
  row = dict.fromkeys(slices.FIELDS, 1) | {'model': 'vit:B/16', 'paper': None}

  first, second = slices.slices(slices.ROOT / 'configs/vit_b16.py')
  fitting, why = {first}, 'error: it does not fit'

  def run(command, **_):
    fits = command[-2] in fitting
    tpu = {key: row[key] for key in slices.FIELDS if key != 'model'}
    out = json.dumps({'model': 'vit:B/16', 'tpu': tpu})
    return SimpleNamespace(
      returncode=not fits, stdout=out if fits else '', stderr=f'{why}\n'
    )

  monkeypatch.setattr(slices.subprocess, 'run', run)
  monkeypatch.setattr(slices, 'KEPT', tmp_path / 'slices.json')
  monkeypatch.setattr(slices, 'SHOWN', tmp_path / 'SLICES.md')
  monkeypatch.setattr(sys, 'argv', ['slices.py', 'vit_b16'])
  assert slices.main() == 1
  assert 'does not fit' in capsys.readouterr().out
  kept = json.loads(slices.KEPT.read_text())
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  assert kept['vit_b16'][first].pop('made') <= today  # midnight may pass
  assert kept == {'vit_b16': {first: row}}
  fitting |= {second}
  assert slices.main() == 0
  rows = json.loads(slices.KEPT.read_text())['vit_b16']
  assert rows[second]['refused'] == slices.smaller(second)
  why = 'error: libtpu is not installed'  # no refusal
  assert slices.main() == 1
  fitting |= {slices.smaller(second)}
  assert slices.main() == 1
  assert f'{slices.smaller(second)}: fits' in capsys.readouterr().out
  assert 'vit_b16' in slices.SHOWN.read_text()
