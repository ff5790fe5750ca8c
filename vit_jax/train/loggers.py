"""Weights & Biases and MLflow: copies of metrics.jsonl, each by an extra of its name.

A run that resumes goes on in the same run there, whose id is in the folder's
loggers.json. A logger that fails is switched off with one warning; the run goes on.
"""

import contextlib
import dataclasses
import importlib.util
import json
import secrets
import sys
from pathlib import Path
from typing import Literal

from vit_jax import distributed, files
from vit_jax.check import bind
from vit_jax.errors import UserError, one_line

IDS = 'loggers.json'


@dataclasses.dataclass(frozen=True)
class Wandb:
  """The config's `log.wandb`. wandb looks up the API key."""

  project: str
  entity: str | None = None
  name: str | None = None  # None: that of the run's folder
  mode: Literal['online', 'offline'] = 'online'


@dataclasses.dataclass(frozen=True)
class Mlflow:
  """The config's `log.mlflow`."""

  experiment: str
  uri: str | None = None  # None: MLFLOW_TRACKING_URI, or as MLflow has it
  name: str | None = None  # None: that of the run's folder


def check(section: type):
  """Returns the check of a logger's section; its package must be installed."""

  def check_section(where, value, _):
    bind(where, value, section)
    package = section.__name__.lower()
    if importlib.util.find_spec(package) is None:
      raise UserError(f"{where} needs {package}: pip install 'vit_jax[{package}]'.")

  return check_section


class _WandbRun:
  def __init__(self, section: dict, workdir: Path, config: dict, run: str | None):
    import wandb

    self.id = run or secrets.token_hex(4)
    options = dataclasses.asdict(Wandb(**section))
    options['name'] = options['name'] or workdir.name
    self._run = wandb.init(
      **options,
      id=self.id,
      resume='allow',
      dir=files.cache_dir() if files.is_url(workdir) else workdir,
      config=config,
      settings=wandb.Settings(console='off', silent=True),
    )

  def write(self, step, values):
    self._run.log(values, step=step)  # wandb leaves out steps that it has passed

  def close(self, failed):
    self._run.finish(exit_code=int(failed))


class _MlflowRun:
  def __init__(self, section: dict, workdir: Path, config: dict, run: str | None):
    from mlflow import MlflowClient

    options = Mlflow(**section)
    self._client = client = MlflowClient(options.uri)
    if run:
      client.update_run(run, status='RUNNING')
    else:
      experiment = client.get_experiment_by_name(options.experiment)
      number = experiment and experiment.experiment_id
      number = number or client.create_experiment(options.experiment)
      run = client.create_run(number, run_name=options.name or workdir.name).info.run_id
      for key, value in _flat(config).items():
        client.log_param(run, key, str(value)[:6000])  # the longest that MLflow takes
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


def _flat(config: dict, prefix: str = '') -> dict:
  flat = {}
  for key, value in config.items():
    nested = isinstance(value, dict)
    flat |= _flat(value, f'{prefix}{key}.') if nested else {prefix + key: value}
  return flat


_SERVICES = {'wandb': _WandbRun, 'mlflow': _MlflowRun}


class Loggers:
  """The loggers of a config's section `log`, opened by the first process."""

  def __init__(self, sections: dict[str, dict | None], workdir: Path, config: dict):
    """`sections`: service -> its section; `config`: of the run, for display there."""
    self._loggers: dict = {}
    if not any(sections.values()) or not distributed.is_first():
      return
    ids = _read(workdir / IDS)
    for name, section in sections.items():
      if section:
        with self._guarded(name):
          logger = _SERVICES[name](section, workdir, config, ids.get(name))
          self._loggers[name], ids[name] = logger, logger.id
    files.replace(workdir / IDS, json.dumps(ids))

  def write(self, step: int, values: dict) -> None:
    """Adds numbers of a step to each; a resumed run repeats some."""
    for name, logger in list(self._loggers.items()):
      with self._guarded(name):
        logger.write(step, values)

  def close(self) -> None:
    """Ends them: as failed if it is called while an exception ends the run."""
    failed = sys.exc_info()[0] is not None
    for name, logger in list(self._loggers.items()):
      with self._guarded(name):
        logger.close(failed)

  @contextlib.contextmanager
  def _guarded(self, name: str):
    try:
      yield
    except Exception as error:
      self._loggers.pop(name, None)
      distributed.say(f'log.{name} is off from here on ({one_line(error, 200)}).')


def _read(path: Path) -> dict[str, str]:
  try:
    ids = json.loads(path.read_bytes())
    return {name: run for name, run in ids.items() if type(run) is str}
  except (OSError, ValueError, AttributeError, RecursionError):
    return {}
