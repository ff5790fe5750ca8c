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
  """Returns published weights or a run with their model: a `pretrained.Loaded`.

  `load('ViT-B_16.npz')`, `load('runs/digits')`, `load('b16-augreg-i21k')`,
  `load('ViT-B_16.npz', num_classes=10, image_size=384)`; all arguments:
  `vit_jax.pretrained.load`.

    loaded = vit_jax.load('ViT-B_16.npz')
    logits, features = loaded.model.apply(loaded.variables, loaded.preprocess(paths))

  It has `class_names` besides, and unpacks as `model, params = vit_jax.load(...)`.
  """
  from vit_jax import pretrained

  return pretrained.load(source, **options)
