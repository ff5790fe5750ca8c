"""A model's step beside timm's PyTorch model of the same shape, on this device.

  .venv-peer/bin/python benchmarks/timm_models.py vit:S/16 [--mode train] [--batch 8]
  ... vit:B/16 --dtype bfloat16 --batch 128,256 --timm eager,compiled

timm's side runs as its users run it fast: fused attention and AdamW, TF32 for float32,
channels last, and `compiled` by torch.compile. In bfloat16 it trains under autocast, and
evaluates with weights of bfloat16, as timm's own benchmark does. Its activation is its own,
the erf form of the GELU: PyTorch's tanh form takes several times as long on CPUs.

Memory is the compiler's plan here and the peak of PyTorch's allocator there, on GPUs.
"""

import itertools
import math
import os
import sys

import turns

from vit_jax import cli
from vit_jax.tools import bench

RATE, DECAY = 1e-3, 0.1  # AdamW's, as in our step
SIDES = ('eager', 'compiled')


class Timm:
  """timm's model of the same architecture, with its batch."""

  def __init__(self, subject, mode: str, batch: int, compiled: bool):
    import timm
    import torch

    from vit_jax.machine import cores

    torch.manual_seed(0)
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision('high')
    torch._dynamo.reset()  # Without it a second batch size is compiled for any size.
    self._torch, self._mode = torch, mode
    self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if self._device == 'cuda':
      torch.cuda.empty_cache()
      torch.cuda.reset_peak_memory_stats()
    half = subject.dtype == 'bfloat16'
    self._autocast = half and mode == 'train'
    dtype = torch.bfloat16 if half and mode == 'forward' else torch.float32
    architecture, options = same_in_timm(subject)
    model = timm.create_model(architecture, **options)
    self.params = sum(p.numel() for p in model.parameters())
    model = model.to(self._device, dtype, memory_format=torch.channels_last)
    model.train(mode == 'train')
    images = torch.rand((batch, 3, *subject.size), device=self._device) * 2 - 1
    self._images = images.to(dtype, memory_format=torch.channels_last)
    self._labels = torch.zeros(batch, dtype=torch.long, device=self._device)
    self._call = torch.compile(model) if compiled else model
    self._adamw = torch.optim.AdamW(
      model.parameters(), lr=RATE, weight_decay=DECAY, fused=True
    )

  def run(self, steps: int) -> None:
    """Runs some steps; the device is idle afterwards."""
    for _ in range(steps):
      (self._train if self._mode == 'train' else self._forward)()
    if self._device == 'cuda':
      self._torch.cuda.synchronize()

  def gib(self) -> float:
    """Returns the largest memory of the device that was in use, 0 on CPUs."""
    if self._device == 'cpu':
      return 0.0
    return self._torch.cuda.max_memory_allocated() / 2**30

  def _forward(self):
    with self._torch.inference_mode():
      self._call(self._images)

  def _train(self):
    self._adamw.zero_grad(set_to_none=True)
    half = self._torch.bfloat16
    with self._torch.autocast(self._device, dtype=half, enabled=self._autocast):
      logits = self._call(self._images)
      loss = self._torch.nn.functional.cross_entropy(logits, self._labels)
    loss.backward()
    self._adamw.step()


def same_in_timm(subject) -> tuple[str, dict]:
  """Returns (architecture, arguments of `timm.create_model`) of a `bench.Subject`."""
  import numpy as np

  from vit_jax import models, trees
  from vit_jax.weights import formats

  model = models.build(**subject.section)
  fields = model.fields()
  if 'act' in fields:
    fields['act'] = 'gelu_erf'
  shapes = trees.flatten(model.shapes((*subject.size, 3))['params'])
  # Zeros: only names and shapes matter.
  zeros = {name: np.zeros(x.shape, np.float32) for name, x in shapes.items()}
  family = subject.section['name']
  _, config = formats.find_writer(family, 'timm').write(
    zeros, fields, subject.size, None
  )
  classes = config['num_classes']
  return config['architecture'], {'num_classes': classes, **config['model_args']}


def main(argv: list[str]) -> int:
  parser = cli.Parser('timm_models.py', description=__doc__.split('\n')[0])
  parser.add_argument('model', metavar='MODEL')
  parser.add_argument('--mode', type=cli.words(bench.MODES), default=list(bench.MODES))
  parser.add_argument('--dtype', choices=bench.DTYPES, default='float32')
  batches = lambda text: [cli.positive(word) for word in text.split(',')]
  parser.add_argument('--batch', type=batches, default=[8], metavar='N[,N...]')
  parser.add_argument('--resolution', type=cli.resolution, default=(224, 224))
  parser.add_argument('--timm', type=cli.words(SIDES), default=['eager'])
  parser.add_argument(
    '--steps', type=cli.positive, help='of a turn; default: as in bench'
  )
  parser.add_argument('--rounds', type=cli.positive, default=7)
  args = parser.parse_args(argv)
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # room for PyTorch
  subject = bench.Subject(args.model, args.dtype, args.resolution, {}, {})
  peak = bench.matrix_peak(args.dtype)['flops_per_s']
  print(f'{bench.this_machine()}, {peak / 1e12:.3g} TFLOP/s in {args.dtype}')
  for mode, batch in itertools.product(args.mode, args.batch):
    ours = bench.Step(subject, mode, batch)
    ours.turn(1)
    steps = args.steps or math.ceil(2 * bench.TURN / ours.turn(1))
    memory = f'{ours.memory / 2**30:.3g} GiB'
    passes = 3 if mode == 'train' else 1
    for side in args.timm:
      theirs = Timm(subject, mode, batch, side == 'compiled')
      if theirs.params != subject.params:
        print(f'note: {subject.params:,} parameters here, {theirs.params:,} there')
      timing = turns.compare(
        turns.timed(lambda step=ours, steps=steps: step.turn(steps)),
        turns.timed(lambda timm=theirs, steps=steps: timm.run(steps)),
        args.rounds,
      )
      rate, their_rate = (batch * steps / timing[key] for key in ('ours', 'theirs'))
      mfu = passes * subject.flops * rate / peak
      print(
        f'{args.model} {mode} {args.dtype} batch {batch}: {rate:.4g} images/s, MFU '
        f'{mfu:.0%}, {memory}; timm {side} {their_rate:.4g}, {theirs.gib():.3g} GiB; '
        f'{turns.text(timing)}',
        flush=True,
      )
      del theirs  # before the memory of the next one
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
