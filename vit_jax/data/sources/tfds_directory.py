"""Where TFDS has prepared a data set; what to do where it has not."""

import os
import re

from vit_jax import files
from vit_jax.errors import DataError, UserError, did_you_mean

INFO = 'dataset_info.json'

_NAME = re.compile(r'(?P<name>[\w-]+)(/(?P<config>[^:/]+))?(:(?P<version>[\d.]+))?')
# How alike a suggested name must be: TFDS knows a thousand, and one of them is always a
# little like any word.
_ALIKE = 0.8

# Data sets that TFDS cannot fetch itself, and what to put where.
_MANUAL = {
  'imagenet2012': 'ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar '
  '(from image-net.org, after registration)',
  'resisc45': 'the unpacked folder NWPU-RESISC45 (from OneDrive; the link is in the '
  'catalogue of TFDS)',
  'diabetic_retinopathy_detection': 'the unpacked folders train, test and sample, and '
  'trainLabels.csv (from kaggle.com/c/diabetic-retinopathy-detection, after registration)',
}


class Unknown(DataError):
  """No data set of that name is prepared, and TFDS does not know the name.

  Attributes:
    brief: a shorter message, for a name that may not be meant for a data set.
  """

  def __init__(self, message: str, brief: str):
    super().__init__(message)
    self.brief = brief


def data_directory(data_dir: str | None) -> str:
  """Returns the folder of prepared data sets: the user's choice, or TFDS's default."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  path = files.path(data_dir)
  return str(path if files.is_url(path) else path.absolute())


def import_tfds():
  """Returns the package `tensorflow_datasets`; UserError where it is missing."""
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise UserError(
      f"tfds: needs tensorflow_datasets ({error}): pip install 'vit_jax[tf]'."
    ) from None
  return tfds


def locate(
  target: str, data_dir: str | None, accepted: tuple[str, str] | None = None
) -> str:
  """Returns the directory of one prepared version, the newest; see `tfds.Prepared`.

  Raises:
    UserError: if it is not there: what is missing, and how to prepare it.
  """
  there = files.is_url(target) or os.path.exists(os.path.expanduser(target))
  if there and _is_prepared(path := str(files.path(target))):
    return path
  match = _NAME.fullmatch(target)
  if not match:
    raise UserError(
      f'tfds: {target!r} is not NAME, NAME/CONFIG or NAME/CONFIG:VERSION.'
    )
  name, config, version = match.group('name', 'config', 'version')
  data_dir = data_directory(data_dir)
  home = os.path.join(data_dir, *filter(None, (name, config)))
  found = _versions(home)
  if not found and not config:
    configs = {c: _versions(os.path.join(home, c)) for c in _names(home)}
    configs = {c: v for c, v in configs.items() if v}
    if len(configs) > 1:
      raise UserError(
        f'tfds: {name} is prepared with several configs: name one of '
        f'{[f"tfds:{name}/{c}" for c in sorted(configs)]}.'
      )
    for only, versions in configs.items():
      home, found = os.path.join(home, only), versions
  if not found or (version and version not in found):
    raise _not_prepared(target, name, data_dir, home, found, version)
  if accepted:
    low, high = map(_number, accepted)
    fit = [v for v in found if low <= _number(v) < high]
    if not fit:
      raise DataError(
        f'tfds:{target} is prepared as version {" and ".join(found)}: expected at least '
        f'{accepted[0]} and below {accepted[1]}. Prepare it with: '
        f'{command(target, data_dir)}'
      )
    found = fit
  return os.path.join(home, version or max(found, key=_number))


def _number(version: str) -> list[int]:
  return [int(n) for n in version.split('.')]


def _versions(directory: str) -> list[str]:
  return [
    name
    for name in _names(directory)
    if re.fullmatch(r'\d+(\.\d+)*', name) and _is_prepared(f'{directory}/{name}')
  ]


def _is_prepared(directory: str) -> bool:
  with files.outages(directory):
    return (files.path(directory) / INFO).exists()


def _names(directory: str) -> list[str]:
  """Returns the sorted names in a directory; [] if it does not exist."""
  with files.outages(directory):
    path = files.path(directory)
    return sorted(x.name for x in path.iterdir()) if path.is_dir() else []


def _not_prepared(target, name, data_dir, home, found, version) -> DataError:
  where = os.path.join(home, version or '<version>')
  have = f' Prepared versions: {found}.' if found else ''
  message = f'tfds:{target} is not prepared: there is no {where}/{INFO}.{have}'
  known = import_tfds().list_builders(with_community_datasets=False)
  if name in known:
    if name in _MANUAL:
      message += f' Put {_MANUAL[name]} into {data_dir}/downloads/manual.'
    return DataError(f'{message} Prepare it with: {command(target, data_dir)}')
  near = did_you_mean(name, [*known, *_names(data_dir)], _ALIKE)
  long = (
    f'{message} TFDS has no data set of that name{" (ImageNet-21k is not in TFDS)" * ("21k" in name)}: '
    f'make {home} from an archive or a folder (vit_jax prepare --help) '
    f'or by a TFDS builder of your own, set TFDS_DATA_DIR or '
    f"data.source_options={{'data_dir': ...}}, or use 'folder:PATH'.{near}"
  )
  return Unknown(
    long, f'No data set of that name is in {data_dir} (TFDS_DATA_DIR) either.{near}'
  )


def command(target: str, data_dir: str) -> str:
  """Returns the command that prepares a data set."""
  return f'tfds build {target} --data_dir={data_dir} --file_format=array_record'
