"""`vit_jax paper`: commands that can be run, verdicts that can go either way, one page."""

import csv
import re

import pytest

from tests.support import naming
from vit_jax import errors
from vit_jax.errors import RunError, UserError
from vit_jax.lab import paper_table
from vit_jax.lab.ablate import arguments as ablate_arguments
from vit_jax.lab.ablate import asked
from vit_jax.lab.paper import __main__ as paper
from vit_jax.lab.paper import claims, experiments, figures, page, seen, verdicts
from vit_jax.lab.paper.judges import data, inside, models, positions, shape, training
from vit_jax.lab.paper.seen import Seen
from vit_jax.tools.figures import arguments as figures_arguments
from vit_jax.train import arguments

CLAIMS = [claim for topic in claims.CLAIMS.values() for claim in topic]
# What an experiment writes: cell -> test accuracy, by seed.
TABLES = {
  'posemb': {
    'none': [0.7, 0.8],
    '1d': [0.95, 0.97],
    '2d': [0.96],
    'relative': [0.965],
  },
  'head': {'token': [0.97], 'gap': [0.96], 'gap-lower-lr': [0.97], 'map': [0.97]},
  'shape': {
    'base': [0.7],
    **{f'{line}-{n}': [0.7] for line in ('width', 'mlp', 'all') for n in (24, 96)},
    **{'depth-1': [0.5], 'depth-4': [0.9], 'patch-8': [0.5], 'patch-2': [0.8]},
  },
  'optimizer': {'adam': [0.9], 'sgd': [0.6]},
  'data_size': {
    f'{model}-{share}pct': [value]
    for model, values in (
      ('vit', (0.1, 0.2, 0.3, 0.6)),
      ('resnet', (0.3, 0.4, 0.4, 0.4)),
    )
    for share, value in zip((3, 10, 30, 100), values, strict=True)
  },
  'masked': {'scratch': [0.8], 'mean_color': [0.9]},
  'axial': {'full': [0.9], 'axial': [0.97], 'full-deeper': [0.91]},
}


_LARGER = ('depth-4', 'width-96', 'mlp-96', 'patch-2')


def write(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('w', newline='') as file:
    csv.writer(file).writerows(rows)


def write_table(out, name, cells):
  rows = [('cell', 'seed', 'parameters', 'gflops', 'test/top1', 'digits/digits_5shot')]
  for cell, values in cells.items():
    gflops = 2 if cell in _LARGER else 0.5
    rows += [(cell, i, 99, gflops, value, value / 2) for i, value in enumerate(values)]
  write(out / name / 'results.csv', rows)


@pytest.fixture
def out(tmp_path):
  """A folder in which everything was done, with invented numbers."""
  for name, cells in TABLES.items():
    write_table(tmp_path, name, cells)
  for name, line in (
    ('digits', '{"step": 1, "test/top1": 0.99}'),
    ('resolution', '{"step": 1, "val/top1": 0.98}'),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'metrics.jsonl').write_text(line + '\n')
  write(
    tmp_path / 'figures/distance.csv',
    [('layer', 'head', 'pixels'), (0, 0, 4.0), (0, 1, 15.0), (1, 0, 14.0)],
  )
  rows = [('patch_row', 'patch_column', 'row', *range(3))]
  for y in range(3):
    for x in range(3):
      for row in range(3):
        near = [1.0 - abs(row - y) - abs(column - x) for column in range(3)]
        rows.append((y, x, row, *near))
  write(tmp_path / 'figures/posemb.csv', rows)
  return tmp_path


@pytest.mark.parametrize('name', experiments.EXPERIMENTS)
def test_commands_are_those_of_the_tools(name, tmp_path):
  command = experiments.EXPERIMENTS[name].command(tmp_path)
  if command[0] == 'ablate':
    args = ablate_arguments.parse(command[1:])
    assert asked.cells(args, asked.ablation(args.name))
  else:
    _, config, workdir = arguments.parse(command[1:])
    assert workdir == str(tmp_path / name)
    assert config['log']['report'] is False
  assert experiments.shown(name, tmp_path).startswith(f'vit_jax {command[0]} ')


def test_figures_are_all_that_there_are(tmp_path):
  of_other_papers = {'slots'}  # DETR's
  assert set(figures.TITLES) == set(figures_arguments.NAMES) - of_other_papers
  for command in figures.commands(tmp_path).values():
    figures_arguments.parse(command, '')


def test_claims_name_what_is_done():
  for claim in CLAIMS:
    assert set(claim.experiments) <= set(experiments.EXPERIMENTS)
    assert set(claim.figures) <= set(figures.TITLES)
    names = re.findall(r'[A-Z]\w+', claim.where.partition('; ')[2])
    assert set(names) <= set(claims.READERS)
  used = {name for claim in CLAIMS for name in claim.experiments}
  assert used == set(experiments.EXPERIMENTS)
  assert {name for claim in CLAIMS for name in claim.figures} == set(figures.TITLES)


def judged(out):
  return {
    each.claim.judge: each.verdict
    for topic in page.judge(Seen(out)).values()
    for each in topic
  }


@pytest.mark.slow
def test_what_is_there_is_seen(out):
  found = judged(out)
  for judge in (
    *(models.works, models.sizes, models.no_order_of_its_own, data.inductive_bias),
    *(data.more_data, data.compute_of_pre_training, shape.depth, shape.patches),
    *(positions.positions_matter, positions.kinds_are_alike, shape.heads, shape.axial),
    *(
      training.optimizer,
      positions.few_shot_ranks,
      inside.global_at_once,
    ),
    *(inside.distance_grows, inside.near_patches_are_alike),
  ):
    assert found[judge] == verdicts.SEEN, judge
  assert found[training.masked] == verdicts.PARTLY  # labels for all were not compared
  assert found[shape.rates] == verdicts.NOT_SEEN  # 97 and 96 % of 360 are the same
  assert found[training.resolution] == verdicts.NOT_SEEN


# Other numbers, and the claims that are then no more seen.
OTHERWISE = {
  'posemb': (
    {'none': [0.96], '1d': [0.97], '2d': [0.8], 'relative': [0.9]},
    (positions.positions_matter, positions.kinds_are_alike),
  ),
  'head': ({**TABLES['head'], 'token': [0.5]}, (shape.heads,)),
  'shape': (
    {**TABLES['shape'], 'width-96': [0.95], 'patch-2': [0.7]},
    (shape.depth, shape.patches),
  ),
  'optimizer': ({'adam': [0.6], 'sgd': [0.6]}, (training.optimizer,)),
  'data_size': (
    {**TABLES['data_size'], 'vit-100pct': [0.11]},
    (data.inductive_bias, data.more_data),
  ),
  'masked': ({'scratch': [0.9], 'mean_color': [0.9]}, (training.masked,)),
  'axial': ({**TABLES['axial'], 'axial': [0.9]}, (shape.axial,)),
}


@pytest.mark.parametrize('name', OTHERWISE)
def test_what_is_not_there_is_not_seen(out, name):
  cells, wanted = OTHERWISE[name]
  write_table(out, name, cells)
  for judge in wanted:
    verdict, why = judge(Seen(out))
    assert verdict in (verdicts.NOT_SEEN, verdicts.PARTLY)
    assert why


@pytest.mark.slow
def test_without_results_a_claim_is_not_tested(tmp_path):
  for topic in page.judge(Seen(tmp_path)).values():
    for judged in topic:
      if judged.claim.experiments:
        assert judged.verdict == verdicts.NOT_TESTED
        assert 'no result' in judged.why


@pytest.mark.slow
def test_rank_correlation_has_the_closed_form():
  x, y = [1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0, 40.0]
  assert seen.rank_correlation(x, y) == pytest.approx(1 - 6 * 2 / (4 * 15))
  assert seen.rank_correlation(x, [-v for v in x]) == pytest.approx(-1)
  assert seen.rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)


