"""The record of a run as it goes: rows on disk, and the same on the screen."""

from pathlib import Path

from vit_jax import distributed
from vit_jax.train import loggers, metrics, progress
from vit_jax.train.rows import last_values


class Record:
  """Writes and shows what a run measures.

  Attributes:
    log: the config's section.
  """

  def __init__(self, config: dict, workdir: Path, step: int):
    self._total = config['resolved']['total_steps']
    self.log, self._evals = metrics.Log(**config['log']), config['evals']
    asked = {'wandb': self.log.wandb, 'mlflow': self.log.mlflow}
    mirrors = loggers.Loggers(asked, workdir, config)
    self._metrics = metrics.Metrics(workdir, step, self.log.tensorboard, mirrors)
    if step >= self.log.every and not self.rows:
      distributed.say(f'{workdir}/metrics.jsonl holds no rows up to step {step}.')
    batch_size = config['data']['batch_size']
    self._progress = progress.Progress(step, self._total, batch_size)

  @property
  def rows(self) -> list[dict]:
    """Those of metrics.jsonl: this run's, and those of the run that it resumes."""
    return self._metrics.rows

  def close(self) -> None:
    self._metrics.close()
    self._progress.close()

  def pause(self, seconds: float) -> None:
    """Takes time spent outside of steps out of what is shown of their speed."""
    self._progress.pause(seconds)

  def train(self, step: int, values: dict) -> None:
    """Records the metrics of a train step, if it is one that `config.log` asks for."""
    if step % self.log.every and step != self._total:
      return
    row = {f'train/{key}': float(value) for key, value in values.items()}
    row |= self._progress.measure(step)
    self._metrics.write(step, row)
    self._progress.show(step, row)
    self._progress.pause(self._metrics.open_events())

  def evaluation(self, step: int, name: str, values: dict) -> None:
    """Records the numbers of an evaluation."""
    row = {f'{name}/{key}': value for key, value in values.items()}
    self._metrics.write(step, row)
    self._progress.say(f'step {step}  {progress.shown(row, self._evals)}')

  def lacks(self, step: int, name: str) -> bool:
    """Whether no numbers of an evaluation are recorded for a step."""
    return not self._metrics.has(step, f'{name}/')

  def at(self, step: int) -> dict[str, float]:
    """Returns all numbers of a step."""
    return last_values([row for row in self.rows if row['step'] == step])
