"""Schedules, optimizers and weight decay: the config's `optim` section.

An update is `-lr(step) * factor * (optimizer(clip(gradient)) + wd * parameter)`: weight
decay is decoupled from the gradient and multiplied by the learning rate, as in AdamW
(Loshchilov & Hutter, arXiv 1711.05101) and PyTorch. big_vision's `config.wd` is not
multiplied by the peak rate. Divide it by big_vision's `lr` to get `wd` here: 1e-4 at lr 1e-3
is 0.1.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import optax

from vit_jax import trees
from vit_jax.check import FLOAT32, Factor, Fraction, Positive, Range, Section
from vit_jax.errors import UserError
from vit_jax.optim import averages, multipliers, schedules
from vit_jax.optim.multipliers import WD_RULES
from vit_jax.optim.optimizers import OPTIMIZERS
from vit_jax.optim.schedules import make_schedule

# Arguments that the run passes; an `optim` section may not set them.
RUN = ('name', 'total_steps', 'family')


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The parts of an optimizer that the train step uses.

  Attributes:
    tx: the transformation. `tx.update(grads, state, params, rate=rate(step), good=good,
      step=step)` returns the change of params and the new state, or the old state if `good` is
      false.
    rate: maps a step to the learning rate.
    average: `(average, params, step) -> average`, which updates `State.ema`, or None.
    accum: number of micro-batches in a batch.
  """

  tx: optax.GradientTransformationExtraArgs
  rate: Callable[[jax.Array], jax.Array]
  average: Callable | None
  accum: int


def _one_average(where: str, value, section: dict) -> None:
  if section.get('ema') is not None:
    raise UserError(
      f'{where} does not work with config.optim.ema: unset one of them with None.'
    )


def _needs_ema(where: str, value, section: dict) -> None:
  if section.get('ema') is None:
    raise UserError(f'{where}={value} needs config.optim.ema.')


def build(
  name: str,
  lr: Positive,
  total_steps: int,
  *,
  schedule: Annotated[dict | None, schedules.check_schedule] = None,
  wd: Annotated[float, Range(0, 1e4)] = 0.0,
  wd_end: Annotated[float, Range(0, 1e4)] | None = None,
  wd_rules: Sequence[tuple[str, Factor]] = WD_RULES,
  lr_rules: Sequence[
    tuple[str, Annotated[float, Range(0, 1e6, '(]', 'to freeze, see config.tune')]]
  ] = (),
  lr_starts: Sequence[tuple[str, schedules.Steps | Fraction]] = (),
  layer_decay: Annotated[float, Range(0, 1, '(]')] | None = None,
  clip: Annotated[float, Range(0, FLOAT32, '(]')] | None = None,
  clip_by: str | None = None,
  ema: Annotated[float, Range(0, 1, '()')] | None = None,
  ema_end: Annotated[float, Range(0, 1, '(]'), _needs_ema] | None = None,
  swa: Annotated[dict | None, Section(averages.swa, RUN), _one_average] = None,
  accum: Annotated[int, Range(1, 2**20)] = 1,
  family=None,
  **options,
) -> Optimizer:
  """Returns the optimizer of a config's `optim` section.

  Args:
    name: a key of `optimizers.OPTIMIZERS`: 'adamw', 'lamb', 'sgd', 'adafactor', or 'adam' and
      'lars', which take no wd.
    schedule: arguments of `make_schedule`, default {'decay': 'cosine'}.
    wd: decoupled weight decay, multiplied by the learning rate.
    wd_end: weight decay at the end of the run, reached from `wd` by half a cosine; None: it
      does not change.
    wd_rules: (regex, factor): multiplies the weight decay of parameters whose path matches;
      the first match wins.
    lr_rules: (regex, factor): multiplies the learning rate in the same way. Factors are
      above 0; the default is 1.
    lr_starts: (regex, start): the learning rate of parameters whose path matches is 0 before
      this step, or before this share of the run as a float. Their moments move.
    layer_decay: layer-wise learning-rate decay, see `multipliers.layer_factors`.
    clip: largest norm of the gradients; beyond it, they are scaled down.
    clip_by: regex. Parameters with the same text in its groups are clipped together, by a
      norm of their own; None: all are clipped together. A scanned stack is one parameter.
    ema: decay of an exponential moving average of the parameters (Polyak averaging;
      0.9999 in the paper, section 4.1), stored beside them; None: no average.
    ema_end: decay at the end of the run, reached from `ema` by half a cosine.
    swa: arguments of `averages.swa`, another kind of average; use it without `ema`.
    accum: number of micro-batches into which a batch is cut to save memory.
    family: the model's `Family`, which gives the depths for layer_decay.
    **options: the optimizer's own options, see `optimizers`.

  Raises:
    UserError: for an unknown name.
    ValueError: for a schedule or an average that does not fit into the run.
  """
  rate = make_schedule(lr, total_steps, **(schedule or {}))
  starts = [(regex, schedules.warmup_steps(at, total_steps)) for regex, at in lr_starts]
  parts = []
  if clip is not None and clip_by is not None:
    parts.append(multipliers.clip_groups(clip, clip_by))
  elif clip is not None:
    parts.append(optax.clip_by_global_norm(clip))
  parts.append(OPTIMIZERS[name](**options))
  if wd or wd_end:
    decay = wd if wd_end is None else schedules.half_cosine(wd, wd_end, total_steps)
    parts.append(multipliers.add_weight_decay(decay, wd_rules))
  if name == 'lamb':
    decays = lambda tree: jax.tree.map(bool, trees.select(wd_rules, tree))
    parts.append(optax.masked(optax.scale_by_trust_ratio(), decays))
  parts.append(multipliers.scale_by_rate(lr_rules, layer_decay, family, starts))
  average = None
  if ema is not None:
    average = averages.ema(ema, ema_end, total_steps)
  elif swa is not None:
    average = averages.swa(total_steps, **swa)
  return Optimizer(optax.chain(*parts), rate, average, accum)


def keeps_average(section: dict) -> bool:
  """Whether a run with this `optim` section keeps an average of its parameters."""
  return section.get('ema') is not None or section.get('swa') is not None


def signature(name: str) -> inspect.Signature:
  """Returns the signature of the `optim` section for an optimizer."""
  no_decay = ('wd', 'wd_end', 'wd_rules') if name in ('adam', 'lars') else ()
  without = {*RUN, 'options', *no_decay}
  keys = inspect.signature(build).parameters | OPTIMIZERS.signature(name).parameters
  return inspect.Signature(
    p.replace(kind=p.KEYWORD_ONLY) for key, p in keys.items() if key not in without
  )
