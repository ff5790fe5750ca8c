"""Weights & Biases and MLflow: mirrors of metrics.jsonl, each by an extra of its name.

A mirror is opened by the first process, late: importing it takes seconds. A run that
resumes goes on in the same run there, whose id is in the folder's loggers.json. A mirror
that fails is switched off with one warning; the run goes on.
"""

import contextlib
import dataclasses
import importlib.util
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

from vit_jax import buckets, distributed, files, paths
from vit_jax.config_check import bind, one_of
from vit_jax.errors import UserError

IDS = 'loggers.json'


class Logger(Protocol):
  """What a mirror takes."""

  def write(self, step: int, values: dict) -> None:
    """Adds numbers of a step; called again for one that a resumed run repeats."""

  def close(self, failed: bool) -> None:
    """Ends the run there: as finished, or as one that stopped."""


@dataclasses.dataclass(frozen=True)
class Wandb:
  """The config's `log.wandb`. The API key is found as wandb finds it."""

  project: str
  entity: str | None = None
  name: str | None = None  # None: that of the run's folder
  mode: Annotated[str, one_of(('online', 'offline'))] = 'online'


@dataclasses.dataclass(frozen=True)
class Mlflow:
  """The config's `log.mlflow`."""

  experiment: str
  uri: str | None = None  # None: MLFLOW_TRACKING_URI, or as MLflow has it
  name: str | None = None  # None: that of the run's folder


def check(section: type):
  """Returns the check of the section of a mirror, whose package must be installed."""

  def check_section(where, value, _):
    bind(where, value, section)
    package = section.__name__.lower()
    if importlib.util.find_spec(package) is None:
      raise UserError(
        f"{where} needs the package {package}: pip install 'vit_jax[{package}]', or "
        f'unset it with --{where}=None.'
      )

  return check_section


def open_wandb(section: dict, workdir: Path, config: dict, run: str | None):
  """Returns (logger, id of its run there): `run`, or a new one if that is None."""
  import wandb

  run = run or secrets.token_hex(4)
  options = dataclasses.asdict(Wandb(**section))
  options['name'] = options['name'] or workdir.name
  # Silent: the run itself talks to the person.
  opened = wandb.init(
    **options,
    id=run,
    resume='allow',
    dir=paths.cache_dir() if buckets.is_url(workdir) else workdir,
    config=config,
    settings=wandb.Settings(console='off', silent=True),
  )
  return _WandbRun(opened), run


@dataclasses.dataclass
class _WandbRun:
  run: object

  def write(self, step, values):
    self.run.log(values, step=step)  # wandb leaves out steps that it has passed

  def close(self, failed):
    self.run.finish(exit_code=int(failed))


def open_mlflow(section: dict, workdir: Path, config: dict, run: str | None):
  """Returns (logger, id of the run), as `open_wandb`."""
  from mlflow import MlflowClient

  section = Mlflow(**section)
  client = MlflowClient(section.uri)
  if run is None:
    found = client.get_experiment_by_name(section.experiment)
    experiment = (
      found.experiment_id if found else client.create_experiment(section.experiment)
    )
    name = section.name or workdir.name
    run = client.create_run(experiment, run_name=name).info.run_id
    for key, value in _flat(config).items():
      client.log_param(run, key, str(value)[:6000])  # what MLflow takes
  else:
    client.update_run(run, status='RUNNING')
  return _MlflowRun(client, run), run


class _MlflowRun:
  def __init__(self, client, run):
    self._client, self._run = client, run
    keys = client.get_run(run).data.metrics
    self._known = {
      (key, metric.step)
      for key in keys
      for metric in client.get_metric_history(run, key)
    }

  def write(self, step, values):
    for key, value in values.items():
      if (key, step) not in self._known:
        self._client.log_metric(self._run, key, value, step=step)

  def close(self, failed):
    self._client.set_terminated(self._run, 'KILLED' if failed else 'FINISHED')


def _flat(config: dict, prefix: str = '') -> dict:
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict):
      flat |= _flat(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


OPEN = {'wandb': open_wandb, 'mlflow': open_mlflow}


class Loggers:
  """The mirrors that a config's section `log` asks for."""

  def __init__(self, sections: dict[str, dict | None], workdir: Path, config: dict):
    """Opens nothing yet.

    Args:
      sections: name -> its section.
      config: of the run, which they show.
    """
    first = distributed.is_first()
    self._sections = {k: v for k, v in sections.items() if v is not None and first}
    self._workdir, self._config = workdir, config
    self._early: list[tuple[int, dict]] = []  # written before they were open
    self._loggers: dict[str, Logger] = {}

  def open(self) -> None:
    """Opens them and writes the numbers so far; to be called once a step has run."""
    sections, self._sections = self._sections, {}
    path = self._workdir / IDS
    ids = _read(path)
    for name, section in sections.items():
      with self._guarded(name):
        opened = OPEN[name](section, self._workdir, self._config, ids.get(name))
        self._loggers[name], ids[name] = opened
    if sections:
      files.replace(path, json.dumps(ids).encode())
    early, self._early = self._early, []
    for step, values in early:
      self.write(step, values)

  def write(self, step: int, values: dict) -> None:
    """Adds numbers of a step to each."""
    if self._sections:
      self._early.append((step, values))
    self._each(lambda logger: logger.write(step, values))

  def close(self) -> None:
    """Ends them: as failed if it is called while an exception ends the run."""
    if self._early:
      self.open()
    failed = sys.exc_info()[0] is not None
    self._each(lambda logger: logger.close(failed))

  def _each(self, call: Callable[[Logger], None]) -> None:
    for name, logger in list(self._loggers.items()):
      with self._guarded(name):
        call(logger)

  @contextlib.contextmanager
  def _guarded(self, name: str):
    try:
      yield
    except Exception as error:
      self._loggers.pop(name, None)
      line = ' '.join(str(error).split())[:200]
      distributed.say(
        f'log.{name} is off from here on ({type(error).__name__}: {line}); '
        'metrics.jsonl has every number.'
      )


def _read(path: Path) -> dict[str, str]:
  try:
    ids = json.loads(path.read_bytes())
    return {name: run for name, run in ids.items() if type(run) is str}
  except (OSError, ValueError, AttributeError, RecursionError):
    return {}
