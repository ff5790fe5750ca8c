"""The page of a run: whole, self-contained, and never in the way of the run."""

import html
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import types

import numpy as np
import pytest

from tests.support import commands, naming, runs
from vit_jax import main
from vit_jax.evaluators import predictions
from vit_jax.tools.report import __main__ as report
from vit_jax.tools.report import head, numbers, page, pictures
from vit_jax.tools.report.folder import Run
from vit_jax.train import status

pytestmark = pytest.mark.usefixtures('one_device')

EVIL = '</script><b onclick="x">&'


class Page(html.parser.HTMLParser):
  """The attributes, text and data of a page."""

  def __init__(self, text):
    super().__init__()
    self.attributes, self.text, self._in = [], [], ''
    self.feed(text)
    self.data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])

  def handle_starttag(self, tag, attrs):
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
  document = Page(text)
  addresses = [v for k, v in document.attributes if k in ('src', 'href')]
  assert addresses
  assert all(v.startswith('data:') for v in addresses), 'the page asks a server'
  assert not re.search(r'@import|url\(|<link(?! rel="icon")', text)
  assert '<b onclick' not in text
  assert all(k != 'onclick' for k, _ in document.attributes)
  titles = [chart['title'] for chart in document.data['charts']['curves']]
  assert titles[:4] == ['Loss', 'Accuracy', 'Learning rate', 'Images per second']
  stored = predictions.read(folder)['test']
  cells = re.findall(r'<td title="(.*?), predicted (.*?)" [^>]*>(\d*)</td>', text)
  assert len(cells) == 100
  assert sum(int(n or 0) for *_, n in cells) == 360
  right = sum(int(n or 0) for true, answer, n in cells if true == answer)
  assert right == stored['right'][:, 0].sum()
  pictures = [v for k, v in document.attributes if k == 'src']
  assert len({*pictures}) == 2 * 12  # mistakes, and where the model looked
  words = ' '.join(document.text)
  best = stored['right'][:, 0].mean()
  facts = (
    f'{best:.2%}',
    'wall time',
    'best step',
    'device hours (cpu)',
    'MiB',
    '95% interval',
  )
  for word in (
    'Calibration',
    'precision',
    'jaxlib',
    'Run it again',
    f'{EVIL}.jpg',
    *facts,
  ):
    assert word in words, word


def test_runs_beside_each_other(folder, short_run, tmp_path, capsys):
  out = tmp_path / 'both.html'
  code, text, _ = commands.run(report.main, capsys, folder, short_run, '--out', out)
  assert code == 0
  assert out.as_uri() in text
  document = Page(out.read_text())
  assert document.data['runs'] == [folder.name, short_run.name]
  charts = document.data['charts']['curves']
  assert all(len({curve['name'] for curve in x['curves']}) == 1 for x in charts)
  assert {curve['run'] for curve in charts[0]['curves']} == {0, 1}


CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'google-chrome'))), None)
# Left in the page: its errors, the sizes at 390 px, the labels of ticks, what keys show.
_LOOK = """<script>setTimeout(() => {
  const figure = document.querySelector('.chart'), out = {errors};
  const legend = () => figure.querySelector('.u-legend').textContent;
  out.charts = document.querySelectorAll('.chart canvas').length;
  out.wide = document.body.scrollWidth;
  out.before = legend();
  figure.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}));
  out.after = legend();
  figure.querySelector('button').click();
  out.button = figure.querySelector('button').textContent;
  const element = document.body.appendChild(document.createElement('pre'));
  element.id = 'seen';
  element.textContent = JSON.stringify(out);
}, 200)</script>"""
_ERRORS = """<script>const errors = [];
addEventListener('error', event => errors.push(event.message));
addEventListener('securitypolicyviolation', event => errors.push(event.blockedURI));
</script><style>body { width: 390px; }</style>"""


