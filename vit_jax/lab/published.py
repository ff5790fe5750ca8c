"""Results that papers print: the ViT paper's, arXiv 2010.11929, its final version.

All accuracies are in per cent. Figures 2, 3 and 5 of the paper draw them; the numbers of
figures 4 and 8 are not printed. Other papers' names stand before their tables.
"""

from typing import NamedTuple

JFT = 303e6  # images; an epoch of the paper's largest pre-training set

# Table 5: ImageNet top-1 at 384 px after pre-training on each set.
SETS = {'ImageNet': 1.28e6, 'ImageNet-21k': 14.2e6, 'JFT-300M': JFT}
TABLE_5 = {
  'ViT-B/32': (73.38, 81.28, 80.73),
  'ViT-B/16': (77.91, 83.97, 84.15),
  'ViT-L/32': (71.16, 80.99, 84.37),
  'ViT-L/16': (76.53, 85.15, 87.12),
  'ViT-H/14': (None, 85.13, 88.04),
}


class Row(NamedTuple):
  """A row of Table 6: pre-training on JFT, and accuracy after fine-tuning.

  Attributes:
    model: our name for the same architecture.
    exaflops: of the pre-training.
  """

  name: str
  epochs: int
  imagenet: float
  real: float
  cifar10: float
  cifar100: float
  pets: float
  flowers: float
  exaflops: int
  model: str

  @property
  def average(self) -> float:
    """The mean of the five sets without ReaL, the average of Table 7 and figure 5."""
    five = self.imagenet, self.cifar10, self.cifar100, self.pets, self.flowers
    return sum(five) / 5

  @property
  def kind(self) -> str:
    """Transformer, hybrid or ResNet: the three markers of figure 5."""
    if not self.model.startswith('vit:'):
      return 'ResNet (BiT)'
    return 'Hybrid' if self.name.startswith('R') else 'Transformer (ViT)'


TABLE_6 = tuple(
  Row(*row)
  for row in (
    ('ViT-B/32', 7, 80.73, 86.27, 98.61, 90.49, 93.40, 99.27, 55, 'vit:B/32'),
    ('ViT-B/16', 7, 84.15, 88.85, 99.00, 91.87, 95.80, 99.56, 224, 'vit:B/16'),
    ('ViT-L/32', 7, 84.37, 88.28, 99.19, 92.52, 95.83, 99.45, 196, 'vit:L/32'),
    ('ViT-L/16', 7, 86.30, 89.43, 99.38, 93.46, 96.81, 99.66, 783, 'vit:L/16'),
    ('ViT-L/16', 14, 87.12, 89.99, 99.38, 94.04, 97.11, 99.56, 1567, 'vit:L/16'),
    ('ViT-H/14', 14, 88.08, 90.36, 99.50, 94.71, 97.11, 99.71, 4262, 'vit:H/14'),
    ('R50x1', 7, 77.54, 84.56, 97.67, 86.07, 91.11, 94.26, 50, 'bit:R50x1'),
    ('R50x2', 7, 82.12, 87.94, 98.29, 89.20, 93.43, 97.02, 199, 'bit:R50x2'),
    ('R101x1', 7, 80.67, 87.07, 98.48, 89.17, 94.08, 95.95, 96, 'bit:R101x1'),
    ('R152x1', 7, 81.88, 87.96, 98.82, 90.22, 94.17, 96.94, 141, 'bit:R152x1'),
    ('R152x2', 7, 84.97, 89.69, 99.06, 92.05, 95.37, 98.62, 563, 'bit:R152x2'),
    ('R152x2', 14, 85.56, 89.89, 99.24, 91.92, 95.75, 98.75, 1126, 'bit:R152x2'),
    ('R200x3', 14, 87.22, 90.15, 99.34, 93.53, 96.32, 99.04, 3306, 'bit:R200x3'),
    ('R50+ViT-B/32', 7, 84.90, 89.15, 99.01, 92.24, 95.75, 99.46, 106, 'vit:R50+B/32'),
    ('R50+ViT-B/16', 7, 85.58, 89.65, 99.14, 92.63, 96.65, 99.40, 274, 'vit:R50+B/16'),
    ('R50+ViT-L/32', 7, 85.68, 89.04, 99.24, 92.93, 96.97, 99.43, 246, 'vit:R50+L/32'),
    ('R50+ViT-L/16', 7, 86.60, 89.72, 99.18, 93.64, 97.03, 99.40, 859, 'vit:R50+L/16'),
    (
      'R50+ViT-L/16',
      14,
      87.12,
      89.76,
      99.31,
      93.89,
      97.36,
      99.11,
      1668,
      'vit:R50+L/16',
    ),
  )
)


