"""Vision Transformers in JAX: `create_model`, `load`, `__version__`."""

from vit_jax.version import __version__ as __version__


def create_model(name: str, variant: str | None = None, **fields):
  """Returns a Linen model: `create_model('vit', 'B/16', num_classes=10)`.

  `create_model('vit_base_patch16_224')` is the same model by timm's name. All
  arguments: `vit_jax.models.build`.
  """
  from vit_jax import models  # importing vit_jax alone costs nothing

  return models.build(name, variant, **fields)


def load(source: str, **options):
  """Returns (model, params) of published weights or of a run.

  `load('ViT-B_16.npz')`, `load('runs/digits')`, `load('b16-augreg-i21k')`,
  `load('ViT-B_16.npz', num_classes=10, image_size=384)`. All arguments, and what else a
  source tells (class names, preprocessing): `vit_jax.pretrained.load`.
  """
  from vit_jax import pretrained

  loaded = pretrained.load(source, **options)
  return loaded.model, loaded.params
