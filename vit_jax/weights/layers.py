"""Rules for layers as PyTorch names and stores them."""

import re

from vit_jax import trees
from vit_jax.weights import transforms as t
from vit_jax.weights.rename import Rule, Table, table

QKV = ('query', 'key', 'value')

# transformers 5 renamed layers. Files on the hub carry the older names, which all of its
# versions read.
TRANSFORMERS_5 = (
  (r'attention\.(?:attention|self)\.(q|k|v)(?:uery|ey|alue)\.', r'attention.\1_proj.'),
  (r'attention\.output\.dense', 'attention.o_proj'),
  (r'intermediate\.dense', 'mlp.fc1'),
  (r'output\.dense', 'mlp.fc2'),
)


def depths(flat: dict, part: str) -> tuple[int, ...]:
  """Returns the number of blocks of each stage, by a parameter that each block has."""
  blocks = (re.fullmatch(rf'stage(\d+)_block_\d+/{part}', name) for name in flat)
  numbers = [int(match[1]) for match in blocks if match]
  return tuple(numbers.count(s) for s in range(1, max(numbers, default=0) + 1))


def dense(theirs: str, ours: str, kernel=t.dense, bias=t.same) -> Table:
  """A layer as PyTorch names it, with a weight and perhaps a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/kernel', kernel),
    Rule(f'{theirs}.bias', f'{ours}/bias', bias),
  )


def conv(theirs: str, ours: str) -> Table:
  """A convolution, with or without a bias."""
  return dense(theirs, ours, t.conv)


def norm(theirs: str, ours: str) -> Table:
  """A normalisation's scale and bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/scale'),
    Rule(f'{theirs}.bias', f'{ours}/bias'),
  )


def batch_norm(theirs: str, ours: str) -> Table:
  """A batch norm: parameters and statistics; all four are statistics if it is frozen."""
  stats = f'{trees.STATS}/{ours}'
  return (
    *norm(theirs, ours),
    Rule(f'{theirs}.running_mean', f'{stats}/mean'),
    Rule(f'{theirs}.running_var', f'{stats}/var'),
    *norm(theirs, stats),
  )


def into_heads(theirs: str, ours: str, heads: int) -> Table:
  """A projection of tokens into heads."""
  return dense(theirs, ours, t.heads_kernel(heads), t.heads_bias(heads))


def out_of_heads(theirs: str, ours: str, heads: int) -> Table:
  """A projection of heads into tokens."""
  return dense(theirs, ours, t.out_kernel(heads))


def joined(theirs: str, ours, kernel=t.dense, bias=t.same, dot: str = '.') -> Table:
  """Layers that the file holds as one."""
  return tuple(
    Rule(
      f'{theirs}{dot}{part}',
      tuple(f'{name}/{leaf}' for name in ours),
      t.joined(transform, len(ours)),
    )
    for part, leaf, transform in (('weight', 'kernel', kernel), ('bias', 'bias', bias))
  )


def fused(theirs: str, ours: str, heads: int, names=QKV, dot: str = '.') -> Table:
  """Projections into heads that the file holds as one."""
  ours = [f'{ours}/{name}' for name in names]
  return joined(theirs, ours, t.heads_kernel(heads), t.heads_bias(heads), dot)


def attention_pool(theirs: str, ours: str, heads: int) -> Table:
  """Attention pooling, as transformers names it."""
  attention = f'{ours}/MultiHeadDotProductAttention_0'
  return table(
    Rule(f'{theirs}.probe', f'{ours}/probe'),
    fused(f'{theirs}.attention.in_proj', attention, heads, dot='_'),
    out_of_heads(f'{theirs}.attention.out_proj', f'{attention}/out', heads),
    norm(f'{theirs}.layernorm', f'{ours}/LayerNorm_0'),
    dense(f'{theirs}.mlp.fc1', f'{ours}/MlpBlock_0/Dense_0'),
    dense(f'{theirs}.mlp.fc2', f'{ours}/MlpBlock_0/Dense_1'),
  )


def openai_block(theirs: str, ours: str, heads: int) -> Table:
  """A block of OpenAI's CLIP, of open_clip and the Perception Encoder."""
  attention, mlp = f'{ours}/MultiHeadDotProductAttention_0', f'{ours}/MlpBlock_0'
  return table(
    fused(f'{theirs}.attn.in_proj', attention, heads, dot='_'),
    out_of_heads(f'{theirs}.attn.out_proj', f'{attention}/out', heads),
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
