"""Layers of every model, with the parameter names of the published Google files."""

import functools
import math
from collections.abc import Callable

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.errors import UserError, choose
from vit_jax.kernels import ATTENDED, WEIGHTS, layers
from vit_jax.kernels.attention import attend

# Google's published weights were trained with the tanh approximation (Flax's default); timm
# and transformers use the exact form with erf. They differ by up to 4.7e-4.
ACTIVATIONS = {
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_erf': lambda x: jax.nn.gelu(x, approximate=False),
  'quick_gelu': lambda x: x * jax.nn.sigmoid(1.702 * x),  # OpenAI's CLIP
  'silu': jax.nn.silu,  # gated MLPs (SwiGLU, arXiv 2002.05202)
  'relu': jax.nn.relu,  # DETR
}
_GROUPS = 32  # Number of groups of channels, in every published model with GroupNorm.


def param(
  module: nn.Module,
  name: str,
  init: Callable[[jax.Array], jax.Array],
  shape: tuple[int, ...],
) -> jax.Array:
  """Does the same as `module.param(name, init)`, for a known shape.

  `Module.param` traces the initialiser to check the shape of an existing parameter, which
  takes half of the time of tracing a ViT. This function compares it with `shape` instead.

  Args:
    init: a function that makes the array from a random key.

  Raises:
    flax.errors.ScopeParamShapeError: the parameter has another shape.
  """
  if module.is_initializing() or not module.has_variable('params', name):
    return module.param(name, init)
  value = module.get_variable('params', name)
  if value.shape != shape:
    path = module.scope.path_text
    raise flax.errors.ScopeParamShapeError(name, path, value.shape, shape)
  return value


class Dense(nn.Dense):
  """An `nn.Dense` whose kernel may have more than two axes. Maps [..., D] to [..., F].

  Attributes:
    inputs, outputs: axes of the kernel that replace D and F, such as (M, Dh) for heads.
      The bias has the axes `outputs`. Initial values are those of a kernel [D, F].
  """

  inputs: tuple[int, ...] = ()
  outputs: tuple[int, ...] = ()

  @nn.compact
  def __call__(self, x):
    inputs, outputs = self.inputs or x.shape[-1:], self.outputs or (self.features,)
    flat = (math.prod(inputs), math.prod(outputs))

    def make(name, init, flat, shape):
      start = lambda rng: init(rng, flat, self.param_dtype).reshape(shape)
      return param(self, name, start, shape).reshape(flat)

    kernel = make('kernel', self.kernel_init, flat, inputs + outputs)
    bias = make('bias', self.bias_init, flat[1:], outputs) if self.use_bias else None
    return layers.dense(*self.promote_dtype(x, kernel, bias, dtype=self.dtype))


class Dropout(nn.Module):
  """`nn.Dropout` (arXiv 1207.0580) with masks from `kernels.layers.keep_mask`."""

  rate: float

  @nn.compact
  def __call__(self, x, *, deterministic: bool):
    if deterministic or not self.rate:
      return x
    keep = layers.keep_mask(self.make_rng('dropout'), self.rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros_like(x))


class LayerNorm(nn.Module):
  """Normalises the last axis (arXiv 1607.06450); parameters `scale` and `bias` [D].

  The published files were trained with eps 1e-6 and the two-pass variance.
  """

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6
  scale_init: Callable = nn.initializers.ones_init()

  @nn.compact
  def __call__(self, x):
    """Maps [..., D] to [..., D] of `dtype`."""
    width = x.shape[-1:]
    make = lambda name, init: param(self, name, lambda rng: init(rng, width), width)
    scale = make('scale', self.scale_init)
    bias = make('bias', nn.initializers.zeros_init())
    return layers.layer_norm(x, scale, bias, self.eps, self.dtype)


class RMSNorm(nn.Module):
  """Divides the last axis by its root mean square (arXiv 1910.07467); parameter `scale`."""

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6

  @nn.compact
  def __call__(self, x):
    """Maps [..., D] to [..., D] of `dtype`."""
    width = x.shape[-1:]
    scale = param(self, 'scale', lambda rng: jnp.ones(width), width)
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + self.eps) * scale).astype(self.dtype)


