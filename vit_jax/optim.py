"""Schedules, optimizers and weight decay.

An update is `-lr(step) * (optimizer(clip(gradient)) + wd * parameter)`: weight decay
is decoupled from the gradient and multiplied by the learning rate, as in AdamW (Loshchilov
& Hutter, arXiv 1711.05101) and PyTorch. big_vision's `config.wd` is not multiplied by
the peak rate: its number divided by its `lr` is ours (wd 1e-4 at lr 1e-3 is 0.1 here).
"""

import dataclasses
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax import config as config_lib
from vit_jax import trees
from vit_jax.errors import UserError, did_you_mean

# Kernels only: no biases, norms, tokens or position embeddings (as big_vision).
WD_RULES = (('.*/kernel', 1.0), ('.*', 0.0))


# --- schedules: the factor of the peak rate after warmup, at progress in [0, 1] ---


def _constant():
  return lambda progress, step: jnp.ones(())


def _cosine(end: float = 0.0):
  return lambda progress, step: end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _linear(end: float = 0.0):
  return lambda progress, step: end + (1 - end) * (1 - progress)


def _rsqrt(timescale: float = 10_000):
  return lambda progress, step: jnp.sqrt(timescale / (timescale + step))


DECAYS = {
  'constant': _constant,
  'cosine': _cosine,
  'linear': _linear,
  'rsqrt': _rsqrt,
}


def make_schedule(
  lr: float,
  total_steps: int,
  *,
  decay: str = 'cosine',
  warmup: int = 0,
  cooldown: int = 0,
  **options,
) -> Callable[[jax.Array], jax.Array]:
  """Returns `step -> learning rate`, step being the number of updates already made.

  Update n (from 1) uses step n - 1, as in both reference codebases: with warmup the
  first update has rate 0, and the last does not quite reach the end value.

  Args:
    lr: the peak rate.
    decay: from the end of warmup to `total_steps`. cosine and linear fall to `end`, a
      fraction of the peak (default 0); rsqrt is sqrt(timescale / (timescale + steps
      since warmup)) (arXiv 2106.04560, section 3.5).
    warmup: steps of linear rise from 0.
    cooldown: the last steps, over which the rate falls linearly to 0 besides.
    **options: `end` or `timescale`, of the decay.

  Raises:
    UserError: for an unknown decay or option, or more warmup and cooldown than steps.
  """
  for key, value in dict(warmup=warmup, cooldown=cooldown).items():
    config_lib.check_type(f'config.optim.schedule.{key}', value, int)
    if value < 0:
      raise UserError(f'config.optim.schedule.{key}={value}: expected 0 or more.')
  if decay not in DECAYS:
    raise UserError(
      f'Unknown decay {decay!r}: one of {sorted(DECAYS)}.{did_you_mean(decay, DECAYS)}'
    )
  config_lib.bind(f'optim.schedule (decay {decay})', options, DECAYS[decay])
  if warmup + cooldown > total_steps:
    raise UserError(
      f'config.optim.schedule: warmup {warmup} + cooldown {cooldown} exceed the '
      f'{total_steps} steps of the run; shorten them (--config.optim.schedule.warmup=...) or train '
      'longer.'
    )
  factor = DECAYS[decay](**options)

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    after = jnp.maximum(step - warmup, 0.0)
    progress = jnp.clip(after / max(total_steps - warmup, 1), 0.0, 1.0)
    value = lr * factor(progress, after)
    if warmup:
      value *= jnp.minimum(1.0, step / warmup)
    if cooldown:
      value *= jnp.clip((total_steps - step) / cooldown, 0.0, 1.0)
    return value

  return rate


# --- optimizers: gradient -> direction, before the learning rate ---


def _adam(
  b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, moment_dtype: str | None = None
):
  return optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=moment_dtype)


def _sgd(
  momentum: float = 0.9, nesterov: bool = False, moment_dtype: str | None = None
):
  return optax.trace(momentum, nesterov=nesterov, accumulator_dtype=moment_dtype)


