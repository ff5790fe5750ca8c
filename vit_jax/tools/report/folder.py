"""Reads the files of a run for its page."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax import config as config_lib
from vit_jax import files, imagenet
from vit_jax.data import bad_images
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.train import metrics, status


class Run(NamedTuple):
  """A run's folder.

  Attributes:
    name: a name that is unique on the page.
    status: the values of status.json, with the state from `train.status.state`; {} if it
      cannot be read.
    rows: the rows of metrics.jsonl.
    starts: the starts of the run, see `train.status`.
    bad_images: {'path', 'reason', 'source'} of each image that could not be read.
    predictions: the predictions of each evaluation, see `evaluators.predictions`.
    left_out: a sentence for each missing part of the page, with the reason.
  """

  path: Path
  name: str
  config: dict
  status: dict
  rows: list[dict]
  starts: list[dict]
  bad_images: list[dict]
  predictions: dict[str, dict[str, np.ndarray]]
  left_out: list[str]

  @property
  def evals(self) -> dict[str, dict]:
    """The config's evaluations by name."""
    return self.config.get('evals', {})

  @property
  def class_names(self) -> list[str] | None:
    """The names of the classes, in words if they are WordNet ids; None if there are none."""
    names = self.config['resolved'].get('class_names')
    return names and [imagenet.describe(name) or name for name in names]

  def shorten(self, path: str) -> str:
    """Returns an image's path from the folder of its data, whose own path may be private."""
    sources = [self.config['data'], *(x.get('data', {}) for x in self.evals.values())]
    for data in sources:
      target = str(data.get('source', '')).rpartition(':')[2]
      root = str(Path(target).expanduser().absolute())
      if target and path.startswith(f'{root}/'):
        return path.removeprefix(f'{root}/')
    return path

  def class_of(self, k: int) -> str:
    """Returns the name of class k, or 'several labels' for -1."""
    names = self.class_names or ()
    return 'several labels' if k < 0 else names[k] if k < len(names) else f'class {k}'


def read(folders: list[str]) -> list[Run]:
  """Reads runs, and leaves out damaged parts."""
  paths = [files.path(folder) for folder in folders]
  if len(set(map(str, paths))) < len(paths):
    raise UserError(f'{" ".join(folders)}: a run is named twice.')
  return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read(path: Path, name: str) -> Run:
  left_out = []
  config = config_lib.read(path)
  rows, lost = metrics.read_rows(path / 'metrics.jsonl')
  if lost:
    left_out.append(f'{lost} damaged lines of metrics.jsonl.')
  state = status.read(path) or {}
  if state:
    state['state'] = status.state(path)
  answers = {}
  try:
    answers = predictions.read(path)
  except UserError as error:
    left_out.append(str(error))
  starts, bad = status.read_starts(path), bad_images.read_log(path / 'bad_images.jsonl')
  return Run(path, name, config, state, rows, starts, bad, answers, left_out)


def _names(paths: list) -> list[str]:
  """Returns the names of folders, or their whole paths if two have the same name."""
  texts = [str(path if files.is_url(path) else path.absolute()) for path in paths]
  names = [text.rstrip('/').rpartition('/')[2] for text in texts]
  return names if len({*names}) == len(names) else texts
