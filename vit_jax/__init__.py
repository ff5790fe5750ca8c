"""Vision Transformers in JAX.

`list_models`, `create_model`, `load`, `preprocess`, `attention_maps`, `class_names`,
`__version__`; each imports what it needs when it is called.
"""

from typing import TYPE_CHECKING

from vit_jax.version import __version__ as __version__


def list_models(pattern: str = '*', pretrained: bool = False) -> list[str]:
  """Lists common names of models and weights: `list_models('*dino*')`. Others work too.

  `create_model` takes the names of models. `load` takes the names of weights, such as
  'b16-augreg-i21k' and 'hf:timm/vit_base_patch16_224.dino'. With `pretrained` only the names
  of weights are listed.
  """
  import fnmatch

  from vit_jax import models
  from vit_jax.weights import zoo

  weights = [*zoo.ENTRIES, *models.names(on_hub=True)]
  names = weights if pretrained else dict.fromkeys(models.names() + weights)
  return fnmatch.filter(names, pattern)


def create_model(name: str, variant: str | None = None, **fields):
  """Builds a Linen model: `create_model('vit', 'B/16', num_classes=10)`.

  The names of timm's models work too: `create_model('vit_small_patch14_dinov2.lvd142m')`.
  For all arguments see `vit_jax.models.build`. `load` returns a model with weights.
  """
  # Imported here, so that importing vit_jax alone costs nothing.
  from vit_jax import errors, models

  if 'pretrained' in fields:
    sources = list_models(f'*{name}*', pretrained=True) or [f'hf:timm/{name}.TAG']
    raise errors.UserError(
      f'For weights use vit_jax.load, with a source such as {sources}.'
    )
  return models.build(name, variant, **fields)


def load(source: str, **options):
  """Loads published weights or a run; returns a `weights.Loaded`, which includes the model.

  `source` is a file, a run ('runs/digits@best') or a name ('b16-augreg-i21k'). For all
  arguments see `vit_jax.weights.load`.

    loaded = vit_jax.load('ViT-B_16.npz')
    images = loaded.preprocess(['photo.jpg'])
    logits, features = loaded.model.apply(loaded.variables, images)
  """
  from vit_jax import weights

  return weights.load(source, **options)


def class_names(name: str) -> list[str]:
  """Returns the names of the classes of 'imagenet1k', 'imagenet21k', ...

  `class_names('imagenet1k')[207]` is 'golden retriever'. For the lists see
  `vit_jax.imagenet`.
  """
  from vit_jax import imagenet

  return imagenet.class_names(name)


def preprocess(images, loaded=None, *, pp: str | None = None):
  """Preprocesses images for a model; returns float32 [B, H, W, C].

  Write `preprocess(['a.jpg'], loaded)` for the result of `load`, and for a model of your own
  `preprocess(['a.jpg'], pp='decode|resize(224)|value_range(-1, 1)')`.

  Raises `errors.BadImage`, a ValueError, for an image that cannot be read or used.

  Args:
    images: paths, bytes, PIL images or uint8 arrays [H, W, C]; or one uint8 array
      [B, H, W, C].
    loaded: the result of `load`. Its pipeline must make images of the model's size.
    pp: a pipeline to use instead.
  """
  from vit_jax.data import single_image

  if (loaded is None) == (pp is None):
    raise ValueError('preprocess takes either `loaded` or `pp`')
  return single_image.batch(images, pp) if loaded is None else loaded.preprocess(images)


def attention_maps(source, images, kind: str = 'rollout', **options):
  """Returns maps of where a model looked: float32 [B, h, w], one value per patch.

  The source is a name or path, `attention_maps('ViT-B_16.npz', ['photo.jpg'])`, or the
  result of `load`. For all arguments see `vit_jax.explain.attention_maps`.
  """
  from vit_jax import explain

  return explain.attention_maps(source, images, kind, **options)


if TYPE_CHECKING:
  # Editors complete the arguments of the functions that are called in the end.
  from vit_jax.explain import attention_maps as attention_maps
  from vit_jax.models import build
  from vit_jax.weights import load as load

  create_model = build
