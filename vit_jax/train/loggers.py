"""Copies metrics.jsonl to TensorBoard, Weights & Biases and MLflow.

A resumed run continues the same run of a service, whose id is in the folder's loggers.json.
A logger that fails is switched off with one warning, and the run goes on.
"""

import contextlib
import dataclasses
import importlib.util
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

from vit_jax import config as config_lib
from vit_jax import distributed, files
from vit_jax.check import Period
from vit_jax.errors import UserError, one_line
from vit_jax.train.workdir import LocalFolder

IDS = 'loggers.json'


class TensorBoard:
  """Writes event files to the run's folder, with clu or, without TensorFlow, with TensorBoard.

  A run that was killed may have written events past the step where it resumes. A session log
  tells TensorBoard to drop them.
  """

  def __init__(self, workdir: Path, step: int):
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    class Events(EventFileWriter):
      def add(self, **fields):
        self.add_event(Event(wall_time=time.time(), **fields))

      def write_scalars(self, step, values):
        for name, value in values.items():
          self.add(step=step, summary=scalar_pb(name, value))

    self._local = LocalFolder(workdir)
    self._events = Events(str(self._local.folder))
    self._events.add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
    with contextlib.suppress(ImportError):
      # This imports TensorFlow, which may be missing.
      from clu.metric_writers import SummaryWriter

      self._events.close()
      self._events = SummaryWriter(str(self._local.folder))

  def write(self, step, values):
    self._events.write_scalars(step, values)

  def flush(self):
    self._events.flush()
    self._local.push()

  def close(self, failed):
    self._events.close()
    self._local.close()


class Wandb:
  """Writes to a run of a project; wandb itself looks up API key, entity and mode."""

  def __init__(self, project: str, workdir: Path, config: dict, run: str | None):
    import wandb

    self.id = run or secrets.token_hex(4)
    self._run = wandb.init(
      project=project,
      name=workdir.name,
      id=self.id,
      resume='allow',
      dir=files.cache_dir() if files.is_url(workdir) else workdir,
      config=config,
      settings=wandb.Settings(console='off', silent=True),
    )

  def write(self, step, values):
    # After a resume, wandb ignores the steps that it has already logged.
    self._run.log(values, step=step)

  def close(self, failed):
    self._run.finish(exit_code=int(failed))


class Mlflow:
  """Writes to a run of an experiment, on the server MLFLOW_TRACKING_URI."""

  def __init__(self, experiment: str, workdir: Path, config: dict, run: str | None):
    from mlflow import MlflowClient

    self._client = client = MlflowClient()
    if run:
      client.update_run(run, status='RUNNING')
    else:
      old = client.get_experiment_by_name(experiment)
      number = old.experiment_id if old else client.create_experiment(experiment)
      run = client.create_run(number, run_name=workdir.name).info.run_id
      for key, value in config_lib.flat(config).items():
        # MLflow takes values of up to 6,000 characters.
        client.log_param(run, key, str(value)[:6000])
    self.id = run
    self._logged = {
      (key, metric.step)
      for key in client.get_run(run).data.metrics
      for metric in client.get_metric_history(run, key)
    }

  def write(self, step, values):
    for key, value in values.items():
      if (key, step) not in self._logged:
        self._client.log_metric(self.id, key, value, step=step)

  def close(self, failed):
    self._client.set_terminated(self.id, 'KILLED' if failed else 'FINISHED')


def _check_installed(where: str, value, section) -> None:
  package = where.rpartition('.')[2]
  if importlib.util.find_spec(package) is None:
    raise UserError(f"{where} needs {package}: pip install 'vit_jax[{package}]'.")


@dataclasses.dataclass(frozen=True)
class Log:
  """The config's `log` section."""

  # Steps between two rows.
  every: Period = 50
  tensorboard: bool = True
  # Whether to write a profile of a few steps to WORKDIR/profile.
  profile: bool = False
  # Whether `vit_jax train` writes WORKDIR/report.html at the end.
  report: bool = True
  # The name of a project of Weights & Biases.
  wandb: Annotated[str | None, _check_installed] = None
  # The name of an experiment of MLflow.
  mlflow: Annotated[str | None, _check_installed] = None


class Loggers:
  """The loggers of a config's section `log`. Only the first process opens them."""

  def __init__(self, log: Log, workdir: Path, config: dict, step: int):
    """Opens the loggers at `step`; they display `config`, the config of the run."""
    self._open: dict = {}
    if not distributed.is_first():
      return
    ids = _read(workdir / IDS)
    for name, service in (('wandb', Wandb), ('mlflow', Mlflow)):
      if place := getattr(log, name):
        with self._guard(name):
          self._open[name] = service(place, workdir, config, ids.get(name))
          ids[name] = self._open[name].id
    if log.tensorboard:
      with self._guard('tensorboard'):
        self._open['tensorboard'] = TensorBoard(workdir, step)
    if ids:
      files.replace(workdir / IDS, json.dumps(ids))

  def write(self, step: int, values: dict) -> None:
    """Adds the numbers of a step to each logger. After a resume, some steps are repeated."""
    for name, logger in list(self._open.items()):
      with self._guard(name):
        logger.write(step, values)

  def flush(self) -> None:
    """Copies TensorBoard's events to the run's folder in a bucket."""
    if events := self._open.get('tensorboard'):
      with self._guard('tensorboard'):
        events.flush()

  def close(self) -> None:
    """Closes the loggers, and marks the run as failed if an exception is ending it."""
    failed = sys.exc_info()[0] is not None
    for name, logger in list(self._open.items()):
      with self._guard(name):
        logger.close(failed)

  @contextlib.contextmanager
  def _guard(self, name: str):
    try:
      yield
    except Exception as error:
      self._open.pop(name, None)
      distributed.say(f'log.{name} is off from here on ({one_line(error, 200)}).')


def _read(path: Path) -> dict[str, str]:
  try:
    ids = json.loads(path.read_bytes())
    return {name: run for name, run in ids.items() if type(run) is str}
  except (OSError, ValueError, AttributeError, RecursionError):
    return {}
