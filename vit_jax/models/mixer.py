"""MLP-Mixer: "An all-MLP Architecture for Vision", arXiv 2105.01601.

The model differs from the reference code in one thing: stochastic depth divides the branches
that remain by their probability, as in the other models here.
"""

import functools
import re
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, did_you_mean
from vit_jax.kernels import place
from vit_jax.models.base import Classifier, Family
from vit_jax.nn.layers import (
  ACTIVATIONS,
  LayerNorm,
  MlpBlock,
  PatchEmbedding,
  check_images,
)
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

# width, depth, token MLP width, channel MLP width: Table 1 of the paper.
VARIANTS = {
  'S': (512, 8, 256, 2048),
  'B': (768, 12, 384, 3072),
  'L': (1024, 24, 512, 4096),
  'H': (1280, 32, 640, 5120),
}


def variant(name: str) -> dict:
  """Returns the fields of 'B/16', or of 'B/16x8' for patches of 16 x 8 px.

  Raises:
    UserError: for an unknown name or a missing patch size.
  """
  match = re.fullmatch(r'([A-Za-z]+)/([1-9]\d*)(?:x([1-9]\d*))?', str(name))
  if not match or match[1] not in VARIANTS:
    raise UserError(
      f"Unknown Mixer variant {name!r}: expected SIZE/PATCH, such as 'B/16', with SIZE one "
      f'of {list(VARIANTS)}.{did_you_mean(str(name).split("/")[0], VARIANTS)}'
    )
  names = 'width', 'depth', 'tokens_mlp_dim', 'channels_mlp_dim'
  patch_size = int(match[2]), int(match[3] or match[2])
  return dict(zip(names, VARIANTS[match[1]], strict=True), patch_size=patch_size)


class MixerBlock(nn.Module):
  """An MLP over the tokens of each channel, then an MLP over the channels of each token."""

  tokens_mlp_dim: int
  channels_mlp_dim: int
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False):
    """Maps [B, N, D] to [B, N, D]; depth_rate: rate of stochastic depth, or None."""
    mlp = functools.partial(
      MlpBlock,
      act=self.act,
      dtype=self.dtype,
      kernel_init=nn.initializers.lecun_normal(),
      bias_init=nn.initializers.zeros_init(),
    )
    mix_tokens = mlp(self.tokens_mlp_dim, name='token_mixing')
    mix_channels = mlp(self.channels_mlp_dim, name='channel_mixing')
    norm = functools.partial(LayerNorm, self.dtype)
    drop = lambda y: StochasticDepth()(y, depth_rate, train=train)
    transposed = lambda x: x.swapaxes(1, 2)  # [B, N, D] <-> [B, D, N]

    self._check_size(x.shape[1])
    x = place(x)
    y = mix_tokens(transposed(norm(name='LayerNorm_0')(x)))
    x = x + drop(transposed(y))
    return x + drop(mix_channels(norm(name='LayerNorm_1')(x)))

  def _check_size(self, tokens: int) -> None:
    mixing = self.variables.get('params', {}).get('token_mixing')
    if mixing is None:
      return  # The parameters are being initialised now, for this image size.
    expected = mixing['Dense_0']['kernel'].shape[0]
    if expected != tokens:
      raise UserError(
        f'Images have {tokens} patches, but the parameters of this Mixer are for {expected} '
        'patches, and cannot be fitted to another size.'
      )


class Mixer(Classifier):
  """Patches, blocks of two MLPs, a norm, the mean of the tokens, a head.

  Fields up to `channels_mlp_dim` come from `variant`.
  """

  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  tokens_mlp_dim: int = 384
  channels_mlp_dim: int = 3072
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_tanh'
  # rate of the last block, rising linearly from 0; 0.1 in the paper, Table 4
  stochastic_depth: Share = 0.0
  # whether to run the blocks as one scanned block with stacked parameters
  scan: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images of the size for which the parameters were made.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' [B, h, w, D], 'tokens',
      'block00', ... and, after the final norm, 'encoded' [B, N, D], their mean
      'pre_logits' [B, D].
    """
    check_images(images)
    out = {}
    stem = PatchEmbedding(self.width, self.patch_size, self.dtype, name='stem')
    out['stem'] = x = stem(images)
    B, h, w, D = x.shape
    out['tokens'] = x = x.reshape(B, h * w, D)
    block = functools.partial(
      MixerBlock, self.tokens_mlp_dim, self.channels_mlp_dim, self.act, self.dtype
    )
    x, blocks = stack(
      block,
      x,
      name='MixerBlock',
      rates=depth_rates(self.stochastic_depth, self.depth),
      scan=self.scan,
      remat=self.remat,
      train=train,
    )
    out |= blocks
    out['encoded'] = x = LayerNorm(name='pre_head_layer_norm')(x)
    x = x.mean(axis=1)
    return self.classify(x, out, features)


FAMILY = Family(
  model=Mixer,
  variant=variant,
  blocks=r'(?P<block>MixerBlock)(?:_(?P<layer>\d+))?/.*',
  before=r'stem/.*',
  matrices=((r'MixerBlock.*/Dense_\d+/kernel', ((-2,), (-1,))),),
  branch_ends=r'MixerBlock_\d+/channel_mixing',
  prompts=('add',),
  stems=('stem/kernel',),
  stride=lambda fields: tuple(fields['patch_size']),
  any_size=lambda fields: False,  # An MLP over tokens has a fixed number of patches.
  published=(
    # timm: mixer_b16_224; Google: Mixer-B_16
    (
      r'mixer_([sblh])(\d+)(?:_\d+)?',
      lambda size, patch: (f'{size.upper()}/{patch}', {}),
    ),
    (r'Mixer-([A-Z])_(\d+)', lambda size, patch: (f'{size}/{patch}', {})),
  ),
  tiny=(
    dict(patch_size=(8, 8), width=32, depth=2, tokens_mlp_dim=16, channels_mlp_dim=64),
  ),
)
