"""Axial attention (ViT paper, appendix D.6 and Figure 13).

Each block of a ViT becomes two, one whose tokens attend along rows and one along columns.
Cells: the recipe's ViT, with the mean of its tokens, as axial attention has no class token;
the same with axial attention; and one of twice the depth, which has the parameters of the
axial one. The figure prints no numbers.
"""

from vit_jax import models
from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base, need_vit, resolved
from vit_jax.lab.grid.cells import Cell


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT."""
  need_vit(config, 'axial')
  family, fields = resolved(config, 'axial')
  depth = models.fields_of(models.build(family, **fields))['depth']
  of = lambda attention, depth: {
    'model.attention': attention,
    'model.depth': depth,
    'model.classifier': 'gap',
  }
  return [
    Cell('full', of('full', depth)),
    Cell('axial', of('axial', depth)),
    Cell('full-deeper', of('full', 2 * depth)),
  ]


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base('digits:epochs=20', SHORT_DIGITS),
    'shapes:class': Base('shapes'),
  },
)
