"""Vision Transformers in JAX: `create_model`, `__version__`."""

from vit_jax.version import __version__ as __version__


def create_model(name: str, variant: str | None = None, **fields):
  """Returns a Linen model: `create_model('vit', 'B/16', num_classes=10)`.

  `create_model('vit_base_patch16_224')` is the same model by timm's name. All
  arguments: `vit_jax.models.build`.
  """
  from vit_jax import models  # importing vit_jax alone costs nothing

  return models.build(name, variant, **fields)
