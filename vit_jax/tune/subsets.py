"""Methods that add nothing: a subset of the model's parameters is trained."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from vit_jax.check import Depth, nonempty
from vit_jax.tune.method import HEAD, REST, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Method):
  """Every parameter is trained: fine-tuning, or training from scratch."""

  trains_backbone: ClassVar = True

  def rules(self, backbone):
    return [('.*', True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Method):
  """Linear probing: the head is trained on features that the model gives in evaluation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bias(Method):
  """BitFit (arXiv 2106.10199): the head and every parameter named `bias` are trained.

  Position tables that papers call biases have other names and stay frozen.
  """

  trains_backbone: ClassVar = True

  def rules(self, backbone):
    return [HEAD, ('(?:.*/)?bias', True), REST]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial(Method):
  """The last `blocks` blocks are trained, and all that follows them: the norm, the head.

  Partial-k of VPT (arXiv 2203.12119, section 4.1). A block is that of the family: an
  encoder block of a ViT, one bottleneck unit of a ResNet. A downsampling layer goes with
  the stage that it leads to.
  """

  trains_backbone: ClassVar = True
  by_block: ClassVar = True

  blocks: Depth = 1

  def rules(self, backbone):
    depths, number = backbone.family.depths(backbone.shapes)
    if self.blocks > number:
      raise ValueError(
        f'blocks={self.blocks}: {type(backbone.model).__name__} has {number} blocks here'
      )
    first = number - self.blocks + 1
    trained = [name for name, depth in depths.items() if depth >= first]
    return [*((re.escape(name), True) for name in trained), REST]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRules(Method):
  """Parameters are trained whose names one of the regexes `train` matches in full."""

  trains_backbone: ClassVar = True

  train: Annotated[Sequence[str], nonempty]

  def rules(self, backbone):
    return [*((regex, True) for regex in self.train), REST]
