"""Trains the experiments of the ViT paper in miniature, and judges its claims by them.

  vit_jax paper [--out DIR] [--only posemb,head]

It takes bundled data, and about twenty minutes on two cores; finished runs are only read.
DIR/paper.md sets the claims beside the numbers that were measured.
"""

import math
from typing import NamedTuple

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax import files
from vit_jax.errors import choose
from vit_jax.lab import runner, sweep, table
from vit_jax.tools import out_folder
from vit_jax.train import program

_NOTE = """\
Small models, 1,437 handwritten digits and 10,000 images of coloured shapes: a claim about
large models and hundreds of millions of images may well be true and not show here. A
difference counts beyond two standard errors for the number of test images; the randomness
of training is not part of that."""


class Claim(NamedTuple):
  """A claim: the first cell of an ablation is better than the second, or as good ('=').

  `second` may be an accuracy; the test split has `examples` images.
  """

  text: str
  where: str
  ablation: str
  first: str
  sign: str
  second: str
  metric: str = 'test/top1'
  examples: int = 360


# The claim, where the paper makes it, and its cells: 'ABLATION: FIRST > SECOND'.
_CLAIMS = """\
A plain Transformer on image patches classifies images well | abstract
  resolution: 16px > 0.95
Fine-tuning at a higher resolution helps | section 3.2
  resolution: 32px > 16px
Position embeddings matter | Table 8
  posemb: 1d > none
Positions in two dimensions are no better than in one | Table 8
  posemb: 1d = 2d
A class token and the mean of all patches are as good as each other | Figure 9
  head: token = gap
The mean of all patches needs a smaller learning rate | Figure 9
  head: gap-lower-lr > gap
Scaling depth helps more than scaling width | Figure 8
  shape: depth-4 > width-96
Smaller patches are better without more parameters | Figure 8
  shape: patch-2 > base
Axial attention is better, at more compute | Figure 13
  axial: axial > full
Trained on little data, a ViT is behind a ResNet of equal compute | Figure 4
  data_size: resnet-3pct > vit-3pct test/top1 1000
With much data it overtakes | Figure 4
  data_size: vit-100pct > resnet-100pct test/top1 1000
More data to pre-train on makes a ViT that transfers better | Figure 3
  data_size: vit-100pct > vit-3pct transfer/digits_5shot
Pre-trained with Adam, ResNets transfer better than with SGD | Table 7
  optimizer: adamw > sgd transfer/digits_5shot
Pre-training by masked patches is better than training from scratch | section 4.6
  masked: mean_color > scratch
"""


def _claim(text: str, cells: str) -> Claim:
  ablation, first, sign, second, *rest = cells.split()
  if rest[1:]:
    rest[1] = int(rest[1])
  return Claim(*text.split(' | '), ablation[:-1], first, sign, second, *rest)


CLAIMS = tuple(map(_claim, *[iter(_CLAIMS.splitlines())] * 2))
_CELLS = {'masked': ['--cells', 'scratch,mean_color']}  # where not all are needed


def main(argv: list[str]) -> int:
  """Trains, judges and writes the table; returns the exit code."""
  names = list(dict.fromkeys(claim.ablation for claim in CLAIMS))
  title, _, epilog = __doc__.split('\n\n')
  parser = cli.Parser('vit_jax paper', description=title, epilog=epilog)
  add = parser.add_argument
  add('--out', metavar='DIR', default='runs/paper', help='default: %(default)s')
  add('--only', metavar='NAME,NAME', help=f'ablations, of {", ".join(names)}')
  args = parser.parse_args(argv)
  out = out_folder.check(args.out)
  if args.only:
    names = [choose('ablation', name, names) for name in args.only.split(',')]
  results = {}
  for name in names:
    words = ['--ablation', name, *_CELLS.get(name, [])]
    command = ' '.join(['vit_jax sweep', *words])
    print(f'\n== {command}', flush=True)
    grid = sweep.plan(sweep.parse(words), out / name)
    results[name] = runner.run(grid, command, lambda line: print(line, flush=True))
  claims = [claim for claim in CLAIMS if claim.ablation in results]
  rows = [(claim, *judge(claim, results[claim.ablation])) for claim in claims]
  columns = {
    'claim': lambda row: row[0].text,
    'in the paper': lambda row: row[0].where,
    'here': lambda row: row[1],
    'measured': lambda row: row[2],
  }
  text = table.markdown('The ViT paper in miniature', rows, columns, [_NOTE])
  files.replace(out / 'paper.md', text)
  print(f'\n{text}\nwritten: {out / "paper.md"}', flush=True)
  errors = [error for each in results.values() for error in each.errors.values()]
  return errors[0].exit_code if errors else 0


def judge(claim: Claim, results: runner.Results) -> tuple[str, str]:
  """Returns (verdict, the numbers behind it)."""
  means = []
  for cell in (claim.first, claim.second):
    rows = [row for row in results.rows() if row['cell'] == cell]
    mean = table.mean(rows, claim.metric)
    means.append(mean and mean.mean)
  if claim.second.startswith('0.'):
    means[1] = float(claim.second)
  if None in means:
    return 'no result', ''
  first, second = means
  least = noise(first, second, claim.examples)
  difference = first - second
  holds = difference > least if claim.sign == '>' else abs(difference) <= least
  return 'seen' if holds else 'not seen', (
    f'{claim.first} {100 * first:.1f} %, {claim.second} {100 * second:.1f} % of '
    f'{claim.metric}; {100 * least:.1f} points count'
  )


def noise(first: float, second: float, examples: int) -> float:
  """Returns two standard errors of the difference of two accuracies (normal)."""
  # At 0 or 1 the approximation would say 0: half an example is added on either side.
  p = [(share * examples + 0.5) / (examples + 1) for share in (first, second)]
  return 2 * math.sqrt(sum(share * (1 - share) for share in p) / examples)


if __name__ == '__main__':
  program.run_and_exit(main)
