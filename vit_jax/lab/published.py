"""Results and claims of the ViT paper, arXiv 2010.11929, final version.

`published.json` has the numbers; accuracies are in per cent. Figures 2, 3 and 5 of the paper
draw them. The paper does not print the numbers of figures 4 and 8.
"""

import json
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
  """A row of Table 6: pre-training on JFT, and accuracy after fine-tuning."""

  name: str
  epochs: int
  exaflops: int
  imagenet: float
  cifar10: float
  cifar100: float
  pets: float
  flowers: float

  @property
  def average(self) -> float:
    """Mean accuracy of the five sets, the average in Table 7 and figure 5."""
    return sum(self[3:]) / 5

  @property
  def kind(self) -> str:
    """Kind of model: transformer, hybrid or ResNet, the three markers of figure 5."""
    if 'ViT' not in self.name:
      return 'ResNet (BiT)'
    return 'Hybrid' if self.name.startswith('R') else 'Transformer (ViT)'


class Claim(NamedTuple):
  """A claim of the paper: one cell of an ablation is better than another, or equally good."""

  text: str
  where: str  # where the paper says so
  ablation: str
  first: str  # a cell
  sign: str  # '>': the first is better; '=': they are equally good
  second: str  # a cell, or an accuracy such as '0.1'
  metric: str = 'test/top1'
  examples: int = 360  # images of the test split


_PRINTED = json.loads(Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))
# Pre-training sets and their numbers of images.
SETS = {'ImageNet': 1.28e6, 'ImageNet-21k': 14.2e6, 'JFT-300M': 303e6}
# {model: ImageNet top-1 at 384 px after pre-training on each of SETS}.
TABLE_5: dict[str, list] = _PRINTED['table_5']
TABLE_6 = [Row(*row) for row in _PRINTED['table_6']]
# The tasks of VTAB-1k, in the order of `lab.data.vtab_tasks`.
TABLE_9: dict[str, list] = _PRINTED['table_9']
CLAIMS = [Claim(*row) for row in _PRINTED['claims']]
