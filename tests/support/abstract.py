"""Shapes of a model's parameters, and how many numbers they hold, without computing them."""

import functools
import math
import re

from vit_jax import trees

# Blocks of one name have the same shapes: all of a ViT, a Mixer, or a stage of ConvNeXt
# and Swin; of other stages those between the first and the last.
ALIKE = re.compile(r'/(?:encoderblock_0|MixerBlock_0|stage(\d)_block_0)/')
BETWEEN = re.compile(r'/(?:stage(\d)_block_1|block(\d)/unit0?2)/')


def abstract_params(model, size: int = 224):
  """Returns the params for images of `size` x `size` pixels, as ShapeDtypeStructs."""
  return model.shapes((size, size, 3))['params']


@functools.cache
def _sizes(model, size) -> dict[str, int]:
  params = trees.flatten(model.shapes((*size, 3))['params'])
  return {f'/{name}': math.prod(x.shape) for name, x in params.items()}


def count(model, size: tuple[int, int] = (224, 224)) -> int:
  """Returns how many parameters a model has for images of `size`.

  Traces one block of those that are alike, and multiplies what it holds.
  """
  most, pattern, depths, short = 3, BETWEEN, (), {}
  if type(model).__name__ in ('ConvNeXt', 'Swin'):
    most, pattern = 1, ALIKE
  for field in ('depths', 'blocks', 'stem_blocks'):
    if stages := getattr(model, field, None):
      depths, short[field] = stages, tuple(min(n, most) for n in stages)
  if hasattr(model, 'scan') and not getattr(model, 'kv_heads', None):
    short |= {'depth': 1, 'scan': False}
  if whole := len(getattr(model, 'global_blocks', ())):
    short = {'depth': 2, 'global_blocks': (1,)}  # within windows, on the whole map
  total = 0
  for name, number in _sizes(model.clone(**short), size).items():
    if whole and 'encoderblock' in name:
      number *= whole if 'encoderblock_1' in name else model.depth - whole
    elif 'depth' in short and ALIKE.search(name):
      number *= model.depth
    elif match := pattern.search(name):
      stage = int(next(filter(None, match.groups())))
      number *= max(1, depths[stage - 1] - most + 1)
    total += number
  return total