def test_noise_is_two_standard_errors():
  assert seen.noise((0.5, 0.5), 10_000) == pytest.approx(2 * (0.5 / 10_000) ** 0.5)
  assert 0 < seen.noise((1.0, 1.0), 360) < 0.01  # not nothing
  assert verdicts.compare(0.9, 0.8, 360) == -verdicts.compare(0.8, 0.9, 360) == 1
  assert verdicts.compare(0.98, 0.97, 360) == 0


@pytest.fixture
def uncounted(monkeypatch):
  """Spares the page to count operations of eleven models; test_tools_inspect does."""
  monkeypatch.setattr(paper_table, '_exaflops', lambda model, epochs: 100.0)


@pytest.mark.usefixtures('uncounted')
def test_the_page_has_every_claim(out):
  html = page.render(Seen(out), {'posemb': 61.2}, {'axial': 'not <finite>'})
  for claim in CLAIMS:
    assert page.text(claim.text) in html
  assert '75.00 ± 7.07' in html  # none, over its two seeds
  assert '61 s' in html
  assert 'not &lt;finite&gt;' in html
  assert not re.search(r'(src|href)="(?!data:|#)', html)  # it asks no server
  assert '$' not in html


@pytest.mark.usefixtures('uncounted')
def test_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capfd):
  done = []

  def run(name, out):
    done.append(name)
    if name == 'head':
      raise errors.Diverged('the loss is not finite')
    return 0

  def draw(name, out):
    raise UserError(f'{name} needs a run')

  monkeypatch.setattr(experiments, 'run', run)
  monkeypatch.setattr(figures, 'draw', draw)
  code = paper.main(['--out', str(tmp_path), '--only', 'shape,head'])
  assert code == errors.Diverged.exit_code
  assert done == ['head', 'shape']
  printed = capfd.readouterr()
  assert 'head: the loss is not finite' in printed.err
  assert (tmp_path / 'paper.html').exists()
  assert (tmp_path / 'images/many').is_dir()
  assert len(list((tmp_path / 'images/few').iterdir())) == 8
  monkeypatch.setattr(experiments, 'run', lambda name, out: 1)  # cells that failed
  assert paper.main(['--out', str(tmp_path), '--only', 'shape']) == RunError.exit_code


def test_a_stop_ends_it(tmp_path, monkeypatch):
  def run(name, out):
    raise errors.Preempted('stopped')

  monkeypatch.setattr(experiments, 'run', run)
  with pytest.raises(errors.Preempted):
    paper.main(['--out', str(tmp_path)])
  with pytest.raises(UserError, match=naming('colour', 'posemb')):
    paper.main(['--out', str(tmp_path), '--only', 'colour'])
