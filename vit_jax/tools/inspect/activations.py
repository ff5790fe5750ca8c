"""What the backward pass of a model keeps, from shapes alone: nothing runs."""


def saved_bytes(fn, params, images) -> int:
  """Returns the bytes that the backward pass of `fn(params, images)` keeps.

  An estimate of training's activations: the residuals of `jax.vjp`, inputs and
  parameters not counted. XLA needs working space on top, that of the block which is
  recomputed, and in a loop keeps of norms and activations what it likes. Compiled for
  S/16, batch 16, scanned, the CPU's temporary memory was 12 % above it, in a loop 91 %.

  Args:
    fn: what is differentiated by its first argument, a tree.
    images: array or `jax.ShapeDtypeStruct`, as `params`.
  """
  import jax
  from jax.extend import core

  def residuals(params, images):
    return jax.vjp(lambda params: fn(params, images), params)[1]

  jaxpr = jax.make_jaxpr(residuals)(params, images).jaxpr
  saved = {v for v in jaxpr.outvars if isinstance(v, core.Var)} - set(jaxpr.invars)
  return sum(v.aval.size * v.aval.dtype.itemsize for v in saved)


def per_image(fn, params, image) -> tuple[int, int]:
  """Returns `saved_bytes` as (bytes for each image, bytes whatever their number).

  The second are parameters in the dtype of compute, where that is not their own.

  Args:
    image: `jax.ShapeDtypeStruct` of one image, [H, W, C].
  """
  import jax

  def saved(number):
    return saved_bytes(
      fn, params, jax.ShapeDtypeStruct((number, *image.shape), image.dtype)
    )

  two, four = saved(2), saved(4)
  each = (four - two) // 2
  return each, two - 2 * each


def zeros(abstract):
  """Returns a tree of zeros, of batch statistics where only shapes matter."""
  import jax
  import jax.numpy as jnp

  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


def trace(module, shape: tuple[int, int, int]) -> tuple:
  """Returns (forward, params, images) of a model, the last two by shape and dtype.

  A scanned stack has the same products, keeps what a loop has to (`nn.stack`), and is
  traced as one block: where the model knows it, forward and params are of that.

  Args:
    shape: of an image, [H, W, C]; images is one of them, in float32.

  Returns:
    forward: `(params, images, train=False) -> (logits, out)`.
  """
  import jax

  from vit_jax import models

  module = module.clone(scan=True) if hasattr(module, 'scan') else module
  images = jax.ShapeDtypeStruct((1, *shape), 'float32')
  variables = models.shapes_of(module, shape)
  params = variables.pop('params')
  others = zeros(variables)

  def forward(params, images, train=False):
    rngs = {'dropout': jax.random.key(0)} if train else {}
    return module.apply({'params': params, **others}, images, train=train, rngs=rngs)

  return forward, params, images
