"""The base of all models: what a caller may ask a model, and the part that classifies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import models
from vit_jax.check import Range
from vit_jax.errors import UserError
from vit_jax.models.family import OUTPUTS, Family
from vit_jax.nn.layers import linear_head
from vit_jax.nn.stack import REMAT


class Model(nn.Module):
  """A model of a family in `models.MODELS`, alone or around a backbone.

  `tune.tuned.Tuned` answers for the model that it wraps; only `shapes` are its own.
  """

  backbone = None  # a field of the models that are built around another one

  @property
  def untuned(self) -> 'Model':
    """The model itself, without the parameters that a tuning method adds."""
    return self

  @property
  def family_name(self) -> str:
    """The key of the model's class in `models.MODELS`."""
    cls = type(self.untuned)
    for name in models.MODELS:
      if models.MODELS[name].model is cls:
        return name
    raise ValueError(f'no family of models.MODELS has the class {cls.__name__}')

  @property
  def family(self) -> Family:
    """The facts of the family, around those of the backbone if there is one."""
    facts = models.MODELS[self.family_name]
    return facts if self.backbone is None else facts.around(self.backbone.family)

  @nn.nowrap
  def fields(self) -> dict:
    """Returns {field: value}, with a backbone as the dict that `models.build` takes."""
    names = [f.name for f in dataclasses.fields(self)]
    fields = {n: getattr(self, n) for n in names if n not in ('parent', 'name')}
    if (inside := self.backbone) is not None:
      fields['backbone'] = {'name': inside.family_name, **inside.fields()}
    return fields

  @nn.nowrap
  def change(self, **values) -> 'Model':
    """Returns the model, backbone included, with other values of the fields it has."""
    fields = {name: value for name, value in values.items() if hasattr(self, name)}
    if self.backbone is not None and 'backbone' not in fields:
      fields['backbone'] = self.backbone.change(**values)
    return self.clone(**fields)

  @nn.nowrap
  def inputs(self, image_shape: tuple[int, int, int], batch: int = 1):
    """Returns the shapes of the inputs: [batch, H, W, C], or {name: [batch, h, w, C]}.

    Args:
      image_shape: (H, W, C) of the images; a model without a backbone takes maps of them.
    """
    shape = lambda x: jax.ShapeDtypeStruct((batch, *x), jnp.float32)
    if self.family.inputs is None:
      return shape(image_shape)
    maps = self.family.inputs(self.fields(), image_shape[:2])
    return {name: shape(x) for name, x in maps.items()}

  @nn.nowrap
  def shapes(self, image_shape: tuple[int, int, int]) -> dict:
    """Returns the shapes of the variables, {'params': ...}, for images (H, W, C).

    Each model and size is traced once: tracing `init` takes longer than tracing the model.
    """
    shapes = _trace(self, tuple(image_shape))
    return jax.tree.map(lambda x: x, shapes)  # a copy, which the caller may change

  @nn.nowrap
  def check_outputs(self, kind: str, source: str) -> None:
    """Raises UserError if the outputs are not of a kind, see `Family.outputs`.

    Args:
      source: the subject of the message, such as the source of the weights.
    """
    if (outputs := self.family.outputs) != kind:
      raise UserError(
        f'{source} gives {OUTPUTS[outputs]}, where {kind} are expected. In Python, '
        'loaded = vit_jax.load(SOURCE) has the model: '
        'loaded.model.apply(loaded.variables, images).'
      )

  @staticmethod
  def maps(out: dict) -> dict:
    """Returns the maps [B, h, w, D] among named features.

    Tokens [B, N, D] on the grid of 'stem' count as one, without those in front of the
    patches, such as a class token and registers.
    """
    h, w = out['stem'].shape[1:3]
    grid = lambda x: x[:, -h * w :].reshape(len(x), h, w, x.shape[-1])
    return {
      name: x if x.ndim == 4 else grid(x)
      for name, x in out.items()
      if x.ndim == 4 or (x.ndim == 3 and x.shape[1] >= h * w)
    }


@functools.lru_cache(maxsize=64)
def _trace(model, image_shape):
  return jax.eval_shape(model.init, jax.random.key(0), model.inputs(image_shape))


class Classifier(Model):
  """The fields of every classifier, and its head.

  Classifiers are called with images [B, H, W, C], in [-1, 1] unless they say otherwise.
  `train` turns on dropout and stochastic depth, which need the 'dropout' rng. `features`
  says whether the caller reads more of `out` than 'pre_logits'.
  """

  num_classes: Annotated[int, Range(1, 2**24)] | None = 1000  # None: no head
  # Initial logits. -10 for sigmoid losses over i21k: ln(1/21843), the prior of a rare class.
  head_bias_init: float = 0.0
  # Values that the backward pass recomputes: see nn.stack.
  remat: Literal[REMAT] = 'none'
  # Of the body; final norm, pooling, head and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  def classify(self, x, out: dict, features: bool, head: Callable = linear_head):
    """Returns (logits [B, K] of x [B, D], `out` with x as 'pre_logits').

    Args:
      features: whether the caller reads more of `out` than 'pre_logits'.
      head: maps x, `num_classes` and `head_bias_init` to logits.
    """
    out = {**out, 'pre_logits': x} if features else {'pre_logits': x}
    return head(x, self.num_classes, self.head_bias_init), out
