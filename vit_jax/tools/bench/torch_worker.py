"""The PyTorch side of a benchmark: timm's model, in a process of its own or in ours.

  PYTHON torch_worker.py # answers JSON lines on standard input, one line each

Run by `tools.bench --vs timm --torch-python PYTHON`, whose Python needs torch and timm
and nothing of ours: this file imports no other part of vit_jax.
"""

import argparse
import contextlib
import json
import sys
import time

RATE, DECAY = 1e-3, 0.1  # of AdamW, as on our side
WARM_UP = 3  # steps: the first compiles, the next ones settle allocators


class Timm:
  """A model of timm with its batch, in training or evaluation, on one device.

  As its users run it fast: fused attention and fused AdamW (timm's and PyTorch's
  defaults where there are such), TF32 for float32 (JAX's default), autocast for
  bfloat16, channels last, and compiled where `spec` says so.
  """

  def __init__(self, spec: dict):
    """Builds and warms up.

    Args:
      spec: architecture and model_args of `timm.create_model`; num_classes; mode,
        'train' or 'forward'; dtype, 'float32' or 'bfloat16'; batch; size, [H, W];
        device, 'cuda' or 'cpu'; threads; compile.
    """
    torch, timm = load()
    torch.manual_seed(0)
    torch.set_num_threads(spec['threads'])
    torch.set_float32_matmul_precision('high')
    self._torch, self._spec = torch, spec
    if self._gpu:
      torch.cuda.reset_peak_memory_stats()
    self._model = timm.create_model(
      spec['architecture'], num_classes=spec['num_classes'], **spec['model_args']
    ).to(spec['device'], memory_format=torch.channels_last)
    self._model.train(spec['mode'] == 'train')
    shape = (spec['batch'], 3, *spec['size'])
    images = torch.rand(shape, device=spec['device']) * 2 - 1
    self._images = images.contiguous(memory_format=torch.channels_last)
    self._labels = torch.zeros(spec['batch'], dtype=torch.long, device=spec['device'])
    self._call = torch.compile(self._model) if spec['compile'] else self._model
    self._loss = torch.nn.CrossEntropyLoss()
    if spec['mode'] == 'train':
      self._adamw = torch.optim.AdamW(
        self._model.parameters(), lr=RATE, weight_decay=DECAY, fused=True
      )
    start = time.perf_counter()
    self.turn(WARM_UP)
    self.about = {
      'params': sum(p.numel() for p in self._model.parameters()),
      'warm_up_s': time.perf_counter() - start,
    }

  @staticmethod
  def check(spec: dict) -> dict[str, str]:
    """Returns the versions of what runs here, before anything is built.

    Raises:
      ImportError: without torch or timm. RuntimeError: without spec['device'].
    """
    torch, timm = load()
    if spec['device'] == 'cuda' and not torch.cuda.is_available():
      raise RuntimeError(f'torch {torch.__version__} sees no GPU')
    return {'torch': torch.__version__, 'timm': timm.__version__}

  @property
  def _gpu(self) -> bool:
    return self._spec['device'] == 'cuda'

  def turn(self, steps: int) -> dict:
    """Runs so many steps; returns seconds: 'wall', and 'cpu' of this process.

    The device is idle before and after; 'memory_bytes' is its allocator's high-water
    mark, None on a CPU.
    """
    step = self._train if self._spec['mode'] == 'train' else self._forward
    self._wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
      step()
    self._wait()
    return {
      'wall': time.perf_counter() - wall,
      'cpu': time.process_time() - cpu,
      'memory_bytes': self._torch.cuda.max_memory_allocated() if self._gpu else None,
    }

  def _autocast(self):
    return self._torch.autocast(
      self._spec['device'],
      dtype=self._torch.bfloat16,
      enabled=self._spec['dtype'] == 'bfloat16',
    )

  def _forward(self):
    with self._torch.inference_mode(), self._autocast():
      self._call(self._images)

  def _train(self):
    self._adamw.zero_grad(set_to_none=True)
    with self._autocast():
      loss = self._loss(self._call(self._images), self._labels)
    loss.backward()
    self._adamw.step()

  def _wait(self):
    if self._gpu:
      self._torch.cuda.synchronize()


def load():
  """Returns the modules torch and timm.

  timm imports torchvision, whose Python fails where its compiled operators are of
  another build than torch; a model uses none of them, so that it is let through.
  """
  import torch

  with lenient_operators(torch):
    import timm
  return torch, timm


@contextlib.contextmanager
def lenient_operators(torch):
  """Registers shapes of operators that exist, and passes over the others."""
  register = torch.library.register_fake

  def lenient(name, *args, **kwargs):
    def decorate(function):
      try:
        return register(name, *args, **kwargs)(function)
      except RuntimeError:
        return function

    return decorate

  torch.library.register_fake = lenient
  try:
    yield
  finally:
    torch.library.register_fake = register


class Server:
  """Answers {'check': spec}, {'build': spec}, and then {'turn': steps} many times."""

  def __init__(self, make=Timm):
    """Takes the class of subjects: `check(spec)`, and of each `about` and `turn`."""
    self._make, self._subject = make, None

  def answer(self, message: dict) -> dict:
    """Returns the reply; {'error': text, 'memory': whether that ran out} on failure."""
    try:
      if 'check' in message:
        return self._make.check(message['check'])
      if 'build' in message:
        self._subject = None  # its memory is free before the next one is built
        self._subject = self._make(message['build'])
        return self._subject.about
      return self._subject.turn(message['turn'])
    except Exception as error:  # told by whoever asked
      memory = isinstance(error, MemoryError) or 'out of memory' in str(error).lower()
      lines = str(error).strip().splitlines() or ['']
      return {'error': f'{type(error).__name__}: {lines[0]}', 'memory': memory}


def serve(server: Server) -> None:
  """Replies on standard output to the JSON lines of standard input, until its end.

  What libraries print goes to standard error.
  """
  replies, sys.stdout = sys.stdout, sys.stderr
  # Whoever asked was interrupted, and this process with it or after it.
  with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
    for line in sys.stdin:
      print(json.dumps(server.answer(json.loads(line))), file=replies, flush=True)


if __name__ == '__main__':
  argparse.ArgumentParser(description=__doc__.split('\n')[0]).parse_args()
  serve(Server())