# `moment_dtype` is that of the first moment only: 'bfloat16' halves its memory, as in
# the AugReg recipes; the second moment needs float32.
OPTIMIZERS = {'adamw': _adam, 'adam': _adam, 'sgd': _sgd}


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What the train step needs: `tx` gives directions, `rate(step)` their length."""

  tx: optax.GradientTransformation
  rate: Callable[[jax.Array], jax.Array]
  ema: float | None
  accum: int


def build(
  name: str,
  lr: float,
  total_steps: int,
  *,
  schedule: dict | None = None,
  wd: float = 0.0,
  wd_rules: tuple = WD_RULES,
  clip: float | None = None,
  ema: float | None = None,
  accum: int = 1,
  **options,
) -> Optimizer:
  """Returns the optimizer of a config's `optim` section.

  Args:
    name: 'adamw', 'adam' (which takes no wd) or 'sgd'.
    schedule: arguments of `make_schedule`, default {'decay': 'cosine'}.
    wd: decoupled weight decay, multiplied by the learning rate.
    wd_rules: (regex, factor) on parameter paths, first match wins.
    clip: largest global norm of the gradient; larger ones are scaled down to it.
    ema: decay of an exponential moving average of the parameters (Polyak averaging;
      0.9999 in the paper, section 4.1), kept beside them; None: not kept.
    accum: number of micro-batches into which a batch is cut to save memory.
    **options: of the optimizer: b1, b2, eps; momentum, nesterov; moment_dtype.

  Raises:
    UserError: for an unknown name or option, or a value out of range.
  """
  config_lib.bind(f'optim (name {name})', options, _optimizer(name))
  _check_ranges(lr=lr, wd=wd, clip=clip, moment_dtype=options.get('moment_dtype'))
  if name == 'adam' and wd:
    raise UserError('config.optim: adam has no weight decay here; name it adamw.')
  if ema is not None and not 0 < ema < 1:
    raise UserError(f'config.optim.ema={ema}: expected a decay between 0 and 1.')
  if accum < 1:
    raise UserError(f'config.optim.accum={accum}: expected 1 or more micro-batches.')
  parts = []
  if clip is not None:
    parts.append(optax.clip_by_global_norm(clip))
  parts.append(_optimizer(name)(**options))
  if wd:
    parts.append(decayed_weights(wd, wd_rules))
  rate = make_schedule(lr, total_steps, **(schedule or {}))
  return Optimizer(optax.chain(*parts), rate, ema, accum)


def _check_ranges(lr, wd, clip, moment_dtype) -> None:
  for key, value, fits in (
    ('lr', lr, 0 < lr < math.inf),
    ('wd', wd, 0 <= wd < math.inf),
    ('clip', clip, clip is None or clip > 0),
  ):
    if not fits:
      raise UserError(f'config.optim.{key}={value!r} is out of range.')
  dtypes = (None, 'float32', 'bfloat16')
  if moment_dtype not in dtypes:
    raise UserError(f'config.optim.moment_dtype={moment_dtype!r}: one of {dtypes}.')


def signature(name: str) -> inspect.Signature:
  """Returns the keys that the `optim` section may hold for this optimizer."""
  common = inspect.signature(build).parameters.values()
  own = inspect.signature(_optimizer(name)).parameters.values()
  own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
  return inspect.Signature([p for p in common if p.kind is not p.VAR_KEYWORD] + own)


def _optimizer(name: str):
  if name not in OPTIMIZERS:
    raise UserError(
      f'Unknown optimizer {name!r}: one of {sorted(OPTIMIZERS)}.'
      f'{did_you_mean(name, OPTIMIZERS)}'
    )
  return OPTIMIZERS[name]


def decayed_weights(wd: float, rules) -> optax.GradientTransformation:
  """Adds `wd * factor * parameter` to each update, factors by path rules."""

  def update(updates, state, params):
    factors = trees.select(rules, params)
    decay = lambda u, p, f: u + (wd * f * p).astype(u.dtype) if f else u
    return jax.tree.map(decay, updates, params, factors), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