NORMS = {'layer': LayerNorm, 'rms': RMSNorm}


class LayerScale(nn.Module):
  """Multiplies a residual branch by a parameter `gamma` [D] (CaiT, arXiv 2103.17239)."""

  init: float

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1:]
    gamma = param(self, 'gamma', lambda rng: jnp.full(width, self.init), width)
    return x * gamma.astype(x.dtype)


def group_norm(
  x, name: str, *, eps: float = 1e-6, zero_scale: bool = False, dtype=jnp.float32
):
  """Normalises over space and groups of channels (arXiv 1803.08494).

  For use in a compact module.

  Args:
    x: [B, H, W, C].
    name: name of the submodule that holds the parameters, `scale` and `bias` [C].
    zero_scale: whether `scale` starts at 0, so that a residual block is the identity.

  Returns:
    [B, H, W, C] of `dtype`.

  Raises:
    UserError: if the 32 groups do not divide C.
  """
  if x.shape[-1] % _GROUPS:
    raise UserError(
      f'{name}: {x.shape[-1]} channels are not a multiple of the {_GROUPS} groups of '
      f'GroupNorm. Choose a width (stem_width) that is a multiple of {_GROUPS}.'
    )
  init = nn.initializers.zeros_init() if zero_scale else nn.initializers.ones_init()
  return nn.GroupNorm(
    num_groups=_GROUPS,
    epsilon=eps,
    use_fast_variance=False,
    scale_init=init,
    dtype=dtype,
    name=name,
  )(x)


class MlpBlock(nn.Module):
  """Dense, activation, dropout, Dense. Maps [..., D] to [..., outputs or D].

  Attributes:
    gated: whether the hidden layer is Dense(x) act(gate(x)) (arXiv 2002.05202) instead of
      act(Dense(x)).
    norm: a function of `name` that makes a norm before the last Dense; None: no norm.
  """

  hidden: int
  dropout: float = 0.0
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.normal(1e-6)
  outputs: int | None = None
  use_bias: bool = True
  gated: bool = False
  norm: Callable[..., nn.Module] | None = None

  @nn.compact
  def __call__(self, x, *, train: bool = False):
    dense = functools.partial(
      Dense,
      use_bias=self.use_bias,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
    )
    act = choose('activation', self.act, ACTIVATIONS)
    y = dense(self.hidden, name='Dense_0')(x)
    y = act(dense(self.hidden, name='gate')(x)) * y if self.gated else act(y)
    y = Dropout(self.dropout)(y, deterministic=not train)
    y = y if self.norm is None else self.norm(name='norm')(y)
    return dense(self.outputs or x.shape[-1], name='Dense_1')(y)


