"""Schedules, optimizers and weight decay: the config's `optim` section.

An update is `-lr(step) * factor * (optimizer(clip(gradient)) + wd * parameter)`: weight
decay is decoupled from the gradient and multiplied by the learning rate, as in AdamW
(Loshchilov & Hutter, arXiv 1711.05101) and PyTorch. big_vision's `config.wd` is not
multiplied by the peak rate: its number divided by its `lr` is ours (wd 1e-4 at lr 1e-3
is 0.1 here).
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import optax

from vit_jax import config_check
from vit_jax.errors import UserError, choose
from vit_jax.optim import averages, multipliers, schedules
from vit_jax.optim.multipliers import WD_RULES
from vit_jax.optim.optimizers import OPTIMIZERS
from vit_jax.optim.schedules import make_schedule

RUN = ('total_steps', 'family')  # parameters that the run gives, not its config


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What the train step needs.

  Attributes:
    tx: `update(grads, state, params, rate=rate(step), learns=learns)` gives what to add to
      params, and the state; the state as it was where `learns` is false, see `guard`.
    rate: step -> learning rate.
    average: `(average, params, step) -> average` of `State.ema`, or None: none kept.
    gradient_point: `(params, opt_state) -> params` at which to take the gradient.
    accum: micro-batches in a batch.
  """

  tx: optax.GradientTransformationExtraArgs
  rate: Callable[[jax.Array], jax.Array]
  average: Callable | None
  gradient_point: Callable
  accum: int


def build(
  name: str,
  lr: float,
  total_steps: int,
  *,
  schedule: Annotated[dict | None, schedules.check] = None,
  wd: float = 0.0,
  wd_rules: Sequence[tuple[str, float]] = WD_RULES,
  lr_rules: Sequence[tuple[str, float]] = (),
  layer_decay: float | None = None,
  clip: float | None = None,
  ema: float | None = None,
  swa: Annotated[dict | None, config_check.keys_of(averages.swa, RUN)] = None,
  accum: int = 1,
  family=None,
  **options,
) -> Optimizer:
  """Returns the optimizer of a config's `optim` section.

  Args:
    name: a key of `optimizers.OPTIMIZERS`: 'adamw', 'adam' (which takes no wd), 'sgd',
      'adafactor', 'lion', 'lamb', 'muon', 'schedule_free' (AdamW without a decay of the
      rate, arXiv 2405.15682).
    schedule: arguments of `make_schedule`, default {'decay': 'cosine'}; 'constant' for
      schedule_free, which takes no other.
    wd: decoupled weight decay, multiplied by the learning rate.
    wd_rules: (regex, factor) on parameter paths, first match wins.
    lr_rules: (regex, factor of the learning rate), factors above 0. Default: 1 for all.
    layer_decay: layer-wise learning-rate decay, see `multipliers.layer_factors`.
    clip: largest global norm of the gradient; larger ones are scaled down to it.
    ema: decay of an exponential moving average of the parameters (Polyak averaging;
      0.9999 in the paper, section 4.1), kept beside them; None: not kept.
    swa: arguments of `averages.swa`, an average of another kind; not with ema.
    accum: number of micro-batches into which a batch is cut to save memory.
    family: of the model, see `models.family`; muon, lamb and layer_decay ask it which
      parameters are matrices, stacked layers or of which depth.
    **options: of the optimizer, see `optimizers`.

  Raises:
    UserError: for an unknown name or option, or a value out of range.
  """
  direction = _direction(name)
  section = {'name': name, 'lr': lr, 'schedule': schedule, 'swa': swa, **options}
  config_check.bind('config.optim', section, signature(name))
  _check_ranges(lr, wd, clip, layer_decay, options.get('moment_dtype'))
  asks = name in ('muon', 'lamb') or layer_decay is not None
  assert family is not None or not asks, f'{name}, layer_decay: needs the family'
  for regex, factor in lr_rules:
    if not factor > 0:
      raise UserError(
        f'config.optim.lr_rules: the factor of {regex!r} is {factor}, expected more than '
        '0. To freeze parameters, name those that train: config.tune='
        "{'method': 'rules', 'train': ['head/.*']}."
      )
  if name == 'muon' and not family.matrices:
    raise UserError(
      f'config.optim: muon is for matrices, which {family.model.__name__} has none of in '
      'its blocks; name it adamw or sgd.'
    )
  if name == 'adam' and wd:
    raise UserError('config.optim: adam has no weight decay here; name it adamw.')
  if accum < 1:
    raise UserError(f'config.optim.accum={accum}: expected 1 or more micro-batches.')
  free = name == 'schedule_free'
  schedule = {'decay': schedules.default_decay(name), **(schedule or {})}
  if free and schedule['decay'] != 'constant':
    raise UserError(
      f'config.optim.schedule.decay={schedule["decay"]!r}: schedule_free takes none; '
      "leave it out, or write 'constant'."
    )
  rate = make_schedule(lr, total_steps, **schedule)

  parts = []
  if clip is not None:
    parts.append(optax.clip_by_global_norm(clip))
  parts.append(direction(**options, **({'family': family} if name == 'muon' else {})))
  if wd:
    parts.append(multipliers.decayed_weights(wd, wd_rules))
  if name == 'lamb':
    parts.append(multipliers.trust_ratio(family))
  parts.append(multipliers.scaled_by_rate(lr_rules, layer_decay, family))
  tx = optax.chain(*parts)
  gradient_point = lambda params, state: params
  if free:
    tx = averages.schedule_free(tx, rate, options.get('b1', 0.9))
    gradient_point = averages.gradient_point
  return Optimizer(tx, rate, _average(ema, swa, total_steps), gradient_point, accum)


def keeps_average(section: dict) -> bool:
  """Whether a run with this `optim` section has an average beside its parameters."""
  return section.get('ema') is not None or section.get('swa') is not None


def _average(ema, swa, total_steps) -> Callable | None:
  if ema is not None and swa is not None:
    raise UserError('config.optim: give ema or swa, not both; unset one with None.')
  if ema is not None:
    return averages.ema(ema)
  if swa is not None:
    return averages.swa(total_steps, **swa)
  return None


def _check_ranges(lr, wd, clip, layer_decay, moment_dtype) -> None:
  for key, value, fits in (
    ('lr', lr, 0 < lr < math.inf),
    ('wd', wd, 0 <= wd < math.inf),
    ('clip', clip, clip is None or clip > 0),
    ('layer_decay', layer_decay, layer_decay is None or 0 < layer_decay <= 1),
  ):
    if not fits:
      raise UserError(f'config.optim.{key}={value!r} is out of range.')
  dtypes = (None, 'float32', 'bfloat16')
  if moment_dtype not in dtypes:
    raise UserError(f'config.optim.moment_dtype={moment_dtype!r}: one of {dtypes}.')


def signature(name: str) -> inspect.Signature:
  """Returns the keys that the `optim` section may hold for this optimizer."""
  common = inspect.signature(build).parameters
  known = common | inspect.signature(_direction(name)).parameters
  return inspect.Signature(
    p.replace(kind=p.KEYWORD_ONLY)
    for key, p in known.items()
    if key not in RUN and p.kind is not p.VAR_KEYWORD
  )


def _direction(name: str):
  return choose('optimizer', name, OPTIMIZERS)
