"""Text towers, and pairs of an image and a text tower.

In CLIP (arXiv 2103.00020) a token attends to those before it, and the feature of a text is
that of its last token. In SigLIP (arXiv 2303.15343) and SigLIP 2 (2502.14786) every token
attends to all others, even to padding, and the last position is the feature.
"""

import functools
import math
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.nn.layers import NORMS, MlpBlock, MultiHeadDotProductAttention, unit


class TextBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)). Fields: see `TextTransformer`."""

  num_heads: int
  mlp_dim: int
  mask: str
  act: str
  norm: str
  norm_eps: float
  mlp: str
  bias: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    """Maps [B, N, D] to [B, N, D]."""
    norm = functools.partial(NORMS[self.norm], self.dtype, self.norm_eps)
    attention = MultiHeadDotProductAttention(
      self.num_heads,
      dtype=self.dtype,
      biases=('query', 'key', 'value', 'out') if self.bias else (),
      name='MultiHeadDotProductAttention_0',
    )
    mlp = MlpBlock(
      self.mlp_dim,
      act=self.act,
      dtype=self.dtype,
      use_bias=self.bias,
      gated=self.mlp == 'swiglu',
      name='MlpBlock_0',
    )
    N = x.shape[1]
    mask = jnp.tril(jnp.ones((N, N), bool)) if self.mask == 'causal' else None
    x = x + attention(norm(name='LayerNorm_0')(x), mask=mask)
    return x + mlp(norm(name='LayerNorm_1')(x))


class TextTransformer(nn.Module):
  """A transformer that maps a text, given by its token ids, to one vector."""

  vocab: int = 49408
  length: int = 77  # number of positions
  width: int = 512
  depth: int = 12
  mlp_dim: int = 2048
  num_heads: int = 8
  # causal: a token attends to itself and earlier tokens. none: to all tokens, even padding.
  mask: Literal['causal', 'none'] = 'causal'
  # The token that gives the feature. eot: the end token. last: the last token.
  pooling: Literal['eot', 'last'] = 'eot'
  # The id of the end token; None: the largest id of the text.
  eos: int | None = None
  outputs: int | None = 512  # width of the projection; None: no projection
  head_bias: bool = False  # whether the projection has a bias
  act: str = 'gelu_erf'
  norm: Literal[tuple(NORMS)] = 'layer'
  norm_eps: float = 1e-5
  mlp: Literal['mlp', 'swiglu'] = 'mlp'
  bias: bool = True  # whether the layers of the blocks have biases; False in AIMv2
  dtype: jnp.dtype = jnp.float32  # dtype of the body, as in `models.base.Classifier`

  @nn.compact
  def __call__(self, ids):
    """Embeds texts.

    Args:
      ids: int [B, N], N up to `length`, as `vit_jax.text.tokenizer` makes them.

    Returns:
      (features [B, outputs] float32, out): 'tokens' [B, N, D] with positions added,
      'block00', ..., 'encoded' [B, N, D] after the final norm, 'pre_logits' [B, D].
    """
    if ids.shape[1] > self.length:
      raise UserError(
        f'Texts have {ids.shape[1]} tokens, but the text tower takes {self.length}.'
      )
    normal, D = nn.initializers.normal, self.width
    embed = nn.Embed(self.vocab, D, embedding_init=normal(0.02), name='embedding')
    table = self.param('pos_embedding', normal(0.01), (self.length, D))
    x = (embed(ids) + table[: ids.shape[1]]).astype(self.dtype)
    out = {'tokens': x}
    fields = (
      self.num_heads,
      self.mlp_dim,
      self.mask,
      self.act,
      self.norm,
      self.norm_eps,
      self.mlp,
      self.bias,
      self.dtype,
    )
    block = functools.partial(TextBlock, *fields)
    for i in range(self.depth):
      out[f'block{i:02d}'] = x = block(name=f'encoderblock_{i}')(x)
    norm = NORMS[self.norm](eps=self.norm_eps, name='encoder_norm')
    out['encoded'] = x = norm(x)
    if self.pooling == 'last':
      x = x[:, -1]
    else:  # if the end token occurs several times, argmax finds the first
      end = jnp.argmax(ids if self.eos is None else ids == self.eos, axis=1)
      x = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    out['pre_logits'] = x
    if self.outputs is None:
      return x, out
    return nn.Dense(self.outputs, use_bias=self.head_bias, name='head')(x), out


class TwoTowers(nn.Module):
  """An image tower and a text tower that map to vectors of the same width.

  The logit of an image and a text is exp(logit_scale) x . y + logit_bias, with x and y
  of unit length.

  Attributes:
    image: a classifier. Its outputs are the vectors: the logits, or 'pre_logits' if
      `num_classes` is None.
    bias: whether there is a `logit_bias`, as in SigLIP.
  """

  image: nn.Module
  text: TextTransformer
  bias: bool = False

  def setup(self):
    start = nn.initializers.constant
    # Initial values: SigLIP's if there is a bias, otherwise CLIP's.
    scale = math.log(10 if self.bias else 1 / 0.07)
    self.logit_scale = self.param('logit_scale', start(scale), ())
    self.logit_bias = self.param('logit_bias', start(-10), ()) if self.bias else 0.0

  def __call__(self, images, ids):
    """Returns (logits [B, T], {'image', 'text': unit vectors [B, E], [T, E]})."""
    out = {'image': self.embed_images(images), 'text': self.embed_texts(ids)}
    return self.logits(**out), out

  def embed_images(self, images):
    """Maps images [B, H, W, C] to unit vectors [B, E]."""
    return unit(self.image(images, features=False)[0])

  def embed_texts(self, ids):
    """Maps ids [T, N] to unit vectors [T, E]."""
    return unit(self.text(ids)[0])

  def logits(self, image, text):
    """Maps unit vectors [B, E] and [T, E] to logits [B, T]."""
    return jnp.exp(self.logit_scale) * image @ text.T + self.logit_bias