@pytest.mark.skipif(not CHROMIUM, reason='no Chromium is installed')
def test_a_browser_draws_the_page(folder, capsys, tmp_path):
  path = tmp_path / 'page.html'
  assert commands.run(report.main, capsys, folder, '--out', path)[0] == 0
  text = path.read_text().replace('<style>', f'{_ERRORS}<style>')
  charts = sum(map(len, Page(text).data['charts'].values()))
  path.write_text(text.replace('</body>', f'{_LOOK}</body>'))
  options = '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={tmp_path}'
  options += '--virtual-time-budget=5000', '--dump-dom', path.as_uri()
  result = subprocess.run([CHROMIUM, *options], capture_output=True, timeout=120)
  seen = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout.decode())[1]
  seen = json.loads(html.unescape(seen))
  assert seen['errors'] == []
  assert seen['charts'] == charts > 5
  assert seen['wide'] <= 390
  assert '–' in seen['before']
  assert '–' not in seen['after']
  assert seen['button'] == 'linear scale'


def test_damaged_files_are_left_out(short_run, tmp_path, capsys):
  folder = shutil.copytree(short_run, tmp_path / 'run')
  for name in ('predictions.npz', 'environment.json', 'status.json'):
    (folder / name).write_bytes(b'{')
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write('{"step": \n')
  code, out, _ = commands.run(report.main, capsys, folder)
  assert code == 0
  assert re.search(naming('predictions.npz', 'metrics.jsonl'), out)
  # Images that are gone take their pictures alone.
  shutil.copy(short_run / 'predictions.npz', folder)
  config = json.loads((folder / 'config.json').read_text())
  config['evals']['test']['data']['source'] = 'folder:no_such'
  (folder / 'config.json').write_text(json.dumps(config))
  code, out, _ = commands.run(report.main, capsys, folder)
  assert code == 0
  assert re.search(naming('pictures', 'no_such'), out)
  assert 'class="matrix' in (folder / 'report.html').read_text()


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


@pytest.mark.parametrize('error', [ValueError('some\nthing'), KeyboardInterrupt()])
def test_a_page_that_fails_is_one_line(finished, capfd, monkeypatch, error):
  def fail(*args):
    raise error

  monkeypatch.setattr(page, 'render', fail)
  folder, code, out, warning = finished(capfd)
  assert code == 0
  assert re.search(naming('warning', 'page', f'vit_jax report {folder}'), warning)
  assert warning.count('\n') == 1
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


# --- numbers ---------------------------------------------------------------------------


def a_run(name='a', rows=(), status=None, starts=(), predictions=None, **config):
  config = {'evals': {'test': {'type': 'classification'}}} | config
  config = {'resolved': {}, 'model': {'name': 'vit'}, 'data': {}, **config}
  parts = status or {}, list(rows), list(starts), [], predictions or {}, []
  return Run(None, name, config, *parts)


def test_curves_that_belong_together_share_a_chart():
  rows = [
    {'step': 1, 'train/loss': 2.0, 'train/lr': 0.1, 'train/skipped': 0},
    {'step': 2, 'train/loss': math.nan, 'train/lr': 0.1, 'train/skipped': 0},
    {'step': 2, 'test/loss': 1.5, 'test/top1': 0.5, 'test/examples': 10, 'other/a': 7},
    {'step': 4, 'test/loss': 1.5, 'test/top1': 0.5, 'test/examples': 10, 'other/a': 7},
    {'step': 4, 'once': 7, 'time/seconds': 7},
  ]
  charts = {chart['title']: chart for chart in numbers.charts([a_run(rows=rows)])}
  assert list(charts) == ['Loss', 'Accuracy', 'Learning rate', 'other/a']
  loss = {curve['name']: curve for curve in charts['Loss']['curves']}
  assert loss['train/loss']['y'] == [2.0, None]
  assert loss['test/loss']['x'] == [2, 4]
  assert charts['Accuracy']['percent']
  assert not charts['Loss']['percent']


def test_losses_of_a_detector_have_plain_names():
  losses = {f'train/loss_{part}': 1.0 for part in ('object', 'class', 'box')}
  rows = [{'step': step, **losses, 'train/positives': 3.5} for step in (1, 2)]
  charts = {chart['title']: chart for chart in numbers.charts([a_run(rows=rows)])}
  assert list(charts) == ['Parts of the loss', 'Positive regions per image']
  assert len(charts['Parts of the loss']['curves']) == 3


