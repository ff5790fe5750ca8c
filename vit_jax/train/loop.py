"""The loop of a run: it steps, records metrics, evaluates, saves and stops."""

import time
from collections import deque

import jax

from vit_jax.checkpoint import fingerprint
from vit_jax.errors import Diverged, Preempted
from vit_jax.train import status
from vit_jax.train.evaluations import stop_reason, write_predictions
from vit_jax.train.progress import Record
from vit_jax.train.runtime import MAX_IN_FLIGHT, profiler, report_out_of_memory


class Loop:
  """Trains a state to the end of its run, and records, evaluates and saves it."""

  def __init__(self, config, workdir, state, task, checkpoints, evals, stop, mfu=None):
    """Opens the record.

    Args:
      mfu: the MFU at one image per second, see `Trainer.utilisation`; None if unknown.
    """
    self.config, self.workdir, self.state = config, workdir, state
    self.task, self.checkpoints, self.evals, self.stop = task, checkpoints, evals, stop
    self.total = config['resolved']['total_steps']
    self.step = int(state.step)
    self.record = Record(config, workdir, self.step, mfu)
    # The reason for an early stop; empty if there is none.
    self.early = ''
    self.trained = sum(x.size for x in jax.tree.leaves(state.params))
    # Says why a step's metrics end the run, or ''. A task may have it, see `learn.dino`.
    self.find_problem = getattr(task, 'find_problem', None)
    # (step, metrics) of the steps that are not recorded yet.
    self.pending: deque = deque()

  def run(self, step_fn, batches) -> tuple[dict, list[dict]]:
    """Steps to the end; evaluates, saves and stops when due. Returns (status, rows)."""
    self._write_status('running')
    with (
      report_out_of_memory(),
      profiler(self.record.log.profile, self.workdir) as profile,
    ):
      try:
        # An evaluation that a stop cut off is still due at the restored step.
        self._evaluate()
        while self.step < self.total and not self.early:
          if self.stop.should_stop():
            raise Preempted('Stopped.')
          profile()
          with jax.profiler.StepTraceAnnotation('train', step_num=self.step):
            self.state, values = step_fn(self.state, next(batches))
          self.step += 1
          self.pending.append((self.step, values))
          self._observe(MAX_IN_FLIGHT)
          self._pause()
        if self.early:
          self.total = self.step
          # Run the evaluations that are due at the end.
          self._evaluate()
      except Preempted:
        self._observe(0)
        self._save()
        self.checkpoints.wait()
        self._write_status('preempted', exit=Preempted.exit_code)
        raise Preempted(
          f'Stopped at step {self.step} of {self.total}; the state is saved. '
          'Rerun the same command to resume.'
        ) from None
    self._observe(0)
    self._save()
    self.checkpoints.wait()
    # At the end, one bad step is too many, because the state is the result. Read the counter
    # from the state and not from this process's memory, so that a restarted run decides the
    # same.
    if bad := int(self.state.counters['skipped_in_a_row']):
      raise self._divergence(
        f'The last {bad} of {self.total} steps had a non-finite loss or gradient.'
      )
    digest = fingerprint.digest(fingerprint.fingerprints(self.state))
    early = {'stopped_early': self.early} if self.early else {}
    ended = self._write_status('finished', fingerprint=digest, exit=0, **early)
    return ended, self.record.rows

  def _pause(self) -> None:
    """Evaluates and saves if due. Neither counts towards the step time."""
    saves = self.step % self.checkpoints.every == 0
    if not saves and not self._due_evals():
      return
    self._observe(0)
    start = time.perf_counter()
    self._evaluate()
    if saves:
      self._save()
      self._write_status('running')
    self.record.pause(time.perf_counter() - start)

  def _observe(self, leave: int) -> None:
    """Records the metrics of finished steps until only `leave` steps are pending."""
    while len(self.pending) > leave:
      step, values = self.pending.popleft()
      # This waits until the step has run.
      bad = int(values['skipped_in_a_row'])
      self.record.train(step, values)
      if bad and bad >= self.config['max_bad_steps']:
        raise self._divergence(
          f'{bad} steps in a row, up to step {step}, had a non-finite loss or gradient.'
        )
      if self.find_problem and (problem := self.find_problem(values)):
        raise Diverged(
          f'Step {step}: {problem} Newest checkpoint: {self.checkpoints.latest()}.'
        )

  def _due_evals(self) -> list[str]:
    """Returns the names of the evaluations that are due at this step and not yet done."""
    due = [k for k, v in self.evals.items() if v.is_due(self.step, self.total)]
    done = (
      {key.split('/')[0] for key in self.record.numbers_at(self.step)} if due else ()
    )
    return [name for name in due if name not in done]

  def _evaluate(self) -> None:
    for name in self._due_evals():
      evaluation = self.evals[name]
      values = evaluation.run(self.task, self.state)
      answers = evaluation.evaluator.predictions
      write_predictions(self.workdir, name, self.step, answers)
      self.record.evaluation(self.step, name, values)
    if self.step < self.total:
      self.early = stop_reason(self.config, self.record.rows)

  def _save(self) -> None:
    # The rows up to here must be on disk before the state is.
    self.record.flush()
    values = self.record.numbers_at(self.step)
    if not self.checkpoints.save(self.state, {'config': self.config}, values):
      raise self._divergence(f'The state is not finite after step {self.step}.')

  def _divergence(self, reason: str) -> Diverged:
    self.checkpoints.wait()
    return Diverged(
      f'{reason} Newest good checkpoint: {self.checkpoints.latest()}. Lower '
      'config.optim.lr, set config.optim.clip, or lengthen the warmup.'
    )

  def _write_status(self, state: str, **values) -> dict:
    return status.write(
      self.workdir,
      step=self.step,
      state=state,
      trained_parameters=self.trained,
      **status.checkpoints_of(self.checkpoints),
      **values,
    )
