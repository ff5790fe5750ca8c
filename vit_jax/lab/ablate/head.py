"""Class token or pooling, and their rates (ViT paper, appendix D.3 and Figure 9).

The paper first blamed average pooling for an accuracy that a smaller learning rate mended:
8e-4 for the class token, 3e-4 for pooling. Cells: token and pooling at the recipe's rate,
pooling at 3/8 of it, attention pooling (MAP) beside. The figure prints no numbers.
"""

from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base, need_vit
from vit_jax.lab.grid.cells import Cell

_SMALLER = 3e-4 / 8e-4


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT."""
  need_vit(config, 'head')
  rate = config['optim']['lr']
  return [
    Cell('token', {'model.classifier': 'token', 'optim.lr': rate}),
    Cell('gap', {'model.classifier': 'gap', 'optim.lr': rate}),
    Cell('gap-lower-lr', {'model.classifier': 'gap', 'optim.lr': rate * _SMALLER}),
    Cell('map', {'model.classifier': 'map', 'optim.lr': rate}),
  ]


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base('digits:epochs=20', SHORT_DIGITS),
    'shapes:class': Base('shapes'),
  },
)
