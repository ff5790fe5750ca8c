"""Ours and timm's in turns: who runs it, which model it is, what the ratio is."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from vit_jax import models
from vit_jax.errors import OutOfMemory, UserError
from vit_jax.machine import cores
from vit_jax.tools.bench import ours as bench_ours
from vit_jax.tools.bench import torch_worker
from vit_jax.weights import formats

SCRIPT = Path(torch_worker.__file__)
# What the comparison's model does not have: each would be our own work only.
_OURS_ALONE = {
  'dropout': 0.0,
  'stochastic_depth': 0.0,
  'remat': 'none',
}


class PeerOutOfMemory(OutOfMemory):
  """The other side's device, or its share of ours, cannot hold the model."""


class Process:
  """A worker in another Python, which answers messages as `torch_worker.Server`."""

  def __init__(self, python: str, script: Path, *args: str):
    """Starts it.

    Raises:
      UserError: if `python` cannot be run.
    """
    self._python = python
    env = {**os.environ, 'OMP_NUM_THREADS': str(cores())}
    try:
      self._process = subprocess.Popen(
        [python, str(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
      )
    except OSError as error:
      raise UserError(f'--torch-python {python}: {error.strerror}.') from None

  def ask(self, **message) -> dict:
    """Returns the reply.

    Raises:
      PeerOutOfMemory: if there is too little for the model there.
      UserError: for anything else that went wrong there.
    """
    with contextlib.suppress(BrokenPipeError):
      print(json.dumps(message), file=self._process.stdin, flush=True)
    for line in self._process.stdout:
      with contextlib.suppress(json.JSONDecodeError):
        return _checked(json.loads(line), f'--torch-python {self._python}')
    code = self._process.wait()
    if code == -9:  # what Linux does to the largest process of a full machine
      raise PeerOutOfMemory('its process was killed')
    raise UserError(
      f'--torch-python {self._python} ended with exit code {code}; see its lines above.'
    )

  def close(self) -> None:
    """Ends the worker."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


class Here:
  """The same in this process."""

  def __init__(self):
    self._server = torch_worker.Server()

  def ask(self, **message) -> dict:
    return _checked(self._server.answer(message), 'timm')

  def close(self) -> None:
    self._server = None


def _checked(reply: dict, who: str) -> dict:
  if 'error' not in reply:
    return reply
  if reply['memory']:
    raise PeerOutOfMemory(reply['error'])
  advice = ''
  if reply['error'].startswith(('ModuleNotFoundError', 'ImportError')):
    advice = ' The comparison needs torch and timm there: pip install timm.'
  raise UserError(f'{who}: {reply["error"]}.{advice}')


def start(python: str | None):
  """Returns what runs timm: this process, or a worker in `python`, to be closed.

  Raises:
    UserError: if neither can.
  """
  if python is not None:
    return Process(python, SCRIPT)
  if all(importlib.util.find_spec(name) for name in ('torch', 'timm')):
    return Here()
  raise UserError(
    f'--vs timm: {sys.executable} has no torch and timm. Install them (pip install '
    'timm), or name the Python of an environment that has them: --torch-python PYTHON.'
  )


def theirs(model: bench_ours.Model) -> dict:
  """Returns architecture, model_args and num_classes of timm's model of this shape.

  With timm's own activation, the erf form of the GELU: on CPUs PyTorch's tanh form, of
  the original code and ours, takes several times as long.

  Raises:
    UserError: for what timm does not have.
  """
  family = models.parse_name(model.name)[0]
  module = model.module
  fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module)}
  for field, plain in _OURS_ALONE.items():
    if fields.get(field, plain) != plain:
      raise UserError(f'--vs timm compares models with {field}={plain}: leave it out.')
  if 'act' in fields:
    fields['act'] = 'gelu_erf'
  if fields.get('scan'):
    module = module.clone(scan=False)
  config = formats.writer(family, 'timm').config(fields, model.size, None)
  return {key: config[key] for key in ('architecture', 'model_args', 'num_classes')}


class Match:
  """Our step and timm's, in turns, so that a load on the machine hits both."""

  def __init__(
    self, worker, model: bench_ours.Model, step: bench_ours.Step, spec: dict
  ):
    """Builds timm's side.

    Args:
      worker: see `start`.
      step: ours, warmed up.
      spec: see `torch_worker.Timm`.

    Raises:
      UserError: if the two do not have the same number of parameters.
    """
    self._worker, self._step, self._spec = worker, step, spec
    self.about = worker.ask(build=spec)
    if self.about['params'] != model.params:
      raise UserError(
        f"{model.name} has {model.params:,} parameters, timm's {spec['architecture']} "
        f'{spec["model_args"]} {self.about["params"]:,}: not the same model.'
      )

  def play(self, rounds: int, steps: int) -> tuple[list[float], dict]:
    """Returns (seconds of our step in each round, what `timm` is in a row of results).

    Args:
      steps: of each side in each round; who begins changes from round to round.
    """
    ours, timm = alternate(
      lambda: self._ours(steps), lambda: self._worker.ask(turn=steps), rounds
    )
    step_s = statistics.median(turn['wall'] for turn in timm) / steps
    return [turn['wall'] / steps for turn in ours], {
      'images_per_s': self._step.batch_size / step_s,
      'step_s': step_s,
      **ratios(ours, timm),
      'architecture': self._spec['architecture'],
      'compiled': self._spec['compile'],
      'warm_up_s': self.about['warm_up_s'],
      'memory_bytes': timm[-1]['memory_bytes'],
    }

  def _ours(self, steps: int) -> dict:
    cpu = time.process_time()
    wall = self._step.turn(steps)
    return {'wall': wall, 'cpu': time.process_time() - cpu}


def alternate(ours, theirs, rounds: int) -> tuple[list[dict], list[dict]]:
  """Returns what each side's calls returned, one of each in every round.

  Who begins changes from round to round.
  """
  turns = [], []
  for i in range(rounds):
    order = (0, 1) if i % 2 == 0 else (1, 0)
    for side in order:
      turns[side].append((ours, theirs)[side]())
  return turns


def ratios(ours: list[dict], theirs: list[dict]) -> dict:
  """Returns how many times as fast as theirs ours is, over the rounds.

  Args:
    ours, theirs: 'wall' and 'cpu' seconds of the same work, one dict a round.

  Returns:
    ratio, ratio_min, ratio_max: of wall time, the median and the extremes; cpu_ratio:
    the median by processor time, which counts no waiting for others; rounds.
  """
  pairs = list(zip(ours, theirs, strict=True))
  wall = [their['wall'] / our['wall'] for our, their in pairs]
  return {
    'ratio': statistics.median(wall),
    'ratio_min': min(wall),
    'ratio_max': max(wall),
    'cpu_ratio': statistics.median(t['cpu'] / max(o['cpu'], 1e-9) for o, t in pairs),
    'rounds': len(pairs),
  }
