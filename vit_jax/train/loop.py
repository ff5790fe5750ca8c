"""The loop of a run: step, look, evaluate, save, stop."""

import time
from collections import deque
from collections.abc import Iterator

import jax

from vit_jax import sharding
from vit_jax.checkpoint import fingerprint
from vit_jax.errors import Preempted, TooManyBadSteps
from vit_jax.train import metrics, progress, status
from vit_jax.train.runtime import out_of_memory, profiler

# Steps that the host may run ahead of the device: enough to keep it busy, few enough
# that a run of bad steps is noticed at once.
AHEAD = 2


def prefetch(batches: Iterator[dict], mesh) -> Iterator[dict]:
  """Yields global batches, the next one already on its way to the devices."""
  ahead = deque()
  for batch in batches:
    ahead.append(sharding.global_batch(batch, mesh))
    if len(ahead) == 2:
      yield ahead.popleft()


class Loop:
  """The loop and what it keeps: state, rows, checkpoints."""

  def __init__(self, config, workdir, state, task, checkpoints, evals, stop):
    self.config, self.workdir, self.state = config, workdir, state
    self.task, self.checkpoints, self.evals, self.stop = task, checkpoints, evals, stop
    self.step = int(state.step)
    self.total = config['resolved']['total_steps']
    self.log = metrics.Log(**config['log'])
    self.metrics = metrics.Metrics(workdir, self.step, self.log.tensorboard)
    self.progress = progress.Progress(
      self.step, self.total, config['data']['batch_size']
    )
    self.trained = sum(x.size for x in jax.tree.leaves(state.params))
    self.pending: deque = deque()  # (step, metrics) not yet looked at

  def close(self):
    self.metrics.close()
    self.progress.close()

  def run(self, step_fn, batches) -> tuple[dict, list[dict]]:
    """Steps to the end, evaluating, saving and stopping when due."""
    self._write_status('running')
    with out_of_memory(), profiler(self.log.profile, self.workdir) as profile:
      try:
        # An evaluation that the stop cut off is still due at the restored step.
        self._evaluate()
        while self.step < self.total:
          if self.stop.should_stop():
            raise Preempted('Stopped.')
          profile(self.step)
          self.state, values = step_fn(self.state, next(batches))
          self.step += 1
          self.pending.append((self.step, values))
          self._observe(AHEAD)
          self._pause()
      except Preempted:
        self._observe(0)
        self._save()
        self.checkpoints.wait()
        self._write_status('preempted', exit=Preempted.exit_code)
        raise Preempted(
          f'Stopped at step {self.step} of {self.total}; the state is saved. '
          'Rerun the same command to resume.'
        ) from None
    self._save()
    self.checkpoints.wait()
    digest = fingerprint.digest(fingerprint.fingerprints(self.state))
    ended = self._write_status('finished', fingerprint=digest, exit=0)
    return ended, self.metrics.rows

  def _pause(self) -> None:
    """Evaluates and saves, if due; the steps' clock stands still meanwhile."""
    due = self.step % self.checkpoints.every == 0
    if due or self.step == self.total or self._due_evals():
      self._observe(0)  # rows up to here are written before the state is
      start = time.perf_counter()
      self._evaluate()
      if due:
        self._save()
        self._write_status('running')
      self.progress.pause(time.perf_counter() - start)

  def _observe(self, leave: int) -> None:
    """Looks at finished steps' metrics, all but the last `leave`."""
    while len(self.pending) > leave:
      step, values = self.pending.popleft()
      bad = int(values['skipped_in_a_row'])  # waits for the step
      if step % self.log.every == 0 or step == self.total:
        row = {f'train/{key}': float(value) for key, value in values.items()}
        row |= self.progress.measure(step)
        self.metrics.write(step, row)
        self.progress.show(step, row)
        self.progress.pause(self.metrics.open_events())
      if bad and bad >= self.config['max_bad_steps']:
        raise self._diverged(
          f'{bad} steps in a row, up to step {step}, had a loss or gradient that is not '
          'finite.'
        )

  def _due_evals(self) -> list[str]:
    """Returns the names of evaluations that this step calls for and lacks."""
    return [
      name
      for name, evaluation in self.evals.items()
      if evaluation.is_due(self.step, self.total)
      and not self.metrics.has(self.step, f'{name}/')
    ]

  def _evaluate(self) -> None:
    for name in self._due_evals():
      values = self.evals[name].run(self.task, self.state)
      row = {f'{name}/{key}': value for key, value in values.items()}
      self.metrics.write(self.step, row)
      self.progress.say(
        f'step {self.step}  {progress.shown(row, self.config["evals"])}'
      )

  def _save(self) -> None:
    values = metrics.last_values(
      [row for row in self.metrics.rows if row['step'] == self.step]
    )
    if not self.checkpoints.save(self.state, {'config': self.config}, values):
      raise self._diverged(f'The parameters are not finite after step {self.step}.')

  def _diverged(self, what: str) -> TooManyBadSteps:
    self.checkpoints.wait()
    return TooManyBadSteps(
      f'{what} Newest checkpoint: {self.checkpoints.latest()}. Lower config.optim.lr, '
      'set config.optim.clip, or lengthen the warmup.'
    )

  def _write_status(self, state: str, **values) -> dict:
    values = {'trained_parameters': self.trained, **values}
    return status.write(self.workdir, step=self.step, state=state, **values)