@pytest.mark.parametrize('warmup', [3, 3 / 1_003])
def test_the_schedule_is_drawn_from_the_config(warmup):
  rows = [{'step': step, 'train/lr': 7} for step in (500, 1_000)]
  optim = dict(lr=0.1, schedule={'decay': 'linear', 'warmup': warmup})
  run = a_run(rows=rows, optim=optim, resolved={'total_steps': 1_003})
  ((curve,),) = [chart['curves'] for chart in numbers.charts([run])]
  points = dict(zip(curve['x'], curve['y'], strict=True))
  # Update n uses step n - 1: the warmup of three steps is there, and the whole decay.
  expected = {1: 0, 4: 0.1, 1_003: 0.0001}
  assert {x: points[x] for x in expected} == pytest.approx(expected, rel=1e-3)
  assert 390 < len(points) < 410


def test_the_numbers_that_decide():
  evals = {
    'a': {'type': 'classification'},
    'b': {'type': 'coco'},
    'c': {'type': 'fewshot'},
  }
  rows = [
    {'step': 1, 'a/top1': 0.9, 'a/examples': 100, 'b/ap': 0.2, 'b/examples': 100},
    {'step': 2, 'a/top1': 0.5, 'a/examples': 100, 'b/ap': 0.3, 'b/examples': 100},
    {'step': 2, 'c/x_5shot': 0.7, 'c/x_5shot_std': 0.1, 'train/loss': 1.0},
  ]
  run = a_run(
    rows=rows, evals=evals, checkpoint={'best': 'a/top1'}, status={'best_step': 1}
  )
  # An interval for a share of images: Wilson's, by hand. An average precision has none.
  assert head.deciding(run) == [
    ('a/top1', '90.00%', '(82.6% to 94.5%)', 'at step 1, the best'),
    ('b/ap', '30.00%', '', 'measured last'),
    ('c/x_5shot', '70.00%', '± 10.00%', 'measured last'),
  ]
  # A run that was resumed after 10 s: its clock began anew.
  rows = [{'step': i, 'time/seconds': x} for i, x in enumerate((5.0, 10.0, 4.0, 20.0))]
  facts = head.facts(a_run(rows=rows, starts=[{'devices': 4, 'device': 'TPU'}]))
  assert facts['wall time'] == '0:00:30'
  assert facts['cost'] == '0.033 device hours (TPU)'


def test_sentences_about_a_run():
  start = {'parameters': {'parts': {'head': 10, 'body': 90}, 'trained': 12}}
  tune = {'method': 'lora', 'rank': 8}
  rows = [{'step': 1, 'train/loss': 2.0, 'test/loss': 1.0}]
  text_of = lambda **x: ' '.join(head.sentences(a_run(rows=rows, **x)))
  text = text_of(starts=[start], tune=tune, weights={'source': 'runs/a'})
  assert re.search(naming('lora', 'rank 8', '12 of 100', 'runs/a'), text)
  mixed = text_of(task={'label_smoothing': 0.1, 'mixup': 0.0, 'cutmix': 1.0})
  assert re.search(naming('label smoothing 0.1', 'cutmix 1', 'test/loss', '2'), mixed)
  assert 'test/loss' not in text_of(task={'label_smoothing': 0.0})
  text = text_of(model={'name': 'vit', 'variant': 'Ti/8', 'depth': 4})
  assert text.startswith('vit Ti/8 with depth 4 on ')


