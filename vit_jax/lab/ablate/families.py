"""A model of every family beside a ViT that costs as much, trained alike.

Cells: the recipe's ViT, and small models of two stages, each named after its family, whose
forward pass takes as many operations as that of the ViT of `configs/digits.py` on its
images, to within 10 per cent. Data, augmentation, optimizer, rate and steps are those of the
recipe for all of them: they were chosen for the ViT.
"""

from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base, need_vit
from vit_jax.lab.grid.cells import Cell

MODELS = {
  'mixer': dict(
    patch_size=(4, 4), width=120, depth=3, tokens_mlp_dim=64, channels_mlp_dim=256
  ),
  'swin': dict(
    patch_size=(2, 2), width=32, depths=(2, 2), num_heads=(4, 8), windows=(4, 4)
  ),
  'mvit': dict(width=72, depths=(1, 2), num_heads=6, kv_stride=2),
  # Layer scale starts at 1e-6 for deep models and long runs, and hardly grows in short ones.
  'convnext': dict(depths=(2, 2), widths=(80, 160), layer_scale=1.0),
  'resnet': dict(depths=(2, 2), widths=(208, 416), stem_width=52),
}


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT."""
  vit = need_vit(config, 'families')
  common = {key: vit[key] for key in ('num_classes', 'dtype') if key in vit}
  others = (
    Cell(name, {'model': {'name': name, **fields, **common}})
    for name, fields in MODELS.items()
  )
  return [Cell('vit', {'model': vit}), *others]


ABLATION = Ablation(
  cells=cells,
  bases={'digits': Base('digits', SHORT_DIGITS)},
  seeds=(0, 1, 2),
)