class SwinRow(NamedTuple):
  """A row of Table 1 (b) of the Swin paper, arXiv 2103.14030: cost of one image.

  Attributes:
    resolution: pixels of the image's sides.
    gmacs: multiply-adds in 1e9.
    top1: on ImageNet-1k, after pre-training on ImageNet-22k.
    model: our name for the same architecture.
  """

  name: str
  resolution: int
  gmacs: float
  top1: float
  model: str


SWIN_TABLE_1 = (
  SwinRow('R-101x3', 384, 204.6, 84.4, 'bit:R101x3'),
  SwinRow('R-152x4', 480, 840.5, 85.4, 'bit:R152x4'),
  SwinRow('ViT-B/16', 384, 55.4, 84.0, 'vit:B/16'),
  SwinRow('ViT-L/16', 384, 190.7, 85.2, 'vit:L/16'),
  SwinRow('Swin-B', 224, 15.4, 85.2, 'swin:B'),
  SwinRow('Swin-B', 384, 47.0, 86.4, 'swin:B/12'),
  SwinRow('Swin-L', 384, 103.9, 87.3, 'swin:L/12'),
)

# Table 7: ResNets pre-trained on JFT by Adam or SGD, fine-tuned by SGD: accuracy on each
# of five sets, whose mean the paper prints as 89.33, 88.79, 94.01, 93.72.
TABLE_7_SETS = ('ImageNet', 'CIFAR10', 'CIFAR100', 'Pets', 'Flowers')
TABLE_7 = {
  ('R50x1', 'adam'): (77.54, 97.67, 86.07, 91.11, 94.26),
  ('R50x1', 'sgd'): (78.24, 97.46, 85.17, 91.00, 92.06),
  ('R152x2', 'adam'): (84.97, 99.06, 92.05, 95.37, 98.62),
  ('R152x2', 'sgd'): (84.37, 99.07, 91.06, 94.79, 99.32),
}

# Table 8: position embeddings of ViT-B/16, by kind and where they are added: ImageNet
# accuracy of 5-shot linear regression. No and relative ones stand in its first column.
TABLE_8 = {
  ('none', 'stem'): 61.382,
  ('1-D', 'stem'): 64.206,
  ('1-D', 'every layer'): 63.964,
  ('1-D', 'every layer, shared'): 64.292,
  ('2-D', 'stem'): 64.001,
  ('2-D', 'every layer'): 64.046,
  ('2-D', 'every layer, shared'): 64.022,
  ('relative', 'stem'): 64.032,
}

# The tasks of VTAB-1k in the order of Table 9: name, group, and a regex of the names that
# data sets and folders of runs give them.
VTAB = (
  ('Caltech101', 'Natural', 'caltech.?101'),
  ('CIFAR-100', 'Natural', 'cifar.?100'),
  ('DTD', 'Natural', 'dtd'),
  ('Flowers102', 'Natural', 'flowers.?102'),
  ('Pets', 'Natural', 'pets?'),
  ('Sun397', 'Natural', 'sun.?397'),
  ('SVHN', 'Natural', 'svhn'),
  ('Camelyon', 'Specialized', 'camelyon'),
  ('EuroSAT', 'Specialized', 'eurosat'),
  ('Resisc45', 'Specialized', 'resisc.?45'),
  ('Retinopathy', 'Specialized', 'retinopathy'),
  ('Clevr-Count', 'Structured', 'clevr.?count'),
  ('Clevr-Dist', 'Structured', 'clevr.?(dist|closest)'),
  ('DMLab', 'Structured', 'dmlab'),
  ('dSpr-Loc', 'Structured', 'dspr(ites)?.?(loc|label.x|x.position)'),
  ('dSpr-Ori', 'Structured', 'dspr(ites)?.?(ori|label.orientation)'),
  ('KITTI-Dist', 'Structured', 'kitti'),
  ('sNORB-Azim', 'Structured', 's(mall)?norb.?(label.)?azim'),
  ('sNORB-Elev', 'Structured', 's(mall)?norb.?(label.)?elev'),
)
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
