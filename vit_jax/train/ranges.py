"""The numbers that a config may hold: a range for each, checked before all else.

Ranges are wider than any use, but narrower than what breaks: beyond them a number
overflows, hangs the tracer or asks for more than a machine has. Rules between numbers, as
that a warmup is shorter than the run, are checked by the code that reads them.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator

from vit_jax.errors import UserError

INT32 = 2**31 - 1
FLOAT32 = 3.4e38
# Decoding threads also wait for files, so more of them than processors may help.
WORKERS = max(64, 16 * (os.cpu_count() or 1))


@dataclasses.dataclass(frozen=True)
class Range:
  """An interval; its ends are in it (`least`, `most`) or not (`above`, `below`)."""

  least: float | None = None
  most: float | None = None
  above: float | None = None
  below: float | None = None
  whole: bool = False
  why: str = ''  # shown with the range, where a bound needs a reason

  def __contains__(self, value: int | float) -> bool:
    return (
      (self.least is None or value >= self.least)
      and (self.most is None or value <= self.most)
      and (self.above is None or value > self.above)
      and (self.below is None or value < self.below)
    )

  def __str__(self) -> str:
    low = f'({self.above}' if self.least is None else f'[{self.least}'
    high = f'{self.below})' if self.most is None else f'{self.most}]'
    what = 'a whole number' if self.whole else 'a number'
    return f'{what} in {low}, {high}{f" ({self.why})" if self.why else ""}'


def _whole(least: int, most: int, why: str = '') -> Range:
  return Range(least, most, whole=True, why=why)


_SHARE = Range(least=0, below=1)
_STEPS = 'steps are counted in 32 bits'
_COUNT = _whole(1, INT32, _STEPS)
_PERIOD = Range(above=0, most=INT32, why='1 or more steps, or a fraction of the run')
_CLASSES = _whole(1, INT32, 'labels have 32 bits')
_CLASS = _whole(0, INT32, 'labels have 32 bits')
_SEED = _whole(0, 2**63 - 1)
_FACTOR = Range(least=0, most=1e6)

_MODEL = {
  'num_classes': _CLASSES,
  r'patch_size\[\d\]': _whole(1, 4096),
  r'width|mlp_dim|(tokens|channels)_mlp_dim|stem_width|representation_size|widths\[\d+\]': (
    _whole(1, 2**20)
  ),
  r'num_heads(\[\d+\])?': _whole(1, 2**16),
  r'windows\[\d+\]': _whole(1, 4096),
  r'window|(output_|kv_)?stride|channels|in_channels(\[\d+\])?': _whole(1, 4096),
  r'global_blocks(\[\d+\])?': _whole(0, 999),
  r'pretrained_size\[\d+\]': _whole(1, 16384),
  r'pretrained_windows(\[\d+\])?': _whole(0, 4096),
  'shift': _SHARE,
  'mlp_ratio': Range(above=0, most=1e3),
  r'((en|de)coder_)?depth|(stem_blocks|blocks|depths)\[\d+\]': (
    _whole(1, 1000, 'each layer is traced by itself')
  ),
  'num_queries': _whole(1, 2**16),
  'norm_momentum': _SHARE,
  'posemb_std': Range(least=0, most=1e3),
  'norm_eps': Range(above=0, most=1),
  'dropout|attention_dropout|stochastic_depth': _SHARE,
  'head_bias_init': Range(least=-1e4, most=1e4),
  'layer_scale': Range(least=0, most=1e4),
}
_SOURCE = {
  r'size(\[\d\])?': _whole(1, 8000, '64 megapixels, as `decode` takes'),
  'channels': _whole(1, 1024),
  'num_classes': _CLASSES,
  'num_examples': _whole(1, 2**31),
  'label_offset': _whole(-INT32, INT32, 'labels have 32 bits'),
  'most': _whole(1, 16, 'digits of a canvas'),
  'shuffle_buffer': _whole(1, INT32),
  'seed': _whole(0, 2**32 - 1),
}
_DATA = {
  'batch_size': _whole(1, 2**24, 'a batch of them is in memory'),
  r'classes\[\d+\]': _CLASS,
  'seed': _SEED,
  'num_classes': _CLASSES,
  'cache_bytes': _whole(1, 2**50),
  'max_file_bytes': _whole(1, 2**50),
  'max_bad_fraction': Range(least=0, most=1),
  'workers': _whole(1, WORKERS, f'threads, on {os.cpu_count()} processors'),
  'prefetch': _whole(1, 1024, 'batches that are in memory'),
  r'source\[\d+\]\.weight': Range(above=0, most=1e12),
  r'source\[\d+\]\.label_offset': _SOURCE['label_offset'],
}
_OPTIM = {
  'lr': Range(above=0, most=FLOAT32),
  'wd': Range(least=0, most=1e4),
  r'wd_rules\[\d+\]\[1\]': _FACTOR,
  r'lr_rules\[\d+\]\[1\]': Range(above=0, most=1e6, why='to freeze, see config.tune'),
  'layer_decay': Range(above=0, most=1),
  'clip': Range(above=0, most=FLOAT32),
  'ema': Range(above=0, below=1),
  'accum': _whole(1, 2**20),
  'b1|b2|b2_cap|momentum': _SHARE,
  'eps': Range(above=0, most=1),
  'decay': Range(above=0, most=10),
  'min_dim': _whole(1, INT32),
  'ns_steps': _whole(1, 100),
  'rms': Range(above=0, most=1e4),
  r'schedule\.(warmup|cooldown)': _whole(0, INT32, _STEPS),
  r'schedule\.staircase': _COUNT,
  r'schedule\.decay_until': Range(above=0, most=1),
  r'schedule\.end': Range(least=0, most=1, why='of the peak'),
  r'schedule\.at(\[\d+\])?': Range(above=0, below=1, why='of the run'),
  r'schedule\.factor': Range(above=0, most=1),
  r'schedule\.timescale': Range(above=0, most=1e12),
  r'swa\.start': _SHARE,
  r'swa\.every': _PERIOD,
}
_TUNE = {
  'number': _whole(0, 2**16, 'tokens, or pixels, that are learned'),
  'rank|reduction': _whole(1, 2**16),
  r'layers|blocks|layers\[\d+\]': _whole(0, 1000),
  'alpha': Range(above=0, most=1e6),
  'dropout': _SHARE,
}
_EVALUATION = {
  'every': _PERIOD,
  'batch_size': _DATA['batch_size'],
  r'shots\[\d+\]': _whole(1, INT32),
  r'seeds\[\d+\]|seed': _SEED,
  r'k\[\d+\]': _whole(1, 2**14, 'neighbours are compared in pairs'),
  'temperature|tolerance': Range(above=0, most=1e6),
  r'l2\[\d+\]': Range(above=0, most=1e30),
  'val_share': Range(above=0, below=1),
  'max_iterations': _whole(1, INT32),
  r'datasets\..+\.num_classes': _CLASSES,
  r'datasets\..+\.classes\[\d+\]': _CLASS,
}

# regex of paths below `config` -> range; a path matches one in full.
RANGES = {
  'steps|epochs': Range(above=0, most=INT32, why=_STEPS),
  'examples': Range(above=0, most=2**62),
  'seed': _SEED,
  'max_bad_steps': _COUNT,
  **{rf'model\.(.+\.)?({key})': bound for key, bound in _MODEL.items()},
  **{rf'(evals\..+\.)?data\.({key})': bound for key, bound in _DATA.items()},
  **{rf'.+\.(source_)?options\.({key})': bound for key, bound in _SOURCE.items()},
  **{rf'tune\.({key})': bound for key, bound in _TUNE.items()},
  r'task\.label_smoothing': _SHARE,
  r'task\.(mixup|cutmix)': Range(least=0, most=1e3),
  r'task\.(switch_prob|rate|no_object)': Range(least=0, most=1),
  r'task\.(l1|giou)': _FACTOR,
  r'(task|evals\..+?)\.ignore': _CLASS,
  **{rf'optim\.({key})': bound for key, bound in _OPTIM.items()},
  r'mesh\.(data|fsdp|tensor)': _whole(-1, 2**20, '-1: the devices that are left'),
  **{rf'evals\..+?\.({key})': bound for key, bound in _EVALUATION.items()},
  r'(checkpoint|log)\.(every|keep_every)': _PERIOD,
  r'checkpoint\.(keep_latest|patience)': _whole(1, INT32),
}


def check(config: dict) -> None:
  """Refuses numbers out of range; a number without a declared range must be finite.

  That a whole number is expected, not a fraction, is left to `config.check_type`.

  Raises:
    UserError: names the key, its value and its range.
  """
  for path, value in numbers(config):
    # `isfinite` raises for integers beyond the range of floats.
    bound, finite = of(path), isinstance(value, int) or math.isfinite(value)
    fraction = bound.whole and isinstance(value, float)
    if not finite or (value not in bound and not fraction):
      raise UserError(f'config.{path}={value!r}: expected {bound}.')
    if not bound.whole and abs(value) >= 2**63 and isinstance(value, int):
      raise UserError(
        f'config.{path}={value}: integers have 64 bits. Write {float(value)}.'
      )


def of(path: str) -> Range:
  """Returns the range of a number by its path below `config`, 'optim.lr'; else `ANY`."""
  for regex, bound in RANGES.items():
    if re.fullmatch(regex, path):
      return bound
  return ANY


ANY = Range(least=-FLOAT32, most=FLOAT32)  # of keys that are not in RANGES


def numbers(value, path: str = '') -> Iterator[tuple[str, int | float]]:
  """Yields (path, number) of every number in nested dicts and lists."""
  if isinstance(value, dict):
    for key, item in value.items():
      yield from numbers(item, f'{path}.{key}' if path else str(key))
  elif isinstance(value, list | tuple):
    for i, item in enumerate(value):
      yield from numbers(item, f'{path}[{i}]')
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield path, value
