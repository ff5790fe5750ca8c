"""Methods that add no parameters, and train a subset of the model's own."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np

from vit_jax.check import Depth, nonempty
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.tune.method import HEAD, REST, Method
from vit_jax.tune.tuned import Addition

EPS = 1e-6  # of MAE's batch norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Method):
  """Trains every parameter: fine-tuning, or training from scratch."""

  trains_backbone: ClassVar = True

  def rules(self, backbone):
    return [('.*', True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Method):
  """Linear probing: trains the head on features of the model in evaluation mode.

  Attributes:
    batch_norm: whether the head's input is normalised by a batch norm without scale and bias,
      as in MAE (arXiv 2111.06377, A.1).
  """

  batch_norm: bool = False

  def make_added(self, backbone):
    return Norm() if self.batch_norm else None

  def merge_added(self, params):
    """Multiplies the head by the norm of the evaluation."""
    if not self.batch_norm:
      return params
    params = dict(params)
    mean, var = (params.pop(f'batch_stats/tune/norm/{key}') for key in ('mean', 'var'))
    kernel = params['head/kernel'] / np.sqrt(var + EPS)[:, None]
    bias = params['head/bias'] - mean @ kernel
    return params | {'head/kernel': kernel, 'head/bias': bias}


class Norm(Addition):
  """Normalises the input of the head by statistics of the batch."""

  def setup(self):
    self.norm = BatchNorm(affine=False, eps=EPS)

  def layers(self, images, train):
    head = lambda call, x: call(self.norm(x, train=train))
    return lambda module, path: head if path == 'head' else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bias(Method):
  """BitFit (arXiv 2106.10199): trains the head and every parameter named `bias`.

  Tables of positions that papers call biases have other names and stay frozen.
  """

  trains_backbone: ClassVar = True

  def rules(self, backbone):
    return [HEAD, ('(?:.*/)?bias', True), REST]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial(Method):
  """Trains the last `blocks` blocks and all that follows them: the norm and the head.

  Partial-k of VPT (arXiv 2203.12119, section 4.1). The family defines a block: an encoder
  block of a ViT, a bottleneck unit of a ResNet. A downsampling layer belongs to the stage
  after it.
  """

  trains_backbone: ClassVar = True
  by_block: ClassVar = True

  blocks: Depth = 1

  def rules(self, backbone):
    depths, number = backbone.family.depths(backbone.shapes)
    if self.blocks > number:
      raise ValueError(
        f'blocks={self.blocks}: {type(backbone.model).__name__} has only {number} blocks here'
      )
    first = number - self.blocks + 1
    trained = [name for name, depth in depths.items() if depth >= first]
    return [*((re.escape(name), True) for name in trained), REST]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRules(Method):
  """Trains the parameters whose full name matches one of the regexes `train`."""

  trains_backbone: ClassVar = True

  train: Annotated[Sequence[str], nonempty]

  def rules(self, backbone):
    return [*((regex, True) for regex in self.train), REST]
