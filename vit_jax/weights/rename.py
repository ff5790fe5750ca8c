"""Renames the arrays of published files to our parameters, and back.

A `Table` is a list of `Rule`s; each pairs the name of an array in a file with ours, and has
the `Transform` between their shapes. The functions under "layers" return the rules of one
layer of PyTorch's files, from which the modules in `families` compose the table of a model.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax import trees

Arrays = dict[str, np.ndarray]

# -- transforms, bit for bit ------------------------------------------------------------
# PyTorch stores a dense kernel as [out, in] and a convolution as [out, in, h, w]. Our kernels
# are [in, out] and [h, w, in, out], or [D, M, Dh] and [M, Dh, D] in attention.


class Transform(NamedTuple):
  """A bijection between an array of a file and one or more parameters."""

  load: Callable[[np.ndarray], tuple[np.ndarray, ...]]
  save: Callable[[Sequence[np.ndarray]], np.ndarray]


def _one(load, save) -> Transform:
  return Transform(lambda x: (load(x),), lambda xs: save(xs[0]))


same = _one(lambda x: x, lambda x: x)
dense_kernel = _one(lambda x: x.T, lambda x: x.T)
# A dense layer; a file may hold it as a 1x1 convolution.
pointwise_kernel = _one(lambda x: x.reshape(x.shape[:2]).T, lambda x: x.T)
conv_kernel = _one(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))

# An array that is not a parameter: it is read, ignored and never written.
drop = Transform(lambda x: (), lambda xs: np.empty(0))

# A transposed convolution is [in, out, h, w] in PyTorch, with its taps reversed.
deconv_kernel = _one(
  lambda x: x.transpose(2, 3, 0, 1)[::-1, ::-1],
  lambda x: x[::-1, ::-1].transpose(2, 3, 0, 1),
)

# transformers stores embedding tables as [N, D]; ours are [1, N, D].
rows = _one(lambda x: x[None], lambda x: x[0])
# CLIP stores the class token as [D]; ours is [1, 1, D].
vector = _one(lambda x: x.reshape(1, 1, -1), lambda x: x.reshape(-1))

# Old files store the vectors of GroupNorm as [1, 1, 1, C].
group_norm_vector = _one(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, 1, -1))

# One factor per head: [M, 1, 1] -> [M].
factors = _one(lambda x: x.reshape(-1), lambda x: x.reshape(-1, 1, 1))


def _divide(channels: int, heads: int) -> tuple[int, int]:
  """Returns (heads, channels of each)."""
  if channels % heads:
    raise ValueError(
      f'{channels} channels are no multiple of num_heads={heads}: pass another num_heads'
    )
  return heads, channels // heads


def heads_kernel(heads: int) -> Transform:
  """Maps a kernel [D_out, D_in] to [D_in, M, Dh]."""
  return _one(
    lambda x: x.T.reshape(x.shape[1], *_divide(len(x), heads)),
    lambda x: x.reshape(x.shape[0], -1).T,
  )


def heads_bias(heads: int) -> Transform:
  """Maps a bias [D] to [M, Dh]."""
  return _one(lambda x: x.reshape(_divide(x.size, heads)), lambda x: x.reshape(-1))


def out_kernel(heads: int) -> Transform:
  """Maps a kernel [D_out, D_in] to [M, Dh, D_out]."""
  return _one(
    lambda x: x.T.reshape(*_divide(x.shape[1], heads), x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def patch_kernel(size: tuple[int, int]) -> Transform:
  """Maps a kernel [D, h w C] of flat patches, channels last, to [h, w, C, D]."""
  return _one(
    lambda x: x.T.reshape(*size, -1, x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def join_arrays(part: Transform, number: int) -> Transform:
  """Splits an array of a file along its first axis into `number` parameters."""
  return Transform(
    lambda x: tuple(part.load(p)[0] for p in np.split(x, number)),
    lambda xs: np.concatenate([part.save([x]) for x in xs]),
  )


def join_mlp_and_qkv(mlp: Transform, heads: Transform, width: int) -> Transform:
  """Splits an array into four parameters: MLP (any number of rows), q, k, v (D rows each)."""

  def load(x):
    rows, *qkv = np.split(x, [len(x) - k * width for k in (3, 2, 1)])
    return mlp.load(rows) + tuple(heads.load(part)[0] for part in qkv)

  def save(parameters):
    first, *qkv = parameters
    return np.concatenate([mlp.save([first]), *(heads.save([x]) for x in qkv)])

  return Transform(load, save)


def split_layers(heads: int) -> Transform:
  """Splits [2, L, D / 2] or [2, L, M, Dh / 2] into L parameters [2, M, Dh / 2]."""
  return Transform(
    lambda x: tuple(y.reshape(2, heads, -1) for y in np.moveaxis(x, 1, 0)),
    lambda xs: np.stack(xs, axis=1),
  )


def offsets(window: tuple[int, int]) -> Transform:
  """Maps [rows, M], one row per offset in an h x w window, to [2 h - 1, 2 w - 1, M]."""
  shape = tuple(2 * n - 1 for n in window)
  return _one(lambda x: x.reshape(*shape, -1), lambda x: x.reshape(-1, x.shape[-1]))


# -- rules ------------------------------------------------------------------------------


class Rule(NamedTuple):
  """Says that the array `theirs` of a file holds the parameters `ours`.

  Names are templates: {i} stands for a number, {rest} for any text, {i+1} for the number plus
  one, and {i+01} for the same in two digits. A rule with `only_load` is an older or newer
  spelling, which is read but never written.
  """

  theirs: str
  ours: str | tuple[str, ...]
  transform: Transform = same
  only_load: bool = False

  @property
  def targets(self) -> tuple[str, ...]:
    return (self.ours,) if isinstance(self.ours, str) else self.ours


Table = tuple[Rule, ...]


def table(*parts) -> Table:
  """Flattens lists of rules, nested to any depth, into one table."""
  rules = []
  for part in parts:
    rules += [part] if isinstance(part, Rule) else table(*part)
  return tuple(rules)


def nest_name(name: str, prefix: str) -> str:
  """Returns the name of a submodel's variable in the model that contains it."""
  stats = f'{trees.STATS}/' if trees.is_statistic(name) else ''
  return f'{stats}{prefix}{name.removeprefix(stats)}'


