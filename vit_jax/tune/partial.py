"""Partial-k: the last blocks (VPT, arXiv 2203.12119, section 4.1)."""

import dataclasses
import re
from typing import ClassVar

from vit_jax.check import Depth
from vit_jax.errors import UserError
from vit_jax.tune.method import REST, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial(Method):
  """The last `blocks` blocks are trained, and what follows them: the norm, the head.

  A block is that of the family: of a ViT an encoder block, of a ResNet one bottleneck
  unit, not a stage. A downsampling layer goes with the stage that it leads to.
  """

  trains_backbone: ClassVar = True
  by_block: ClassVar = True

  blocks: Depth = 1

  def rules(self, backbone):
    depths, number = backbone.family.depths(backbone.shapes)
    if self.blocks > number:
      raise UserError(
        f'config.tune.blocks={self.blocks}: {type(backbone.model).__name__} has '
        f'{number} blocks here.'
      )
    first = number - self.blocks + 1
    trained = [name for name, depth in depths.items() if depth >= first]
    return [*((re.escape(name), True) for name in trained), REST]
