"""Trains the experiments of the ViT paper in miniature, and judges its claims by them.

  vit_jax paper [--out DIR] [--only posemb,head]

It takes bundled data, and about twenty minutes on two cores; finished runs are only read.
DIR/paper.html sets the claims beside the numbers that were measured.
"""

import base64
import importlib.resources
import io
import math
import time
from typing import NamedTuple

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax import files
from vit_jax.errors import UserError, choose
from vit_jax.lab import runner, sweep, table
from vit_jax.tools import out_folder
from vit_jax.tools.figures.drawn import load_plots
from vit_jax.train import program
from vit_jax.version import __version__

SEEN, NOT_SEEN, NO_RESULT = 'seen', 'not seen', 'no result'


class Claim(NamedTuple):
  """A claim: the first cell of an ablation is better than the second, or as good.

  Attributes:
    text: in our words.
    where: in the paper, arXiv 2010.11929.
    better: whether the first is better; else they are as good as each other.
    second: a cell, or an accuracy.
    examples: images of the test split.
  """

  text: str
  where: str
  ablation: str
  first: str
  better: bool
  second: str | float
  metric: str = 'test/top1'
  examples: int = 360


_FEW = dict(metric='transfer/digits_5shot')
CLAIMS = (
  Claim(
    'A plain Transformer on a sequence of image patches classifies images well.',
    *('abstract', 'resolution', '16px', True, 0.95),
  ),
  Claim(
    'Fine-tuning at a higher resolution helps.',
    *('section 3.2', 'resolution', '32px', True, '16px'),
  ),
  Claim(
    'Position embeddings matter.',
    *('appendix D.4, Table 8', 'posemb', '1d', True, 'none'),
  ),
  Claim(
    'Positions in two dimensions are no better than in one.',
    *('appendix D.4, Table 8', 'posemb', '1d', False, '2d'),
  ),
  Claim(
    'A class token and the mean of all patches are as good as each other.',
    *('appendix D.3, Figure 9', 'head', 'token', False, 'gap'),
  ),
  Claim(
    'The mean of all patches needs a smaller learning rate.',
    *('appendix D.3, Figure 9', 'head', 'gap-lower-lr', True, 'gap'),
  ),
  Claim(
    'Scaling depth helps more than scaling width.',
    *('appendix D.2, Figure 8', 'shape', 'depth-4', True, 'width-96'),
  ),
  Claim(
    'Smaller patches are better without more parameters.',
    *('appendix D.2, Figure 8', 'shape', 'patch-2', True, 'base'),
  ),
  Claim(
    'Axial attention is better, at more compute.',
    *('appendix D.6, Figure 13', 'axial', 'axial', True, 'full'),
  ),
  Claim(
    'Trained on little data, a ViT is behind a ResNet of equal compute.',
    *('section 4.3, Figures 3 and 4', 'data_size', 'resnet-3pct', True, 'vit-3pct'),
    examples=1000,
  ),
  Claim(
    'With much data it overtakes.',
    *('section 4.3, Figures 3 and 4', 'data_size', 'vit-100pct', True, 'resnet-100pct'),
    examples=1000,
  ),
  Claim(
    'More data to pre-train on makes a ViT that transfers better.',
    *('section 4.3, Figure 3', 'data_size', 'vit-100pct', True, 'vit-3pct'),
    **_FEW,
  ),
  Claim(
    'Pre-trained with Adam, ResNets transfer better than with SGD.',
    *('appendix D.1, Table 7', 'optimizer', 'adamw', True, 'sgd'),
    **_FEW,
  ),
  Claim(
    'Pre-training by masked patch prediction is better than training from scratch.',
    *('section 4.6, appendix B.1.2', 'masked', 'mean_color', True, 'scratch'),
  ),
)
_CELLS = {
  'masked': ['--cells', 'scratch,mean_color']
}  # of those that are not trained whole


