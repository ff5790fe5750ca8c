"""What is exported: a pure function of parameters and images."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import choose
from vit_jax.pretrained import Loaded

BATCH = 'batch'  # the name of the axis whose length is left open


class Program:
  """`program(variables, images)` -> {name: float32}; images float32 [B, H, W, C].

  Blocks are written out, not recomputed, and attention is plain: fused kernels are calls
  into libraries, which have no form that lasts, and are for one platform.

  Args:
    loaded: of `pretrained.load`, its model not scanned.
    layers: names of features to return beside the logits.
    batch: images; None: any number.

  Attributes:
    variables: of the model, numpy.
    outputs: {name: shape without the batch}.
    params: their number.
    dtype: of compute.

  Raises:
    UserError: for an unknown layer.
  """

  def __init__(self, loaded: Loaded, layers: Iterable[str], batch: int | None):
    model = loaded.model
    plain = {'remat': 'none', 'fused_attention': False}
    self._model = model.clone(**{k: v for k, v in plain.items() if hasattr(model, k)})
    self._image = (*loaded.image_size, loaded.channels)
    self._layers, self._features = tuple(layers), False
    self._first = 'pre_logits' if model.num_classes is None else 'logits'
    self.batch, self.variables = batch, loaded.variables
    self.dtype = jnp.dtype(model.dtype).name
    self.params = sum(x.size for x in jax.tree.leaves(loaded.variables))
    images = jax.ShapeDtypeStruct(self.shape(1), jnp.float32)
    _, out = jax.eval_shape(self._model.apply, self.variables, images)
    for layer in self._layers:
      choose('layer', layer, out)
    # Without them models compute less.
    self._features = bool({*self._layers} - {'pre_logits'})
    shapes = jax.eval_shape(self, self.variables, images)
    self.outputs = {name: x.shape[1:] for name, x in shapes.items()}

  def __call__(self, variables: dict, images: jax.Array) -> dict[str, jax.Array]:
    y, out = self._model.apply(variables, images, features=self._features)
    found = {self._first: y, **{layer: out[layer] for layer in self._layers}}
    return {name: x.astype(jnp.float32) for name, x in found.items()}

  def shape(self, batch) -> tuple:
    """Returns the shape of images; `batch` of them, or as many as the program takes."""
    return (self.batch or batch, *self._image)

  def baked(self, images: jax.Array) -> dict[str, jax.Array]:
    """The program with its own parameters."""
    return self(self.variables, images)

  def on_cpu(self, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns what the model computes, on the CPU whatever else is there."""
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      return jax.tree.map(np.asarray, jax.jit(self)(self.variables, images))
