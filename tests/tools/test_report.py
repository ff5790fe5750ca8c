"""The page of a run: whole, self-contained, and never in the way of the run."""

import html.parser
import json
import re
import shutil

import numpy as np
import pytest

from tests.support import commands, naming, runs
from vit_jax import main
from vit_jax.evaluators import predictions
from vit_jax.tools.report import __main__ as report
from vit_jax.tools.report import automatic, page
from vit_jax.tools.report import folder as report_folder
from vit_jax.train import status

pytestmark = pytest.mark.usefixtures('one_device')

EVIL = '</script><b onclick="x">&'


class Page(html.parser.HTMLParser):
  """The elements of a page, its data and the addresses that it would ask for."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self._in = [], [], [], ''
    self.feed(text)
    self.data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    self._in = tag

  def handle_data(self, data):
    if self._in not in ('script', 'style'):
      self.text.append(data)

  def handle_endtag(self, tag):
    self._in = ''


@pytest.fixture(scope='module')
def folder(short_run, tmp_path_factory):
  """A copy of the short run with an image that could not be read and odd names."""
  folder = tmp_path_factory.mktemp('report') / 'run <b>'
  shutil.copytree(short_run, folder)
  line = {'path': f'{EVIL}.jpg', 'reason': EVIL, 'source': 'x'}
  (folder / 'bad_images.jsonl').write_text(json.dumps(line) + '\n')
  config = json.loads((folder / 'config.json').read_text())
  config['resolved']['class_names'][3] = EVIL
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


def test_a_page_has_everything_and_asks_for_nothing(folder, capsys):
  code, out, error = commands.run(report.main, capsys, folder, '--json')
  assert (code, error) == (0, '')
  record = json.loads(out)
  assert record['left_out'] == []
  text = (folder / 'report.html').read_text()
  assert record['bytes'] == len(text.encode()) < 1_000_000
  found = Page(text)
  wanted = [v for k, v in found.attributes if k in ('src', 'href')]
  assert wanted
  assert all(v.startswith('data:') for v in wanted), 'the page asks a server'
  assert not re.search(r'@import|url\(|<link(?! rel="icon")', text)
  assert '<b onclick' not in text
  assert all(k != 'onclick' for k, _ in found.attributes)
  titles = [chart['title'] for chart in found.data['charts']]
  assert titles[:4] == ['Loss', 'Accuracy', 'Learning rate', 'Images per second']
  kept = predictions.read(folder)['test']
  cells = re.findall(r'<td title="(.*?), predicted (.*?)" [^>]*>(\d*)</td>', text)
  assert len(cells) == 100
  assert sum(int(n or 0) for *_, n in cells) == 360
  right = sum(int(n or 0) for true, answer, n in cells if true == answer)
  assert right == kept['right'][:, 0].sum()
  overlays = [v for k, v in found.attributes if k == 'class' and v == 'overlay']
  assert len(overlays) == 12  # mistakes, each with its attention
  shown = ' '.join(found.text)
  for word in ('Calibration', 'embedding', 'jaxlib', 'Run it again', f'{EVIL}.jpg'):
    assert word in shown, word


def test_runs_beside_each_other(folder, short_run, tmp_path, capsys):
  out = tmp_path / 'both.html'
  code, said, _ = commands.run(report.main, capsys, folder, short_run, '--out', out)
  assert code == 0
  assert out.as_uri() in said
  found = Page(out.read_text())
  assert found.data['runs'] == [folder.name, short_run.name]
  loss = found.data['charts'][0]['curves']
  assert {curve['run'] for curve in loss} == {0, 1}
  assert 'over 2 seeds' in ' '.join(found.text)  # their configs are the same


def test_what_is_damaged_is_left_out(short_run, tmp_path, capsys):
  folder = shutil.copytree(short_run, tmp_path / 'run')
  for name in ('predictions.npz', 'environment.json', 'status.json'):
    (folder / name).write_bytes(b'{')
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write('{"step": \n')
  code, out, _ = commands.run(report.main, capsys, folder)
  assert code == 0
  assert re.search(naming('predictions.npz', 'metrics.jsonl'), out)


def test_a_run_that_was_killed_is_interrupted(short_run, tmp_path):
  path = shutil.copytree(short_run, tmp_path / 'run')
  known = runs.status(path) | {'state': 'running'}
  (path / 'status.json').write_text(json.dumps(known))
  (run,) = report_folder.read([str(path)])
  assert page.state(run).startswith('interrupted')


def test_a_large_model_is_not_read_again_for_the_page(short_run):
  (run,) = report_folder.read([str(short_run)])
  assert automatic._is_quick(run)
  # As where a head alone is trained.
  parameters = {'parts': {'Transformer': 300_000_000, 'head': 1000}, 'trained': 1000}
  large = run._replace(starts=[run.starts[0] | {'parameters': parameters}])
  assert not automatic._is_quick(large)


def test_images_that_are_gone_are_left_out(short_run, tmp_path, capsys):
  folder = shutil.copytree(short_run, tmp_path / 'run')
  config = json.loads((folder / 'config.json').read_text())
  config['evals']['test']['data']['source'] = 'folder:no_such'
  (folder / 'config.json').write_text(json.dumps(config))
  code, out, _ = commands.run(report.main, capsys, folder)
  assert code == 0
  assert re.search(naming('pictures', 'no_such'), out)
  assert 'class="matrix"' in (folder / 'report.html').read_text()


ERRORS = [
  (('no_such_run',), ('no_such_run/config.json',)),
  (('nowhere',), ('nowhere/config.json',)),
  (('a', 'a'), ('twice',)),
  (('gs://bucket/run', '--open'), ('--open', '--out')),
  (('a', '--out', '/no/such/page.html'), ('/no/such',)),
]


@pytest.mark.parametrize(('args', 'facts'), ERRORS)
def test_errors_are_one_line(args, facts, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'no_such_run').mkdir()
  (tmp_path / 'a').mkdir()
  commands.assert_refused(report.main, capsys, args, facts)


@pytest.fixture
def finished(short_run, tmp_path, monkeypatch):
  """Returns what runs `vit_jax train` in a folder where it has finished."""
  folder = shutil.copytree(short_run, tmp_path / 'run')

  def run(capsys, *changes):
    changes = (*runs.SHORT, 'log.report=True', *changes)
    args = [*runs.flags(*changes), f'--workdir={folder}']
    return folder, *commands.run(main.main, capsys, *args)

  return run


def test_a_finished_run_writes_its_page(finished, capsys):
  folder, code, out, error = finished(capsys)
  assert (code, error) == (0, '')
  path = folder / 'report.html'
  assert path.as_uri() in out.splitlines()[-1]
  assert 'Most confident mistakes' in path.read_text()


def test_without_a_page_if_it_is_told_so(finished, capsys):
  folder, code, out, _ = finished(capsys, 'log.report=False')
  assert code == 0
  assert not (folder / 'report.html').exists()
  assert 'report.html' not in out


@pytest.mark.parametrize('error', [ValueError('some\nthing'), KeyboardInterrupt()])
def test_a_page_that_fails_is_one_line(finished, capfd, monkeypatch, error):
  def fail(*args):
    raise error

  monkeypatch.setattr(automatic.page, 'render', fail)
  folder, code, out, said = finished(capfd)
  assert code == 0
  assert re.search(naming('warning', 'page', f'vit_jax report {folder}'), said)
  assert said.count('\n') == 1
  assert 'report.html' not in out
  assert runs.status(folder)['exit'] == 0


def test_a_run_records_each_start(short_run, tmp_path):
  (start,) = status.read_starts(short_run)
  assert (start['step'], start['command'], start['platform']) == (0, None, 'cpu')
  assert start['packages'].keys() >= {'jax', 'flax', 'numpy'}
  total = sum(start['parameters']['parts'].values())
  assert total == start['parameters']['trained']
  assert total == runs.status(short_run)['trained_parameters']

  params = {'head': {'bias': np.zeros(3)}, 'body': np.zeros((2, 5))}
  for step in (0, 7):
    status.record_start(tmp_path, step, 'vit_jax train', params, params['head'], 5, {})
  first, second = status.read_starts(tmp_path)
  assert (first['step'], second['step']) == (0, 7)
  assert second['command'] == 'vit_jax train'
  assert second['parameters'] == {'parts': {'head': 3, 'body': 10}, 'trained': 3}
