"""Scaling a ViT's shape (ViT paper, appendix D.2 and Figure 8), against relative compute.

From one base, depth, width, MLP width and patch size are halved and doubled one by one
and all of them together, with smaller patches where the others grow. The number of heads
stays. Figure 8 prints no numbers.
"""

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base, need_vit, resolved
from vit_jax.lab.grid.cells import Cell

AXES = ('depth', 'width', 'mlp_dim', 'patch_size')
LINES = {**{axis: (axis,) for axis in AXES}, 'all': AXES}


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT that can be halved."""
  need_vit(config, 'shape')
  family, fields = resolved(config, 'shape')
  base = models.fields_of(models.build(family, **fields))
  found = [Cell('base', {f'model.{axis}': base[axis] for axis in AXES})]
  for line, scaled in LINES.items():
    for factor in (0.5, 2):
      changes = dict(found[0].changes)
      for axis in scaled:
        changes[f'model.{axis}'] = _scaled(axis, base, factor)
      found.append(Cell(_name(line, changes, factor), changes))
  return found


def _name(line: str, changes: dict, factor: float) -> str:
  if line == 'all':
    return f'all-x{factor:g}'
  value = changes[f'model.{line}']
  sides = dict.fromkeys(value) if line == 'patch_size' else [value]
  return f'{line.partition("_")[0]}-{"x".join(map(str, sides))}'


def _scaled(axis: str, base: dict, factor: float):
  value = base[axis]
  if axis == 'patch_size':
    sides, factor = value, 1 / factor
  else:
    sides = (value,)
  scaled = [side * factor for side in sides]
  heads = base['num_heads'] if axis == 'width' else 1
  if any(n % heads for n in scaled):
    of = f', a multiple of the {heads} heads,' if heads > 1 else ''
    raise UserError(
      f'shape halves and doubles: config.model.{axis}={value} has no half{of} that is '
      f'whole. Change it: --set model.{axis}=...'
    )
  scaled = [int(n) for n in scaled]
  return scaled if axis == 'patch_size' else scaled[0]


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base(
      'digits:epochs=12',
      {'model.depth': 2, 'model.width': 48, 'model.mlp_dim': 96, **SHORT_DIGITS},
    ),
  },
  draw='shape',
)
