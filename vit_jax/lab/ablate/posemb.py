"""Position embeddings (ViT paper, appendix D.4 and Table 8), rotary and sine-cosine beside.

Cells: no positions; learned 1-D and 2-D tables, each added once, at every layer, or one
table at every layer; relative positions; and, which the paper does not have, rotary and
fixed sine-cosine ones. Any ViT can be the base. Everything else is as its recipe has it.
"""

from vit_jax.lab import published
from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base, need_vit
from vit_jax.lab.grid.cells import Cell

# Cell -> (kind, where it is added), and its name in Table 8.
CELLS = {
  'none': (('none', 'stem'), ('none', 'stem')),
  '1d': (('learn', 'stem'), ('1-D', 'stem')),
  '1d-every': (('learn', 'every'), ('1-D', 'every layer')),
  '1d-shared': (('learn', 'shared'), ('1-D', 'every layer, shared')),
  '2d': (('learn2d', 'stem'), ('2-D', 'stem')),
  '2d-every': (('learn2d', 'every'), ('2-D', 'every layer')),
  '2d-shared': (('learn2d', 'shared'), ('2-D', 'every layer, shared')),
  'relative': (('relative', 'stem'), ('relative', 'stem')),
  'rotary': (('rotary', 'stem'), None),
  'sincos2d': (('sincos2d', 'stem'), None),
}


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT."""
  need_vit(config, 'posemb')
  return [
    Cell(name, {'model.posemb': kind, 'model.posemb_where': where})
    for name, ((kind, where), _) in CELLS.items()
  ]


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base('digits:epochs=12', SHORT_DIGITS),
    'shapes:position': Base('shapes:task=position'),
  },
  seeds=(0, 1, 2),
  published={
    cell: f'{published.TABLE_8[key]:.2f}' for cell, (_, key) in CELLS.items() if key
  },
  published_as='ViT-B/16, ImageNet 5-shot (%), paper, Table 8',
)
