"""`tools.bench --gpu`: a step's memory on a GPU, and which attention is cuDNN's kernel."""

from vit_jax.tools.bench import ahead
from vit_jax.tools.gpu import attention, topology
from vit_jax.tools.gpu.devices import GPUS

LEFT_OUT = (
  'not in it: time, as this compiler has no estimate of cycles; the workspace that cuDNN '
  'asks the device for; what autotuning would choose there'
)
_OPTIONS = {
  # Products by cuBLAS, with its workspace. Triton's tiles are chosen by timing them: with
  # nothing to time, XLA takes Triton for every product, and fails on some.
  'xla_gpu_enable_triton_gemm': False,
}


def about(name: str, model, mode: str) -> dict:
  """Returns the GPU's memory, its attention layers and those that are not fused."""
  layers, plain = attention.layers(*_forward(model, mode == 'train'))
  return {'hbm': GPUS[name].memory, 'attention_layers': layers, 'plain': plain}


def measure(lowered, name: str, model, mode: str, batch: int) -> dict:
  """Returns the memory of a lowered step, and its calls of cuDNN's attention."""
  from vit_jax.train import runtime

  program = lowered.compile(_OPTIONS)
  return {**runtime.memory(program), 'cudnn': attention.calls(program.as_text())}


def _forward(model, train: bool) -> tuple:
  """Returns (the forward pass of `model.train` or `model.forward`, its arguments)."""
  import jax

  def forward(params, images):
    given = {'train': True, 'features': False, 'rngs': {'dropout': jax.random.key(0)}}
    return model.module.apply({'params': params}, images, **(given if train else {}))

  images = jax.ShapeDtypeStruct((1, *model.size, 3), 'float32')
  return forward, model.shapes, images


def line(row: dict) -> str:
  """Returns a row in one line: all of its memory."""
  return f'{row["bytes"] / 2**30:.2f} GiB'


def table(result: dict) -> str:
  """Returns what the tool prints of a record."""
  rows = result['rows']
  lines = [
    *ahead.head(result, 'one device'),
    *ahead.body(rows, 'gpu', _COLUMNS, _numbers, _ratio),
  ]
  reasons = {
    f'  {number} of {row["attention_layers"]}: {why}': None
    for row in rows
    for why, number in row['plain'].items()
  }
  if reasons:
    lines += ['', 'Layers whose attention is not fused:', *reasons]
  return '\n'.join([*lines, '', f'{LEFT_OUT[0].upper()}{LEFT_OUT[1:]}.'])


_COLUMNS = f'{"arguments":>11}{"temp":>10}{"in all":>10}{"of":>10}  fused attention'


def _numbers(row: dict, side: dict) -> str:
  large = '' if side['bytes'] <= row['hbm'] else '; does not fit'
  return (
    f'{ahead.gib(side, "argument_bytes"):>11}{ahead.gib(side, "temp_bytes")}'
    f'{ahead.gib(side, "bytes")}{ahead.gib(row, "hbm")}  {_fused(row, side["cudnn"])}'
    f'{large}'
  )


def _ratio(ratio: dict) -> str:
  return f'{"":11}{ratio["temp_bytes"]:10.3f}{ratio["bytes"]:10.3f}'


def _fused(row: dict, cudnn: dict) -> str:
  """Returns 'forward 11 of 12, backward 11 of 12'."""
  of = row['attention_layers']
  if not of:
    return 'no attention'
  passes = ['forward', *(['backward'] if row['mode'] == 'train' else [])]
  text = ', '.join(f'{name} {cudnn[name]} of {of}' for name in passes)
  again = cudnn['recomputed']
  return text + (f', recomputed {again}' if again else '')


TARGET = ahead.Target(
  flag='gpu',
  topology=topology,
  left_out=LEFT_OUT,
  ratios=('temp_bytes', 'bytes'),
  about=about,
  measure=measure,
  line=line,
  table=table,
)
