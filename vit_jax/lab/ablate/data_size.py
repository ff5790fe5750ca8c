"""Size of the pre-training data, for a ViT and a ResNet (ViT paper, Figures 3 and 4).

Cells: 3, 10, 30 and 100 per cent of the training split, as the paper has 9, 30, 90 and
300 million images of JFT, all for the same number of steps; with the recipe's ViT, and
with a BiT whose forward pass takes as many operations, to within 10 per cent. The paper's
points on ImageNet after pre-training on its three sets are Table 5, which
`vit_jax figures data` draws; of Figure 4 it prints no numbers.
"""

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.lab.ablate.ablation import TRANSFER_TO_DIGITS, Ablation, Base, need_vit
from vit_jax.lab.grid import cells as grid
from vit_jax.lab.grid.cells import Cell
from vit_jax.nn.resnet import STAGES
from vit_jax.tools.inspect import cost

SHARES = (3, 10, 30, 100)  # per cent
_NEAR = 0.1
# The deeper first: those of published ResNets, then of models for small images.
_BLOCKS = (*(STAGES[depth] for depth in (50, 26)), *((1,) * n for n in (4, 3, 2, 1)))


def cells(config: dict) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT, on all of a split."""
  vit = need_vit(config, 'data_size')
  split = config['data']['split']
  if not isinstance(config['data']['source'], str) or '[' in split or '+' in split:
    raise UserError(
      f'data_size takes parts of a split, and config.data.split={split!r} is not one '
      'whole split: name it, --set data.split=train'
    )
  duration = next(key for key in config_lib.DURATIONS if config.get(key) is not None)
  if duration == 'epochs':
    raise UserError(
      'data_size trains for as many steps on few images as on many, and this config '
      'says epochs: --set steps=N'
    )
  shape = grid.image_shape(config)
  if shape is None:
    raise UserError(
      f'data_size: config.data.pp={config["data"]["pp"]!r} leaves the size of the images '
      'open, so that no ResNet of equal compute can be told: add resize(size) or a crop.'
    )
  models = {'vit': vit, 'resnet': equal_compute(vit, shape)}
  return [
    Cell(f'{name}-{share}pct', {'model': model, 'data.split': f'{split}[:{share}%]'})
    for name, model in models.items()
    for share in SHARES
  ]


def equal_compute(vit: dict, shape: tuple[int, int, int]) -> dict:
  """Returns the section `model` of a BiT that computes as much as a ViT, within 10 %.

  Args:
    shape: of an image, [H, W, C].

  Raises:
    UserError: if there is none whose width is a multiple of the 32 groups of its norms.
  """
  wanted = cost.of({'num_classes': 10, **vit}, shape).operations
  common = {key: vit[key] for key in ('num_classes', 'dtype') if key in vit}
  best = None
  for blocks in _BLOCKS:
    of = lambda width, blocks=blocks: dict(
      name='bit', blocks=list(blocks), width=width, **common
    )
    count = lambda width, of=of: cost.of({'num_classes': 10, **of(width)}, shape)
    # The norms' groups allow no less than 32 channels. Compute grows with the square.
    middle = round((wanted / count(32).operations) ** 0.5) * 32
    for width in sorted({max(middle + step, 32) for step in (-32, 0, 32)}):
      off = count(width).operations / wanted - 1
      if abs(off) <= _NEAR:
        return of(width)
      best = min(best or (abs(off), width), (abs(off), width))
      if off > 0:  # wider ones compute more still
        break
  raise UserError(
    f'data_size: no ResNet computes as much as this ViT, {wanted / 1e9:.3g} GFLOPs; the '
    f'nearest differs by {best[0]:.0%}. Change its size: --set model.width=...'
  )


ABLATION = Ablation(
  cells=cells,
  bases={
    'shapes:class': Base(
      'shapes:examples=10000,steps=300,test=test[:1000]',
      {
        # Of 16 patches; a BiT of two units computes as much.
        'model.patch_size': (8, 8),
        'model.depth': 3,
        'evals.transfer': TRANSFER_TO_DIGITS,
      },
    ),
  },
  draw='data_size',
)
