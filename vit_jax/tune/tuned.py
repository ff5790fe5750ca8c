"""Adds the parameters of a tuning method to a model whose code knows nothing of tuning."""

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.models.base import Model

# Prefix of the names of added parameters.
SCOPE = 'tune'


class Tuned(Model):
  """A model with the added parameters of a method.

  The model's own parameters keep their names; added ones are below `tune/`. It takes the
  same arguments as the model and returns the same results.

  Attributes:
    model: a model of a family.
    tune: the module with the added parameters, or None.
    trains_backbone: see `method.Method`.
    frozen_norms: paths of batch norms that use their running statistics in training too.
  """

  model: Model
  tune: 'Addition | None' = None
  trains_backbone: bool = True
  frozen_norms: tuple[str, ...] = ()

  def setup(self):
    nn.share_scope(self, self.model)

  @property
  def num_classes(self) -> int | None:
    return self.model.num_classes

  @property
  def untuned(self) -> Model:
    return self.model.untuned

  @property
  def backbone(self) -> Model | None:
    return self.model.backbone

  @nn.nowrap
  def fields(self) -> dict:
    return self.model.fields()

  @nn.nowrap
  def change(self, **values) -> 'Tuned':
    return self.clone(model=self.model.change(**values))

  def __call__(self, images, *, train: bool = False, **options):
    """Calls the model; takes and returns the same as the model's `__call__`."""
    options['train'] = train and self.trains_backbone
    find_replacement = lambda module, path: None
    if self.tune is not None:
      images = self.tune.images(images)
      find_replacement = self.tune.layers(images, train)
    elif not self.frozen_norms:
      return self.model(images, **options)
    above = len(self.path)

    def intercept(call, args, kwargs, context):
      path = context.module.path[above:]
      if context.method_name != '__call__' or not path or path[0] == SCOPE:
        return call(*args, **kwargs)
      path = '/'.join(path)
      if path in self.frozen_norms:
        kwargs = {**kwargs, 'train': False}
      replacement = find_replacement(context.module, path)
      if replacement is None:
        return call(*args, **kwargs)
      return replacement(call, *args, **kwargs)

    with nn.intercept_methods(intercept):
      return self.model(images, **options)


class Addition(nn.Module):
  """Base class of the module that a method adds to a model."""

  def images(self, images):
    """Changes the images [B, H, W, C] before the model gets them."""
    return images

  def layers(self, images, train: bool) -> Callable:
    """Returns a function that replaces some of the model's layers; by default none.

    It is called before the model runs, and reads the added parameters then: a layer may be
    inside `nn.remat`, where parameters of other modules cannot be reached.

    Args:
      images: the images that the model gets.

    Returns:
      A function of (module, path 'a/b'). It returns None for a layer that stays, or a
      function `(call, *args, **kwargs) -> result` to run instead of the layer's own `call`.
    """
    return lambda module, path: None

  def make_params(self, made: Mapping[str, tuple[Callable, tuple[int, ...]]]) -> dict:
    """Makes parameters {'a/b/c': float32 array} at these paths below this module.

    To be called from a compact method.

    Args:
      made: {'a/b/c': (initializer, shape)}.
    """
    names: dict[str, list[str]] = {}
    for name in made:
      names.setdefault(name.partition('/')[0], []).append(name)
    values = {}
    for first, group in names.items():

      def init(rng, group=group):
        keys = jax.random.split(rng, len(group))
        flat = {
          name.partition('/')[2]: made[name][0](key, made[name][1], jnp.float32)
          for name, key in zip(group, keys, strict=True)
        }
        return trees.unflatten(flat)

      tree = self.param(first, init)
      values |= {f'{first}/{name}': x for name, x in trees.flatten(tree).items()}
    return values