def nest_rules(rules: Iterable[Rule], theirs: str = '', ours: str = '') -> Table:
  """Puts prefixes before the names in the rules of a submodel."""
  return tuple(
    r._replace(
      theirs=theirs + r.theirs, ours=tuple(nest_name(n, ours) for n in r.targets)
    )
    for r in rules
  )


def respell(rules: Iterable[Rule], *changes: tuple[str, str]) -> Table:
  """Returns rules for other spellings of the file's names.

  They are used for loading only, never for writing.

  Args:
    changes: pairs of a regex and its replacement, applied in order.
  """
  out = []
  for rule in rules:
    name = rule.theirs
    for regex, new in changes:
      name = re.sub(regex, new, name)
    if name != rule.theirs:
      out.append(rule._replace(theirs=name, only_load=True))
  return tuple(out)


def add_bare_names(rules: Table, prefix: str) -> Table:
  """Adds the names of transformers' bare model, which lack the prefix.

  transformers has a class with a head and a bare class for each model.
  """
  return table(rules, respell(rules, (f'^{re.escape(prefix)}', '')))


# -- layers -----------------------------------------------------------------------------

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


def dense(theirs: str, ours: str, kernel=dense_kernel, bias=same) -> Table:
  """Returns the rules of a dense layer, with or without a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/kernel', kernel),
    Rule(f'{theirs}.bias', f'{ours}/bias', bias),
  )


def conv(theirs: str, ours: str) -> Table:
  """Returns the rules of a convolution, with or without a bias."""
  return dense(theirs, ours, conv_kernel)


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
  return dense(theirs, ours, heads_kernel(heads), heads_bias(heads))


def merge_heads(theirs: str, ours: str, heads: int) -> Table:
  """Returns the rules of a projection from heads to tokens."""
  return dense(theirs, ours, out_kernel(heads))


def join(theirs: str, ours, kernel=dense_kernel, bias=same, dot: str = '.') -> Table:
  """Returns the rules of several of our layers that the file stores as one layer."""
  return tuple(
    Rule(
      f'{theirs}{dot}{part}',
      tuple(f'{name}/{leaf}' for name in ours),
      join_arrays(transform, len(ours)),
    )
    for part, leaf, transform in (('weight', 'kernel', kernel), ('bias', 'bias', bias))
  )


def fuse_heads(theirs: str, ours: str, heads: int, names=QKV, dot: str = '.') -> Table:
  """Returns the rules of several projections to heads that the file stores as one layer."""
  ours = [f'{ours}/{name}' for name in names]
  return join(theirs, ours, heads_kernel(heads), heads_bias(heads), dot)


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


# -- renaming -------------------------------------------------------------------------

_TOKEN = re.compile(r'\{(\w+?)(?:\+(\d+))?\}')


@functools.cache
def _regex(template: str) -> re.Pattern:
  pieces, end = [], 0
  for token in _TOKEN.finditer(template):
    pieces.append(re.escape(template[end : token.start()]))
    pieces.append(f'(?P<{token[1]}>{".+" if token[1] == "rest" else "[0-9]+"})')
    end = token.end()
  return re.compile(''.join(pieces) + re.escape(template[end:]))


def _match(template: str, name: str) -> dict | None:
  """Returns {token: value} if `name` matches the template, else None."""
  match = _regex(template).fullmatch(name)
  if not match:
    return None
  return {
    key: match[key] if key == 'rest' else int(match[key]) - int(plus or 0)
    for key, plus in _TOKEN.findall(template)
  }


def _fill(template: str, values: dict) -> str:
  def text(token):
    key, plus = token.groups()
    value = values[key]
    return str(value) if not plus else f'{value + int(plus):0{len(plus)}d}'

  return _TOKEN.sub(text, template)


def to_ours(arrays: Arrays, rules: Iterable[Rule]) -> tuple[Arrays, list[str]]:
  """Returns ({our name: array}, names that no rule matches). The first match wins."""
  rules, flat, unknown = list(rules), {}, []
  for name, x in arrays.items():
    matches = ((r, v) for r in rules if (v := _match(r.theirs, name)) is not None)
    rule, values = next(matches, (None, None))
    if rule is None:
      unknown.append(name)
      continue
    try:
      parts = rule.transform.load(x)
    except (ValueError, IndexError) as error:
      raise ValueError(f'{name} of shape {x.shape} does not fit: {error}') from None
    for target, part in zip(rule.targets, parts, strict=True):
      target = _fill(target, values)
      if target in flat:
        raise ValueError(f'two arrays hold {target}, the second is {name}')
      flat[target] = part
  return flat, unknown


def to_theirs(flat: Arrays, rules: Iterable[Rule]) -> Arrays:
  """Returns {their name: array}, sorted by name; the inverse of `to_ours`."""
  targets = [(x, rule) for rule in rules if not rule.only_load for x in rule.targets]
  rest, out = dict(flat), {}
  for name in flat:
    if name not in rest:  # It was written together with another parameter.
      continue
    matches = ((r, v) for x, r in targets if (v := _match(x, name)) is not None)
    rule, values = next(matches, (None, None))
    if rule is None:
      raise ValueError(f'{name} has no place in this format')
    parts = [rest.pop(_fill(target, values)) for target in rule.targets]
    try:
      out[_fill(rule.theirs, values)] = rule.transform.save(parts)
    except ValueError as error:
      raise ValueError(f'{name} has no place in this format: {error}') from None
  return {name: np.ascontiguousarray(out[name]) for name in sorted(out)}