class MultiHeadDotProductAttention(nn.Module):
  """Projects to M heads, attends, and projects back.

  Attributes:
    dropout: dropout rate of the attention weights.
    biases: names of the projections that have a bias. Without positions and norms of keys,
      the bias of keys cancels in the softmax.
    kv_heads: number of heads of keys and values; None: M. Each of them serves M / kv_heads
      query heads (arXiv 2305.13245).
    qk_norm: a function of `name` that makes a norm of each head's queries or keys
      (arXiv 2302.05442); None: no norm.
    norm: a function of `name` that makes a norm before the last projection; None: no norm.
  """

  num_heads: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  biases: tuple[str, ...] = ('query', 'key', 'value', 'out')
  kv_heads: int | None = None
  qk_norm: Callable[..., nn.Module] | None = None
  norm: Callable[..., nn.Module] | None = None

  @nn.compact
  def __call__(
    self,
    inputs_q,
    inputs_kv=None,
    *,
    inputs_k=None,
    train=False,
    bias=None,
    mask=None,
    positions=None,
  ):
    """Maps the inputs of the queries [B, N, D] to [B, N, D].

    Args:
      inputs_q: [B, N, D], the inputs of the queries.
      inputs_kv: [B, S, D], the inputs of the keys and values; None: `inputs_q`.
      inputs_k: [B, S, D], the inputs of the keys; None: the inputs of the values.
      bias, mask: see `attend`.
      positions: a function that takes a query [B, N, M, Dh] and a key [B, S, M, Dh], and
        returns both with positions applied, and a bias or None; see `nn.positions`. It
        cannot be combined with `bias`.
    """
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
    inputs_k = inputs_kv if inputs_k is None else inputs_k
    width = inputs_q.shape[-1]
    if width % self.num_heads:
      raise UserError(
        f'num_heads={self.num_heads} does not divide the width {width}: each head has '
        'width / num_heads channels.'
      )
    dense = lambda width, name, **axes: Dense(
      width,
      use_bias=name in self.biases,
      kernel_init=self.kernel_init,
      dtype=self.dtype,
      name=name,
      **axes,
    )
    head = width // self.num_heads

    def project(x, name, number):
      y = dense(number * head, name, outputs=(number, head))(x)
      return y.reshape(*x.shape[:2], number, head)

    shared = self.kv_heads or self.num_heads
    query = project(inputs_q, 'query', self.num_heads)
    key = project(inputs_k, 'key', shared)
    if self.qk_norm is not None:
      query = self.qk_norm(name='query_norm')(query)
      key = self.qk_norm(name='key_norm')(key)
    if positions is not None:
      query, key, bias = positions(query, key)
    value = project(inputs_kv, 'value', shared)
    if shared != self.num_heads:
      key, value = (
        jnp.repeat(x, self.num_heads // shared, axis=2) for x in (key, value)
      )
    dropout = self.dropout if train else 0.0
    x = attend_in(self, query, key, value, bias, mask=mask, dropout=dropout)
    x = checkpoint_name(x.reshape(inputs_q.shape), ATTENDED)
    x = x if self.norm is None else self.norm(name='norm')(x)
    return dense(width, 'out', inputs=(self.num_heads, head))(x)


def attend_in(
  module: nn.Module, query, key, value, bias=None, *, mask=None, dropout: float = 0.0
):
  """Calls `attend`; stores the attention weights as variables of the calling compact module.

  The weights [B, M, N, S] are sown as `intermediates/.../attention_weights` if that
  collection is mutable. Otherwise a kernel need not store them. If there is a variable
  `perturbations/.../attention_weights`, it is added to them. The derivative with respect to
  this variable, at zero, is the derivative with respect to the weights.

  Args:
    dropout: rate at which weights are dropped.
  """
  sown = module.is_mutable_collection('intermediates')
  perturbed = module.has_variable('perturbations', WEIGHTS)
  drop = on_weights = None
  if dropout:
    drop = functools.partial(Dropout(dropout), deterministic=False)
  if sown or perturbed:

    def on_weights(weights):
      if sown:
        module.sow('intermediates', WEIGHTS, weights)
      if perturbed:
        added = module.get_variable('perturbations', WEIGHTS)
        weights = weights + added.astype(weights.dtype)
      return weights

  return attend(query, key, value, bias, mask=mask, dropout=drop, on_weights=on_weights)


class MAPHead(nn.Module):
  """Attention pooling: a learned probe attends to all tokens. Maps [B, N, D] to [B, D].

  arXiv 2106.04560, section 3.4. Parameters have big_vision's names. All is in float32.
  """

  num_heads: int
  mlp_dim: int
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6

  @nn.compact
  def __call__(self, x):
    B, _, D = x.shape
    init = nn.initializers.xavier_uniform()
    probe = jnp.broadcast_to(self.param('probe', init, (1, 1, D)), (B, 1, D))
    attention = MultiHeadDotProductAttention(
      self.num_heads, name='MultiHeadDotProductAttention_0'
    )
    norm = LayerNorm(eps=self.norm_eps, name='LayerNorm_0')
    mlp = MlpBlock(self.mlp_dim, act=self.act, name='MlpBlock_0')
    x = attention(probe, x)  # [B, 1, D]
    return (x + mlp(norm(x)))[:, 0]


class QueryHead(nn.Module):
  """Attention pooling by a learned query per head. Maps [B, N, D] to [B, D].

  The query is not projected, and no MLP follows (AIM, arXiv 2401.08541). All is in float32.
  """

  num_heads: int

  @nn.compact
  def __call__(self, x):
    B, N, D = x.shape
    head = (self.num_heads, D // self.num_heads)
    query = self.param('query', nn.initializers.normal(0.02), head)

    def project(name):
      y = Dense(D, use_bias=False, outputs=head, name=name)(x)
      return y.reshape(B, N, *head)

    query = jnp.broadcast_to(query, (B, 1, *head))
    x = attend_in(self, query, project('key'), project('value'))
    return Dense(D, name='out')(x.reshape(B, D))


class PatchEmbedding(nn.Module):
  """Projects each patch of an image to a vector (equation 1 of the ViT paper).

  Parameters are those of a convolution whose stride is its kernel: `kernel` [ph, pw, C, D]
  and `bias` [D]. Initial values are those of a kernel [ph pw C, D].

  Attributes:
    patch_size: (ph, pw).
    stride: pixels per position of x, if x is the output of a stem; for an error message.
  """

  width: int
  patch_size: tuple[int, int]
  dtype: jnp.dtype
  stride: int = 1
  use_bias: bool = True

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, h, w, D].

    Raises:
      UserError: if patches do not tile the image.
    """
    H, W = x.shape[1:3]
    ph, pw = self.patch_size
    if H % ph or W % pw:
      H, W, ph, pw = (n * self.stride for n in (H, W, ph, pw))
      raise UserError(
        f'Images of {H}x{W} px cannot be cut into patches of {ph}x{pw}: choose a '
        f'resolution that is a multiple, such as {-(-H // ph) * ph}x{-(-W // pw) * pw}.'
      )
    shape = (ph, pw, x.shape[-1], self.width)
    flat = (math.prod(shape[:3]), self.width)
    start = lambda rng: nn.initializers.lecun_normal()(rng, flat).reshape(shape)
    kernel = param(self, 'kernel', start, shape)
    bias = None
    if self.use_bias:
      bias = param(self, 'bias', lambda rng: jnp.zeros(self.width), (self.width,))
    return layers.embed(*nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype))


def crop_to_patches(images, patch_size: tuple[int, int]):
  """Cuts off the pixels beyond the last whole patch, as big_vision and timm do.

  SigLIP's patches of 14 pixels, for example, cover 378 of 384 pixels. A side shorter than a
  patch is not cropped, so that `PatchEmbedding` raises its error.
  """
  (H, W), (ph, pw) = images.shape[1:3], patch_size
  return images[:, : max(H // ph, 1) * ph, : max(W // pw, 1) * pw]


def linear_head(
  x,
  num_classes: int | None,
  bias_init: float = 0.0,
  *,
  use_bias: bool = True,
  name: str = 'head',
):
  """Maps x [B, D] to logits [B, K] by a dense layer; returns x if `num_classes` is None.

  For use in a compact module. The kernel starts at 0, so all logits start at `bias_init`.
  """
  if num_classes is None:
    return x
  return nn.Dense(
    num_classes,
    use_bias=use_bias,
    kernel_init=nn.initializers.zeros_init(),
    bias_init=nn.initializers.constant(bias_init),
    name=name,
  )(x)


def unit(x):
  """Scales vectors [..., D] to unit length."""
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def check_images(images) -> None:
  """Raises UserError unless images are floats [B, H, W, C].

  Args:
    images: an array or a tracer: only its shape and dtype are read.
  """
  shape, dtype = images.shape, images.dtype
  if len(shape) != 4:
    one = ' One image goes as images[None].' if len(shape) == 3 else ''
    raise UserError(f'Images of shape {shape}: a model needs [B, H, W, C].{one}')
  if shape[1] in (1, 3) and shape[3] > 4:
    raise UserError(
      f'Images of shape {shape} have their channels first: a model needs [B, H, W, C], '
      'images.transpose(0, 2, 3, 1).'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise UserError(
      f'Images of {dtype}: a model needs floats, in most cases in [-1, 1]. '
      'vit_jax.preprocess(images, loaded) converts pixels, as does the op value_range '
      'in a pipeline.'
    )
