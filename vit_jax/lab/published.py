"""Results that the ViT paper prints: arXiv 2010.11929, its final version.

All accuracies are in per cent. Figures 2, 3 and 5 of the paper draw them; the numbers of
figures 4 and 8 are not printed.
"""

from typing import NamedTuple

# Table 5: ImageNet top-1 at 384 px after pre-training on each set, of so many images.
SETS = {'ImageNet': 1.28e6, 'ImageNet-21k': 14.2e6, 'JFT-300M': 303e6}
TABLE_5 = {
  'ViT-B/32': (73.38, 81.28, 80.73),
  'ViT-B/16': (77.91, 83.97, 84.15),
  'ViT-L/32': (71.16, 80.99, 84.37),
  'ViT-L/16': (76.53, 85.15, 87.12),
  'ViT-H/14': (None, 85.13, 88.04),
}


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
    """The mean of the five sets, the average of Table 7 and figure 5."""
    return sum(self[3:]) / 5

  @property
  def kind(self) -> str:
    """Transformer, hybrid or ResNet: the three markers of figure 5."""
    if 'ViT' not in self.name:
      return 'ResNet (BiT)'
    return 'Hybrid' if self.name.startswith('R') else 'Transformer (ViT)'


TABLE_6 = (
  Row('ViT-B/32', 7, 55, 80.73, 98.61, 90.49, 93.40, 99.27),
  Row('ViT-B/16', 7, 224, 84.15, 99.00, 91.87, 95.80, 99.56),
  Row('ViT-L/32', 7, 196, 84.37, 99.19, 92.52, 95.83, 99.45),
  Row('ViT-L/16', 7, 783, 86.30, 99.38, 93.46, 96.81, 99.66),
  Row('ViT-L/16', 14, 1567, 87.12, 99.38, 94.04, 97.11, 99.56),
  Row('ViT-H/14', 14, 4262, 88.08, 99.50, 94.71, 97.11, 99.71),
  Row('R50x1', 7, 50, 77.54, 97.67, 86.07, 91.11, 94.26),
  Row('R50x2', 7, 199, 82.12, 98.29, 89.20, 93.43, 97.02),
  Row('R101x1', 7, 96, 80.67, 98.48, 89.17, 94.08, 95.95),
  Row('R152x1', 7, 141, 81.88, 98.82, 90.22, 94.17, 96.94),
  Row('R152x2', 7, 563, 84.97, 99.06, 92.05, 95.37, 98.62),
  Row('R152x2', 14, 1126, 85.56, 99.24, 91.92, 95.75, 98.75),
  Row('R200x3', 14, 3306, 87.22, 99.34, 93.53, 96.32, 99.04),
  Row('R50+ViT-B/32', 7, 106, 84.90, 99.01, 92.24, 95.75, 99.46),
  Row('R50+ViT-B/16', 7, 274, 85.58, 99.14, 92.63, 96.65, 99.40),
  Row('R50+ViT-L/32', 7, 246, 85.68, 99.24, 92.93, 96.97, 99.43),
  Row('R50+ViT-L/16', 7, 859, 86.60, 99.18, 93.64, 97.03, 99.40),
  Row('R50+ViT-L/16', 14, 1668, 87.12, 99.31, 93.89, 97.36, 99.11),
)

# Table 9: the tasks of VTAB-1k, in the order of `lab.data.vtab_tasks`.
TABLE_9 = {
  'ViT-H/14 (JFT)': (
    *(95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6),
    *(91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
  ),
  'ViT-L/16 (JFT)': (
    *(95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4, 83.6, 96.5, 89.7, 77.1),
    *(86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
  ),
  'ViT-L/16 (I21k)': (
    *(90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3),
    *(70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
  ),
}
