"""Rename rules for layers in PyTorch's files."""

import re

from vit_jax import trees
from vit_jax.weights import transforms as t
from vit_jax.weights.rename import Rule, Table, table

QKV = ('query', 'key', 'value')

# transformers 5 renamed layers. Most files on the hub have the older names, which every
# version reads.
TRANSFORMERS_5 = (
  (r'attention\.(?:attention|self)\.(q|k|v)(?:uery|ey|alue)\.', r'attention.\1_proj.'),
  (r'attention\.output\.dense', 'attention.o_proj'),
  (r'intermediate\.dense', 'mlp.fc1'),
  (r'output\.dense', 'mlp.fc2'),
)


def count_blocks(flat: dict, part: str) -> tuple[int, ...]:
  """Counts the blocks of each stage. `part` is the name of a parameter of every block."""
  blocks = (re.fullmatch(rf'stage(\d+)_block_\d+/{part}', name) for name in flat)
  numbers = [int(match[1]) for match in blocks if match]
  return tuple(numbers.count(s) for s in range(1, max(numbers, default=0) + 1))


def dense(theirs: str, ours: str, kernel=t.dense, bias=t.same) -> Table:
  """Returns the rules of a dense layer, with or without a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/kernel', kernel),
    Rule(f'{theirs}.bias', f'{ours}/bias', bias),
  )


def conv(theirs: str, ours: str) -> Table:
  """Returns the rules of a convolution, with or without a bias."""
  return dense(theirs, ours, t.conv)


def norm(theirs: str, ours: str) -> Table:
  """Returns the rules of a norm, with or without a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/scale'),
    Rule(f'{theirs}.bias', f'{ours}/bias'),
  )


def batch_norm(theirs: str, ours: str) -> Table:
  """Returns the rules of a batch norm. If it is frozen, scale and bias are statistics too."""
  stats = f'{trees.STATS}/{ours}'
  return (
    *norm(theirs, ours),
    Rule(f'{theirs}.running_mean', f'{stats}/mean'),
    Rule(f'{theirs}.running_var', f'{stats}/var'),
    *norm(theirs, stats),
  )


def split_heads(theirs: str, ours: str, heads: int) -> Table:
  """Returns the rules of a projection from tokens to heads."""
  return dense(theirs, ours, t.heads_kernel(heads), t.heads_bias(heads))


def merge_heads(theirs: str, ours: str, heads: int) -> Table:
  """Returns the rules of a projection from heads to tokens."""
  return dense(theirs, ours, t.out_kernel(heads))


def join(theirs: str, ours, kernel=t.dense, bias=t.same, dot: str = '.') -> Table:
  """Returns the rules of several of our layers that the file stores as one layer."""
  return tuple(
    Rule(
      f'{theirs}{dot}{part}',
      tuple(f'{name}/{leaf}' for name in ours),
      t.join(transform, len(ours)),
    )
    for part, leaf, transform in (('weight', 'kernel', kernel), ('bias', 'bias', bias))
  )


def fuse_heads(theirs: str, ours: str, heads: int, names=QKV, dot: str = '.') -> Table:
  """Returns the rules of several projections to heads that the file stores as one layer."""
  ours = [f'{ours}/{name}' for name in names]
  return join(theirs, ours, t.heads_kernel(heads), t.heads_bias(heads), dot)


def attention_pool(theirs: str, ours: str, heads: int) -> Table:
  """Returns the rules of attention pooling under transformers' names."""
  attention = f'{ours}/MultiHeadDotProductAttention_0'
  return table(
    Rule(f'{theirs}.probe', f'{ours}/probe'),
    fuse_heads(f'{theirs}.attention.in_proj', attention, heads, dot='_'),
    merge_heads(f'{theirs}.attention.out_proj', f'{attention}/out', heads),
    norm(f'{theirs}.layernorm', f'{ours}/LayerNorm_0'),
    dense(f'{theirs}.mlp.fc1', f'{ours}/MlpBlock_0/Dense_0'),
    dense(f'{theirs}.mlp.fc2', f'{ours}/MlpBlock_0/Dense_1'),
  )


def openai_block(theirs: str, ours: str, heads: int) -> Table:
  """Returns the rules of a CLIP block under OpenAI's names.

  open_clip and Perception Encoder have the same names.
  """
  attention, mlp = f'{ours}/MultiHeadDotProductAttention_0', f'{ours}/MlpBlock_0'
  return table(
    fuse_heads(f'{theirs}.attn.in_proj', attention, heads, dot='_'),
    merge_heads(f'{theirs}.attn.out_proj', f'{attention}/out', heads),
    dense(f'{theirs}.mlp.c_fc', f'{mlp}/Dense_0'),
    dense(f'{theirs}.mlp.c_proj', f'{mlp}/Dense_1'),
    [
      (
        norm(f'{theirs}.ln_{k + 1}', f'{ours}/LayerNorm_{k}'),
        Rule(f'{theirs}.ls_{k + 1}.gamma', f'{ours}/LayerScale_{k}/gamma'),
      )
      for k in (0, 1)
    ],
  )
