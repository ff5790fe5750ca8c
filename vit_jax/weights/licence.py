"""The licence of the published weights that a source was made from, run after run."""

from pathlib import Path
from typing import NamedTuple

from vit_jax import run_config
from vit_jax.errors import UserError
from vit_jax.weights import config_json, download, published, runs, zoo


class Licence(NamedTuple):
  """What is known of a source's licence.

  Attributes:
    name: its identifier on the hub ('apache-2.0'), None if it is not known.
    origin: the published weights that it goes back to; None: a run that began without.
  """

  name: str | None
  origin: str | None


def of(source: str) -> Licence:
  """Returns the licence of a source: of a run, that of the weights that it started from.

  Weights that are not there any more, or out of reach, are still known by their name.
  """
  if (run := runs.find(source)) is not None:
    started = run_config.read(run[0]).get('weights')
    return of(started['source']) if started else Licence(None, None)
  path, config = Path(str(source)), {}
  try:
    if not zoo.find(source):
      path = download.locate(source)
    if path.is_dir() and (path / 'config.json').is_file():
      config = config_json.read(path / 'config.json')
      config = config_json.check(config, str(path / 'config.json'))
  except UserError:
    pass
  return Licence(published.find(str(source), path, config).licence, str(source))
