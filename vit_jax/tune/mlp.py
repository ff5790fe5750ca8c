"""MLP-k: a head of k layers (VPT, arXiv 2203.12119, section 4.1)."""

import dataclasses

import flax.linen as nn

from vit_jax.check import Depth, Share
from vit_jax.nn.layers import Dropout
from vit_jax.tune.method import Method
from vit_jax.tune.tuned import Addition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp(Method):
  """Trains the head and k - 1 layers before it: dense [D, D], ReLU, batch norm, dropout.

  Attributes:
    layers: k, which includes the head.
    dropout: the rate of dropout after each layer before the head.
  """

  layers: Depth = 3
  dropout: Share = 0.1

  def make_added(self, backbone):
    if self.layers == 1:
      return None
    return Hidden(self.layers - 1, backbone.head('mlp').inputs[-1], self.dropout)


class Hidden(Addition):
  """Parameters `dense_0/{kernel,bias}`, `norm_0/{scale,bias}`, ...

  The norms compute their statistics over the whole batch, and keep running averages in the
  collection 'batch_stats'.
  """

  number: int
  width: int
  dropout: float

  def setup(self):
    # The variance of initial values is 2 / inputs. In the released code, it is 2 / outputs.
    init = nn.initializers.he_normal()
    self.dense = [nn.Dense(self.width, kernel_init=init) for _ in range(self.number)]
    self.norm = [nn.BatchNorm(momentum=0.9, epsilon=1e-5) for _ in range(self.number)]
    self.drop = Dropout(self.dropout)

  def layers(self, images, train):
    def head(call, x):
      for dense, norm in zip(self.dense, self.norm, strict=True):
        x = norm(nn.relu(dense(x)), use_running_average=not train)
        x = self.drop(x, deterministic=not train)
      return call(x)

    return lambda module, path: head if path == 'head' else None