def test_paths_are_those_below_the_data(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run = a_run(
    data={'source': 'photos'}, evals={'val': {'data': {'source': 'folder:~/b'}}}
  )
  home = os.path.expanduser('~')
  for path, short in (
    (f'{tmp_path}/photos/val/a/1.png', 'val/a/1.png'),
    (f'{home}/b/2.png', '2.png'),
    ('/elsewhere/3.png', '/elsewhere/3.png'),
  ):
    assert run.shorten(path) == short


def test_runs_are_compared_by_image():
  one, other = (np.ones((100, 1), bool) for _ in range(2))
  one[:10], other[8:12] = False, False
  same = {'index': np.arange(100), 'label': np.zeros(100)}
  answers = [{**same, 'right': right} for right in (one, other)]
  rows = [[{'step': 1, 'test/top1': x, 'train/loss': 1}] for x in (0.9, 0.96)]
  runs = [
    a_run(rows=r, predictions={'test': a}) for r, a in zip(rows, answers, strict=True)
  ]
  # 8 images are wrong in the first alone, 2 in the second: b = 2, c = 8.
  error = 1.96 * math.sqrt((11 / 100 - 0.06**2) / 100)
  compared = lambda: {name: cells for name, *cells in head.compare_runs(runs)}
  table = compared()
  assert table['test/top1'] == [f'90.00%, -6.00 ± {100 * error:.2f}', '96.00% ★']
  assert table['train/loss'] == ['1', '1']
  answers[0]['index'] = np.arange(1, 101)  # other images
  assert compared()['test/top1'] == ['90.00%', '96.00% ★']


def test_the_most_confident_mistakes_come_first():
  answers = {
    'right': np.array([[True], [False], [False], [False], [False]]),
    'probability': np.array([[0.99], [0.4], [np.nan], [0.8], [0.6]]),
  }
  assert pictures.most_confident(answers, 2).tolist() == [3, 4]


def test_only_shares_of_images_have_an_interval():
  kinds = {'test': 'classification', 'masks': 'segmentation', 'boxes': 'coco'}
  values = {'test/top1': 0.5, 'masks/pixel_accuracy': 0.5, 'masks/mean_iou': 0.5}
  values |= {'boxes/ap': 0.5, **{f'{name}/examples': 10 for name in kinds}}
  values |= {'few/digits_5shot': 0.5, 'few/digits_5shot_std': 0.1}
  evals = {name: {'type': kind} for name, kind in {**kinds, 'few': 'fewshot'}.items()}
  run = types.SimpleNamespace(rows=[{'step': 1, **values}], evals=evals)
  texts = numbers.results(run)
  # Wilson's interval of 5 of 10.
  assert texts.pop('test/top1') == '50.00% (23.7% to 76.3%)'
  assert texts['few/digits_5shot'] == '50.00% ± 10.00%'
  assert not any('(' in text for text in texts.values())


def test_downsampling_keeps_extremes_ends_and_gaps():
  n = 100_000
  y = np.random.default_rng(0).normal(size=n)
  y[[31_337, 77_777]] = 50, -50
  y[60_000:61_000] = math.nan
  x, values = numbers.downsample(range(1, n + 1), y, 1200)
  assert len(x) <= 1200
  assert x == sorted(set(x))
  assert (x[0], x[-1]) == (1, n)
  points = dict(zip(x, values, strict=True))
  assert (points[31_338], points[77_778]) == (50, -50)
  assert any(math.isnan(value) for value in values)
  assert all(points[i] == y[i - 1] for i in x if not math.isnan(points[i]))
  assert numbers.downsample([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_precision_and_recall_of_planted_answers():
  label, predicted = [0, 0, 0, 1, 1, 2, -1], [0, 0, 1, 1, 0, 1, 2]
  assert numbers.class_rows(label, predicted, 'abcd'.__getitem__) == [
    ('a', '3', '66.7%', '66.7%', '66.7%'),
    ('b', '2', '33.3%', '50.0%', '40.0%'),
    ('c', '1', '–', '0.0%', '0.0%'),
  ]
  # Of many classes, those with the lowest F1.
  label = list(range(60))
  rows = numbers.class_rows(label, [*range(59), 0], str)
  assert len(rows) == 50
  assert [row[0] for row in rows if row[-1] != '100.0%'] == ['0', '59']


def test_ece_of_a_planted_case():
  # 15 bins: 0.9 is in the 14th, where 60 of 100 are right; 0.5 in the 8th, 30 of 50.
  confidence = [0.9] * 100 + [0.5] * 50 + [math.nan]
  right = [True] * 60 + [False] * 40 + [True] * 30 + [False] * 20 + [True]
  measured = numbers.calibrate(confidence, right)
  assert measured['ece'] == pytest.approx((100 * 0.3 + 50 * 0.1) / 150)
  rows = [(7 / 15, 8 / 15, 50, 0.5, 0.6), (13 / 15, 14 / 15, 100, 0.9, 0.6)]
  assert measured['rows'] == [pytest.approx(row) for row in rows]
  assert measured['confidence'] == pytest.approx(115 / 150)
  assert measured['accuracy'] == pytest.approx(90 / 150)
  assert numbers.calibrate([1.0, 1.0], [True, True])['ece'] == 0
  assert numbers.calibrate([0.0, 0.6], [False, True])['rows'][0][:2] == (0, 1 / 15)
  # An upper end belongs to its bin, (2/15, 3/15].
  assert numbers.calibrate([0.2], [True])['rows'][0][:2] == (2 / 15, 3 / 15)
  assert numbers.calibrate([math.nan], [True]) is None