def main(argv: list[str]) -> int:
  """Trains, judges and writes the page; returns the exit code."""
  names = list(dict.fromkeys(claim.ablation for claim in CLAIMS))
  title, *_ = __doc__.split('\n')
  parser = cli.Parser(
    'vit_jax paper', description=title, epilog=__doc__.split('\n\n')[2]
  )
  add = parser.add_argument
  add('--out', metavar='DIR', default='runs/paper', help='default: %(default)s')
  add(
    '--only', metavar='NAME,NAME', help=f'only these ablations, of {", ".join(names)}'
  )
  args = parser.parse_args(argv)
  out = out_folder.check(args.out)
  if args.only:
    names = [choose('ablation', name, names) for name in args.only.split(',')]
  results, seconds = {}, {}
  for name in names:
    words = ['--ablation', name, *_CELLS.get(name, [])]
    grid = sweep.plan(sweep.parse(words), out / name)
    start, command = time.perf_counter(), ' '.join(['vit_jax sweep', *words])
    print(f'\n== {command}', flush=True)
    results[name] = runner.run(grid, command, lambda line: print(line, flush=True))
    seconds[name] = time.perf_counter() - start
  judged = [
    (claim, *judge(claim, results[claim.ablation]))
    for claim in CLAIMS
    if claim.ablation in results
  ]
  columns = {
    'claim': lambda x: x[0].text,
    'in the paper': lambda x: x[0].where,
    'here': lambda x: x[1],
    'measured': lambda x: x[2],
  }
  print('\n' + table.markdown('The ViT paper in miniature', judged, columns, ()))
  files.replace(out / 'paper.html', _page(judged, results, seconds))
  print(f'written: {out / "paper.html"}', flush=True)
  return next((r.exit_code for r in results.values() if r.exit_code), 0)


def judge(claim: Claim, results: runner.Results) -> tuple[str, str]:
  """Returns (verdict, the numbers behind it); a difference counts beyond `noise`."""

  def value(cell):
    rows = [row for row in results.rows() if row['cell'] == cell]
    mean = table.mean(rows, claim.metric)
    return mean and mean.mean

  first, second = value(claim.first), claim.second
  if isinstance(second, str):
    second = value(second)
  if first is None or second is None:
    return NO_RESULT, ''
  least = noise(first, second, claim.examples)
  seen = first - second > least if claim.better else abs(first - second) <= least
  return SEEN if seen else NOT_SEEN, (
    f'{claim.first} {100 * first:.1f} %, {claim.second} {100 * second:.1f} % of '
    f'{claim.metric}; {100 * least:.1f} points count'
  )


def noise(first: float, second: float, examples: int) -> float:
  """Returns two standard errors of the difference of two accuracies.

  Normal approximation for two proportions of so many independent examples. It knows
  nothing of the randomness of training.
  """
  # At 0 or 1 the approximation would say 0: half an example is added on either side.
  p = [(share * examples + 0.5) / (examples + 1) for share in (first, second)]
  return 2 * math.sqrt(sum(share * (1 - share) for share in p) / examples)


def _page(judged: list[tuple], results: dict, seconds: dict) -> str:
  import jinja2

  folder = importlib.resources.files('vit_jax.lab')
  template = (folder / 'template/paper.html').read_text()
  sections = [
    {
      'title': grid.grid.title,
      'claims': [each for each in judged if each[0].ablation == name],
      'seconds': seconds[name],
      'cells': grid.records(),
      'picture': _picture(grid),
      'failed': grid.failed,
    }
    for name, grid in results.items()
  ]
  environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
  return environment.from_string(template).render(
    sections=sections, judged=judged, version=__version__
  )


def _picture(results: runner.Results) -> str:
  """Returns the PNG of the cells beside each other as base64; '' without matplotlib."""
  try:
    plots = load_plots()
  except UserError:
    return ''
  records = results.records()
  metrics = list(dict.fromkeys(key for x in records for key in x['metrics']))[:3]
  values = {
    key: [
      (100 * x['metrics'][key].mean, 100 * (x['metrics'][key].std or 0))
      if key in x['metrics']
      else None
      for x in records
    ]
    for key in metrics
  }
  figure = plots.compared(
    [x['cell'] for x in records], {f'{key} (%)': v for key, v in values.items()}
  )
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=150)
  return base64.b64encode(file.getvalue()).decode()


if __name__ == '__main__':
  program.run_and_exit(main)
