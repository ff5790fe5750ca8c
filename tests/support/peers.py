"""timm and transformers beside this library; its tests are run by `make peer`."""

import sys

import numpy as np
import pytest

import vit_jax

MARKS = [
  pytest.mark.peer,
  # Warnings of other people's packages are theirs.
  pytest.mark.filterwarnings('default'),
]

# ViT and Mixer: rounding, measured 2e-6 and below between the reference codes. Hybrids
# and BiT: timm's weight standardisation adds 1e-8 to the variance, ours 1e-5 to the
# deviation (as Google's), or 1e-10 to the variance.
# The others: 1e-5, as the reference's own float32 from its float64.
TOKENS, RESNETS, ROUNDING = 5e-6, 1e-4, 1e-5


@pytest.fixture(scope='session')
def torch():
  # The LLVM of triton 3.8, which only torch.compile needs, crashes beside TensorFlow's.
  sys.modules.setdefault('triton', None)
  torch = pytest.importorskip('torch', reason='torch is not installed')
  torch.set_grad_enabled(False)
  return torch


@pytest.fixture(scope='session')
def timm(torch):
  _import_torchvision(torch)
  return pytest.importorskip('timm', reason='timm is not installed')


@pytest.fixture(scope='session')
def transformers(torch):
  _import_torchvision(torch)
  return pytest.importorskip('transformers', reason='transformers is not installed')


def _import_torchvision(torch):
  """Imports torchvision even where it was built for another torch: no operator is used."""
  register = torch.library.register_fake

  def lenient(name, *args, **kwargs):
    def decorate(function):
      try:
        return register(name, *args, **kwargs)(function)
      except RuntimeError:
        return function

    return decorate

  torch.library.register_fake = lenient
  try:
    import torchvision  # noqa: F401
  except ImportError:
    pass
  finally:
    torch.library.register_fake = register


def randomise(torch, model, scale=0.1):
  """Makes every parameter random; scales of norms stay near 1."""
  torch.manual_seed(0)
  for parameter in model.parameters():
    parameter.add_(scale * torch.randn_like(parameter))
  return model.eval()


def images(size, batch=2):
  rng, size = np.random.default_rng(0), (size, size) if isinstance(size, int) else size
  return rng.uniform(-1, 1, (batch, *size, 3)).astype(np.float32)


def theirs(torch, model, x):
  y = model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
  return (y.logits if hasattr(y, 'logits') else y).numpy()


def ours(source, x, **options):
  import jax

  loaded = vit_jax.load(source, **options)
  return np.asarray(jax.jit(loaded.model.apply)(loaded.variables, x)[0])


def save_timm(folder, model):
  from timm.models import save_for_hf

  save_for_hf(model, folder, safe_serialization=True)
  return folder


def agree(a, b, tolerance):
  """Asserts agreement, absolute for logits of size 1, relative to larger ones; -rP prints it."""
  print(f'largest difference {np.abs(a - b).max():.1e} of {np.abs(b).max():.1f}')
  np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max() / 2))
