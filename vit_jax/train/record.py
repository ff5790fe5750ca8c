"""The record of a run as it goes: rows on disk, and the same on the screen."""

from pathlib import Path

from vit_jax import distributed
from vit_jax.train import loggers, metrics, progress
from vit_jax.train.metrics import TIME
from vit_jax.train.progress_line import ProgressLine
from vit_jax.train.rows import last_values
from vit_jax.train.time_left import TimeLeft


class Record:
  """Writes and shows what a run measures.

  Attributes:
    log: the config's section `log`.
  """

  def __init__(self, config: dict, workdir: Path, step: int, due: dict):
    """`due`: how many times each evaluation is still to be made, see `TimeLeft`."""
    self._total = config['resolved']['total_steps']
    self.log, self._evals = metrics.Log(**config['log']), config['evals']
    asked = {'wandb': self.log.wandb, 'mlflow': self.log.mlflow}
    mirrors = loggers.Loggers(asked, workdir, config)
    self._metrics = metrics.Metrics(workdir, step, self.log.tensorboard, mirrors)
    if step >= self.log.every and not self.rows:
      distributed.say(f'{workdir}/metrics.jsonl holds no rows up to step {step}.')
    self._batch_size = config['data']['batch_size']
    self._time = TimeLeft(step, self._total, due)
    self._row = step, self._time.clock()  # the last one: its step, and when
    self._line = ProgressLine(self._time, self._batch_size)

  @property
  def rows(self) -> list[dict]:
    """The rows of metrics.jsonl, also those written before the run was resumed."""
    return self._metrics.rows

  def flush(self) -> None:
    """Returns once all rows are where the run's folder is."""
    self._metrics.flush()

  def close(self) -> None:
    self._line.close()  # first: the other may fail, or say something
    self._metrics.close()

  def pause(self, seconds: float) -> None:
    """Excludes time spent outside of steps from the speed that is shown."""
    self._time.pause(seconds)
    self._row = self._row[0], self._row[1] + seconds

  def train(self, step: int, values: dict) -> None:
    """Records the metrics of a train step, if it is one that `config.log` asks for."""
    self._time.done(step)
    if step % self.log.every and step != self._total:
      self._line.step(lambda: float(values['loss']))
      return
    row = {f'train/{key}': float(value) for key, value in values.items()}
    row |= self._measures()
    self._metrics.write(step, row)
    self._line.row(row['train/loss'])
    self.pause(self._metrics.open_events())

  def _measures(self) -> dict[str, float]:
    """Returns the `time/` values of the steps since the last row."""
    (step, start), now = self._row, self._time.clock()
    self._row = self._time.step, now
    per_step = max(now - start, 1e-9) / max(self._time.step - step, 1)
    seconds, _ = self._time.seconds()
    return {
      f'{TIME}images_per_s': self._batch_size / per_step,
      f'{TIME}seconds_left': seconds,
    }

  def evaluating(self, name: str):
    """Shows, as a context, that an evaluation is under way."""
    return self._time.evaluating(name)

  def evaluation(self, step: int, name: str, values: dict) -> None:
    """Records the numbers of an evaluation."""
    row = {f'{name}/{key}': value for key, value in values.items()}
    self._metrics.write(step, row)
    self._line.say(f'step {step}  {progress.shown(row, self._evals)}')

  def lacks(self, step: int, name: str) -> bool:
    """Whether no numbers of an evaluation are recorded for a step."""
    return not self._metrics.has(step, f'{name}/')

  def at(self, step: int) -> dict[str, float]:
    """Returns all numbers of a step."""
    return last_values([row for row in self.rows if row['step'] == step])
