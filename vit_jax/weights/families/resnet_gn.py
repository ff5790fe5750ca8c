"""big_vision's ResNet with GroupNorm, post-activation: the trunk of a hybrid, and a head."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints
from vit_jax.weights.families import vit
from vit_jax.weights.formats import Format

RULES = tuple(
  rule
  for rule in vit.GOOGLE
  if rule.theirs.startswith(('conv_root', 'gn_root', 'block{', 'head/'))
)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters tell.

  Raises:
    UserError: if its root is not a convolution's kernel.
  """
  if flat['conv_root/kernel'].ndim != 4:
    raise UserError(
      f'conv_root/kernel has shape {flat["conv_root/kernel"].shape}; expected 4 '
      'dimensions.'
    )
  return dict(
    blocks=vit.resnet_blocks(flat),
    width=flat['conv_root/kernel'].shape[-1],
    num_classes=flat['head/kernel'].shape[-1] if 'head/kernel' in flat else None,
  )


FORMATS = (
  Format(
    'big_vision',
    'resnet_gn',
    r'conv_root/kernel',
    lambda arrays, config: RULES,
    infer,
    hints.google(),
    lacks=r'Transformer/.+',
    to='google',
    write_config=export.google_config(),
  ),
)
