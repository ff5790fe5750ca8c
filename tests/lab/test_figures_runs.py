"""Figures of runs, beside the points that papers published."""

import json

import pytest

from tests.support import runs, stand_in
from tests.support.figures import draw, run, small_figures  # noqa: F401
from vit_jax.lab import figures, published


def test_the_papers_tables_agree_with_one_another():
  # The averages that it prints beside, in Table 7.
  rows = {(row.name, row.epochs): row for row in published.TABLE_6}
  assert rows['R50x1', 7].average == pytest.approx(89.33, abs=0.005)
  assert rows['R152x2', 7].average == pytest.approx(94.01, abs=0.025)
  # Tables 5 and 6 print the same ImageNet results of JFT models.
  longest = {row.name: row.imagenet for row in published.TABLE_6}
  for name, values in published.TABLE_5.items():
    # Except H/14: 88.04 in one, 88.08 in the other.
    assert values[-1] == pytest.approx(longest[name], abs=0.05 * (name == 'ViT-H/14'))


MODEL = dict(name='vit', patch_size=[4, 4], width=16, depth=2, mlp_dim=32, num_heads=2)
MODEL |= dict(classifier='gap')


@pytest.fixture
def make(tmp_path):
  """Makes the folder of a finished run, without running it."""

  def make(name, top1, source='digits', weights='', examples=1_000, seed=0):
    config = {
      'model': MODEL,
      'weights': {'source': str(weights)} if weights else {},
      'data': dict(source=source, batch_size=8),
      'evals': runs.EVALS,
      'seed': seed,
    }
    rows = [{'step': 50, 'test/top1': 0.1}]
    rows += [{'step': 100, 'test/loss': 1, 'test/top1': top1}]
    folder = tmp_path / name
    stand_in.write_run(folder, config, *rows, total_steps=100, num_examples=examples)
    (folder / 'checkpoints').mkdir()
    status = {'step': 100, 'state': 'finished'}
    (folder / 'status.json').write_text(json.dumps(status))
    return folder

  return make


def test_compute_of_runs_is_that_of_their_pre_training(make, tmp_path):
  first, again = make('a', 0.9), make('b', 0.8, seed=1)
  tuned = make('tuned', 0.7, weights=first, source='folder:x')
  rows = draw('compute', first, again, tuned, out=tmp_path / 'out')
  paper = [row for row in rows if row['source'] != 'runs']
  assert len(paper) == 2 * len(published.TABLE_6)
  N, D, F, L, K = 16, 16, 32, 2, 10
  products = N * 16 * D + L * (4 * N * D * D + 2 * N * N * D + 2 * N * D * F) + D * K
  images = 100 * 8
  exaflops = 3 * 2 * products * images / 1e18
  best = make('best', 0.7, weights=f'{first}@50')
  assert figures.read(str(best)).exaflops == pytest.approx(exaflops / 2)
  ours = [row for row in rows if row['source'] == 'runs']
  assert [float(row['x']) for row in ours] == pytest.approx([exaflops] * 2, rel=1e-5)
  accuracies = sorted((row['accuracy'], row['std'], row['runs']) for row in ours)
  assert accuracies == [('70.00', '', '1'), ('85.00', '7.07', '2')]
  # A copy is not another seed, nor a run of another recipe another seed of this one.
  copy, other = make('copy', 0.9), make('other', 0.6, source='synthetic')
  rows = draw('compute', first, copy, other, out=tmp_path / 'more')
  counts = [(row['std'], row['runs']) for row in rows if row['source'] == 'runs']
  assert counts == [('', '1')] * 2


def test_data(make, tmp_path):
  folders = [make(f'n{n}', top1, examples=n) for n, top1 in ((100, 0.5), (1_000, 0.8))]
  rows = draw('data', *folders, out=tmp_path / 'out')
  ours = [(r['x'], r['accuracy']) for r in rows if r['source'] == 'runs']
  assert ours == [('100', '50.00'), ('1000', '80.00')]
  assert len(rows) - 2 == 14  # Table 5 has no H/14 on ImageNet alone


def test_runs_that_cannot_be_compared(make, tmp_path, capsys):
  a, b = make('a', 0.9), make('b', 0.9, weights='ViT-B_16.npz')
  out = ('--out', tmp_path / 'out')
  assert run('compute', a, '--metric', 'test/top5', *out) == 2
  assert 'test/top1' in capsys.readouterr().err
  assert run('compute', b, *out) == 2
  assert 'ViT-B_16.npz' in capsys.readouterr().err
  assert run('compute', a, b, *out) == 0
  assert f'{b} is left out' in capsys.readouterr().out
