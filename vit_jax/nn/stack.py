"""A stack of equal residual blocks, as a loop or as one scanned block."""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import choose
from vit_jax.kernels import ATTENDED, CONVOLVED, WEIGHTS

# How much of a block the backward pass recomputes, from nothing to everything:
# everything_saveable: nothing, not even elementwise operations that XLA would recompute.
# none: the elementwise operations that XLA chooses; a scan also recomputes some products.
# dots_saveable: everything but products (even those of attention) and convolutions.
# dots: everything but dense layers.
# full: the whole block, from its input.
REMAT = ('none', 'full', 'dots', 'dots_saveable', 'everything_saveable')


def remat_policy(name: str, scan: bool = False):
  """Returns the `jax.checkpoint` policy for a name in REMAT; None leaves the choice to XLA.

  In a loop XLA recomputes elementwise operations by itself. In a scan it stores every value
  that the derivative reads, because it cannot look across the steps. The name 'none'
  therefore has a policy for scans.
  """
  policies = jax.checkpoint_policies
  match choose('remat policy', name, REMAT):
    case 'none':
      return _products if scan else None
    case 'full':
      return policies.nothing_saveable
    case 'dots':
      return policies.dots_with_no_batch_dims_saveable
    case 'dots_saveable':
      return policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names(CONVOLVED)
      )
  return policies.everything_saveable


def _products(primitive, *avals, **params) -> bool:
  """A policy that keeps only products that widen, convolutions and attention.

  A scan stacks the results that it keeps. On TPUs it takes longer to move the result of a
  product [D, D] into that stack and out again than to compute it twice: by XLA's cost model
  ViT-B/16 takes fewer cycles and a quarter less memory without those of queries, keys,
  values and outputs (benchmarks/NOTES.md).
  """
  if primitive.name == 'dot_general':
    return _widens(*avals, **params)
  named = jax.checkpoint_policies.save_only_these_names(WEIGHTS, ATTENDED, CONVOLVED)
  # 'dot_product_attention_fwd' is cuDNN's attention.
  saved = ('conv_general_dilated', 'dot_product_attention_fwd')
  return primitive.name.startswith(saved) or named(primitive, *avals, **params)


def _widens(x, kernel, *, dimension_numbers, **_) -> bool:
  """Whether a product [..., D] x [D, F] has F > D and no batch dimensions."""
  (contracted, _), (batch, _) = dimension_numbers
  width = math.prod(x.shape[axis] for axis in contracted)
  return not batch and kernel.size > width**2


def depth_rates(last: float, depth: int) -> list[float]:
  """Returns the rate of stochastic depth of each block, rising linearly from 0 to `last`."""
  return [last * i / max(depth - 1, 1) for i in range(depth)]


def stack(
  block: Callable,
  x,
  *,
  name: str,
  rates: Sequence[float],
  scan: bool = False,
  remat: str = 'none',
  train: bool = False,
  added=None,
  more: Callable[[int], dict] | None = None,
  shared: dict | None = None,
):
  """Runs a stage of equal residual blocks, within a compact module.

  Args:
    block: a function `block(name=)` that makes a module, which maps
      `(x, rate, train=) -> x`.
    x: [B, ..., D].
    name: name of the parameters: `{name}_0`, ... In a scan it is `name`, and parameters
      have a first axis [L].
    rates: rates of stochastic depth of the L blocks.
    scan: whether to run one block in a loop of XLA (`nn.scan`), which makes compilation
      shorter and the program smaller.
    remat: see `remat_policy`.
    added: [1, N, D], such as positions, to add to the input of every block but the first.
    more: a function `more(i)` that returns further keyword arguments of block i; not in
      scans.
    shared: further keyword arguments of every block.

  Returns:
    (x, {'block00': x, ...}): the output of each block.
  """
  policy = remat_policy(remat, scan)
  rates = rates if any(rates) else [None] * len(rates)

  def run(module, x, i, rate, **arguments):
    if added is not None:
      x = x + jnp.where(i > 0, added, 0)
    arguments |= shared or {}
    call = lambda module, x: module(x, rate, train=train, **arguments)
    # In a scan, the loop already keeps XLA from merging a block with its recomputation.
    if policy is not None:
      call = nn.remat(call, policy=policy, prevent_cse=not scan)
    return call(module, x)

  if scan:

    def step(module, x, xs):
      x = run(module, x, *xs)
      return x, x

    scanned = nn.scan(
      step,
      variable_axes={'params': 0, 'intermediates': 0, 'perturbations': 0},
      split_rngs={'params': True, 'dropout': True},
      length=len(rates),
    )
    traced = None if rates[0] is None else jnp.asarray(rates)
    x, blocks = scanned(block(name=name), x, (jnp.arange(len(rates)), traced))
  else:
    blocks = []
    for i, rate in enumerate(rates):
      arguments = more(i) if more else {}
      x = run(block(name=f'{name}_{i}'), x, i, rate, **arguments)
      blocks.append(x)
  return x, {f'block{i:02d}': blocks[i] for i in range(len(rates))}


class StochasticDepth(nn.Module):
  """Drops residual branches per example in training, arXiv 1603.09382.

  The other branches are divided by 1 - rate (as in timm; the Mixer reference code does
  not).
  """

  @nn.compact
  def __call__(self, x, rate, *, train: bool = False):
    """Maps x [B, ...] to the same shape. `rate` is a number in [0, 1), or None for 0."""
    if rate is None or not train:
      return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - rate, shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))
