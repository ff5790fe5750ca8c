"""A model's step beside timm's PyTorch model of the same shape, on this device.

  .venv-peer/bin/python benchmarks/timm_models.py vit:S/16 [--mode train] [--batch 8]

timm's side runs as its users run it fast: fused attention and AdamW, TF32 for float32,
autocast for bfloat16, channels last, and with --compile by torch.compile. Its activation
is its own, the erf form of the GELU: PyTorch's tanh form takes several times as long on
CPUs.
"""

import os
import sys

import turns

from vit_jax import cli
from vit_jax.tools import bench

RATE, DECAY = 1e-3, 0.1  # AdamW's, as in our step


class Timm:
  """timm's model of the same architecture, with its batch."""

  def __init__(self, subject, mode: str, batch: int, compiled: bool):
    import timm
    import torch

    from vit_jax.machine import cores

    torch.manual_seed(0)
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision('high')
    self._torch, self._mode, self._half = torch, mode, subject.dtype == 'bfloat16'
    self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
    architecture, options = same_in_timm(subject)
    model = timm.create_model(architecture, **options)
    self.params = sum(p.numel() for p in model.parameters())
    model = model.to(self._device, memory_format=torch.channels_last)
    model.train(mode == 'train')
    images = torch.rand((batch, 3, *subject.size), device=self._device) * 2 - 1
    self._images = images.contiguous(memory_format=torch.channels_last)
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

  def _autocast(self):
    half = self._torch.bfloat16
    return self._torch.autocast(self._device, dtype=half, enabled=self._half)

  def _forward(self):
    with self._torch.inference_mode(), self._autocast():
      self._call(self._images)

  def _train(self):
    self._adamw.zero_grad(set_to_none=True)
    with self._autocast():
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
  fields = models.fields_of(model)
  if 'act' in fields:
    fields['act'] = 'gelu_erf'
  shapes = trees.flatten(models.shapes_of(model, (*subject.size, 3))['params'])
  # Zeros: only names and shapes matter.
  zeros = {name: np.zeros(x.shape, np.float32) for name, x in shapes.items()}
  family = subject.section['name']
  _, config = formats.writer(family, 'timm').write(zeros, fields, subject.size, None)
  classes = config['num_classes']
  return config['architecture'], {'num_classes': classes, **config['model_args']}


def main(argv: list[str]) -> int:
  parser = cli.Parser('timm_models.py', description=__doc__.split('\n')[0])
  parser.add_argument('model', metavar='MODEL')
  parser.add_argument('--mode', type=cli.words(bench.MODES), default=list(bench.MODES))
  parser.add_argument('--dtype', choices=bench.DTYPES, default='float32')
  parser.add_argument('--batch', type=cli.positive, default=8)
  parser.add_argument('--resolution', type=cli.resolution, default=(224, 224))
  parser.add_argument('--steps', type=cli.positive, default=2, help='of a turn')
  parser.add_argument('--rounds', type=cli.positive, default=7)
  parser.add_argument('--compile', action='store_true', help='torch.compile')
  args = parser.parse_args(argv)
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # room for PyTorch
  subject = bench.Subject(args.model, args.dtype, args.resolution, {}, {})
  print(bench.this_machine())
  for mode in args.mode:
    theirs = Timm(subject, mode, args.batch, args.compile)
    if theirs.params != subject.params:
      print(f'note: {subject.params:,} parameters here, {theirs.params:,} there')
    ours = bench.Step(subject, mode, args.batch)
    timing = turns.compare(
      turns.timed(lambda step=ours: step.turn(args.steps)),
      turns.timed(lambda side=theirs: side.run(args.steps)),
      args.rounds,
    )
    rate = lambda side, timing=timing: args.batch * args.steps / timing[side]
    print(
      f'{args.model} {mode} {args.dtype} batch {args.batch}: {rate("ours"):.3g} images/s, '
      f'timm {rate("theirs"):.3g}, {turns.text(timing)}',
      flush=True,
    )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
