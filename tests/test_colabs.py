"""Notebooks: stripped, short, and their code runs, with smaller parameters."""

import ast
import json
import re
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.support import runs
from tests.support.random_source import write_narrow_b16

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'colabs').glob('*.ipynb'))
# What replaces a notebook's parameters, and how many pictures it draws.
SMALL = {
  '1_predict_and_explain': (dict(CONFIG='digits:debug'), 5),
  '2_fine_tune_on_your_folder': (dict(PRETRAIN='digits:debug', STEPS=4), 4),
  '3_the_paper_in_miniature': (dict(PRETRAIN='digits:debug', TUNE_STEPS=2), 6),
  '4_few_shot_and_transfer': (dict(PRETRAIN='digits:debug', STEPS=2, SHOTS=(1, 2)), 2),
  '5_train_on_a_cloud_tpu': (
    dict(CONFIG='digits:debug,epochs=3', STOP_AT=20, MODELS=('vit:Ti/16',)),
    2,
  ),
}


def cells(path: Path) -> list[dict]:
  return json.loads(path.read_text(encoding='utf-8'))['cells']


def code(path: Path) -> list[tuple[str, list[str]]]:
  """Returns (source, tags) of the cells of code, without that which installs."""
  code = [c for c in cells(path) if c['cell_type'] == 'code']
  code = [(''.join(c['source']), c['metadata'].get('tags', [])) for c in code]
  return [(source, tags) for source, tags in code if 'install' not in tags]


def execute(path: Path, parameters: dict, monkeypatch) -> tuple[dict, list[np.ndarray]]:
  """Runs a notebook's code; returns its names, and pictures [H, W, 4] that it showed."""
  drawn: list[Figure] = []

  def show():
    drawn.extend(plt.figure(number) for number in plt.get_fignums())
    plt.close('all')

  monkeypatch.setattr(plt, 'show', show)
  names: dict = {}
  for source, tags in code(path):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, path.name, 'exec'), names)
    if last:
      value = eval(compile(ast.Expression(last.value), path.name, 'eval'), names)
      drawn.extend([value] if isinstance(value, Figure) else [])
    if 'parameters' in tags:
      assert parameters.keys() <= names.keys()
      names |= parameters
  assert not plt.get_fignums(), 'a figure that is not shown'
  return names, [_pixels(figure) for figure in drawn]


def _pixels(figure: Figure) -> np.ndarray:
  figure.set_dpi(60)
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())


def assert_finite(names: dict) -> None:
  """Asserts that the numbers that a notebook came to are finite."""
  arrays = {k: v for k, v in names.items() if isinstance(v, np.ndarray | jax.Array)}
  floats = {k: v for k, v in arrays.items() if v.dtype.kind == 'f'}
  assert floats
  for name, value in floats.items():
    assert np.isfinite(value).all(), name


@pytest.fixture
def workdir(tmp_path, monkeypatch):
  """A notebook's folder; plots are not smaller afterwards."""
  monkeypatch.chdir(tmp_path)
  runs.on_one_device(monkeypatch)
  with plt.rc_context():
    yield tmp_path
  plt.close('all')


def test_every_notebook_is_run():
  assert [path.stem for path in NOTEBOOKS] == sorted(SMALL)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_is_short_and_stripped(path):
  assert len(cells(path)) < 20
  assert sum('parameters' in tags for _, tags in code(path)) == 1
  for cell in cells(path):
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None
    if cell['cell_type'] == 'code':
      assert len(cell['source']) <= 20
      assert max(map(len, ''.join(cell['source']).splitlines())) <= 88


def test_all_clone_the_same_repository():
  text = [path.read_text(encoding='utf-8') for path in NOTEBOOKS]
  (repo,) = {re.search(r"REPO = '(https://github.com/\S+)'", x)[1] for x in text}
  url = re.search(r"URL = .*, '(https.*)'$", (ROOT / 'setup.py').read_text(), re.M)
  assert url is None or url[1] == repo
  for path, x in zip(NOTEBOOKS, text, strict=True):
    github = repo.replace('https://github.com', 'github')
    assert f'{github}/blob/main/colabs/{path.name}' in x


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, workdir, monkeypatch):
  parameters, number = SMALL[path.stem]
  names, pictures = execute(path, parameters, monkeypatch)
  assert len(pictures) == number
  for pixels in pictures:
    assert min(pixels.shape[:2]) > 60
    assert pixels[..., :3].std() > 5
  assert_finite(names)
  assert names['status']['state'] == 'finished'


@pytest.mark.slow
def test_published_weights_in_place_of_the_run(workdir, monkeypatch):
  # What a user of SOURCE gets, with a narrow model and two photographs.
  write_narrow_b16('narrow.npz')
  path = ROOT / 'colabs' / '1_predict_and_explain.ipynb'
  names, pictures = execute(path, dict(SOURCE='narrow.npz'), monkeypatch)
  assert len(pictures) == 5
  assert names['maps'].shape == (2, 14, 14)
  assert_finite(names)
