"""A stack of equal residual blocks, as a loop or as one scanned block."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import choose

# What of a block is kept for the backward pass. 'none': everything (no recompute).
REMAT = {
  'none': None,
  'full': 'nothing_saveable',
  'dots': 'dots_with_no_batch_dims_saveable',
}


def stack(
  Block,
  x,
  *,
  name: str,
  depth: int,
  stochastic_depth: float,
  scan: bool,
  remat: str,
  train: bool,
  last_rows: int | None = None,
  **fields,
):
  """Runs L blocks, from within a compact module.

  Args:
    Block: module with `__call__(x, depth_rate, train) -> (x, x)` and the field
      `stochastic_depth`, whether it is used at all.
    x: [B, N, D].
    name: of the parameters: `{name}_0`, ...; scanned: `name`, with a leading axis [L].
    stochastic_depth: rate of the last block; the first has 0, linear between.
    remat: see `remat_policy`.
    last_rows: how many of the first tokens are wanted of the last block: blocks then
      have a fourth argument, `rows`. None: all, and always of a scanned block, whose
      output has its input's shape.
    **fields: of `Block`.

  Returns:
    (x [B, N, D], {'block00': [B, N, D], ...}).
  """
  fields['stochastic_depth'] = stochastic_depth > 0
  some_rows = last_rows is not None and not scan
  policy = remat_policy(remat)
  if policy is not None:
    # Inside a scan the loop already keeps XLA from merging the two computations.
    static = (3, 4) if some_rows else (3,)
    Block = nn.remat(Block, policy=policy, prevent_cse=not scan, static_argnums=static)
  last = max(depth - 1, 1)
  rates = [stochastic_depth * i / last for i in range(depth)]
  if scan:
    x, blocks = nn.scan(
      Block,
      variable_axes={'params': 0, 'intermediates': 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=(0, nn.broadcast),
      length=depth,
    )(name=name, **fields)(x, jnp.asarray(rates), train)
  else:
    blocks = []
    for i, rate in enumerate(rates):
      rows = (last_rows if i == depth - 1 else None,) if some_rows else ()
      x, block = Block(name=f'{name}_{i}', **fields)(x, rate, train, *rows)
      blocks.append(block)
  return x, {f'block{i:02d}': blocks[i] for i in range(depth)}


def remat_policy(name: str):
  """Returns the `jax.checkpoint` policy of that name, None for 'none'.

  Args:
    name: 'none', 'full', 'dots', or the name of a `jax.checkpoint_policies` member
      that takes no argument.

  Raises:
    UserError: for any other name.
  """
  plain = ('everything_saveable', 'nothing_saveable', 'dots_saveable')
  plain += ('dots_with_no_batch_dims_saveable',)
  member = choose('remat policy', name, REMAT | dict(zip(plain, plain, strict=True)))
  return getattr(jax.checkpoint_policies, member) if member else None
