"""Under which licence weights came, through all that was made of them since."""

from pathlib import Path
from typing import NamedTuple

from vit_jax import run_config
from vit_jax.errors import UserError
from vit_jax.pretrained import runs
from vit_jax.weights import config_json, download, published, zoo


class Licence(NamedTuple):
  """What is known.

  Attributes:
    name: its identifier on the hub ('apache-2.0'), None where nothing tells.
    origin: the published weights at the beginning; None: a run that started from none.
  """

  name: str | None
  origin: str | None


def of(source: str) -> Licence:
  """Returns the licence of a source: of a run, that of the weights that it started from.

  Weights that have moved since are still known by their name.
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
