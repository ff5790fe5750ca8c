"""Which attention layers of a compiled GPU program use cuDNN's fused kernel.

The kernel is a call in the program's text. How many layers there are, and which of them
were never offered to it, is read off the traced model: `kernels.attention` names the
weights [B, M, N, S] that it computes where no kernel does.
"""

import collections

from vit_jax.tools.tpu import hlo

_CALL, _BACKWARD = '__cudnn$fmha', 'Backward'


def calls(text: str) -> dict[str, int]:
  """Returns how often a compiled program's text calls the kernel.

  Returns:
    {'forward', 'recomputed', 'backward': times}; recomputed: forward once more, in the
    backward pass. A scan counts as often as it runs.
  """
  found = dict.fromkeys(('forward', 'recomputed', 'backward'), 0)
  for run in hlo.instructions(text):
    if run.opcode != 'custom-call' or _CALL not in run.text:
      continue
    target = run.text.partition('custom_call_target="')[2].partition('"')[0]
    if target.endswith(_BACKWARD):
      found['backward'] += run.times
    elif 'rematted_computation' in run.op_name or 'transpose(' in run.op_name:
      found['recomputed'] += run.times
    else:
      found['forward'] += run.times
  return found


def layers(fn, *args) -> tuple[int, dict[str, int]]:
  """Returns (attention layers, {why: layers of them that the kernel is not offered}).

  Args:
    fn: a model's forward pass. args: arrays or `jax.ShapeDtypeStruct`, in any tree.
  """
  import jax

  found: collections.Counter = collections.Counter()
  _count(jax.make_jaxpr(fn)(*args).jaxpr, 1, False, found)
  total = sum(found.values())
  del found[None]
  return total, dict(found)


def _count(jaxpr, times: int, offered: bool, found) -> None:
  """Adds {why not, None for a layer that is offered: layers} to `found`."""
  from vit_jax.kernels.attention import WEIGHTS
  from vit_jax.tools.inspect.flops import inner_jaxprs

  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == 'name' and params['name'] == WEIGHTS:
      found[None if offered else _why(equation.outvars[0].aval)] += times
    inner = list(inner_jaxprs(params))
    here = offered or (name == 'cond' and any(map(_fused, inner)))
    for other in inner:
      _count(other, times * params['length'] if name == 'scan' else times, here, found)


def _fused(jaxpr) -> bool:
  from vit_jax.tools.inspect.flops import inner_jaxprs

  return any(
    equation.primitive.name.startswith('dot_product_attention_fwd')
    or any(map(_fused, inner_jaxprs(equation.params)))
    for equation in jaxpr.eqns
  )


def _why(weights) -> str:
  if weights.shape[2] == 1:
    return 'one query, with no N x S weights to save'
  if weights.dtype.itemsize != 2:
    return f'{weights.dtype}: the kernel takes half precision'
  return 'dropout of the weights, or what else `kernels.attention.attend` keeps from it'
