"""Vision Transformer: "An Image is Worth 16x16 Words", arXiv 2010.11929.

Differs from the paper in one default: the head is a single linear layer. The paper's
pre-training head has one tanh hidden layer before it; `representation_size` gives it.
"""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Depth, Share
from vit_jax.errors import choose
from vit_jax.kernels.placement import PLACEMENTS
from vit_jax.models.family import Family
from vit_jax.models.vit_names import PUBLISHED, variant
from vit_jax.nn import resnet
from vit_jax.nn.embed import patch_embed
from vit_jax.nn.heads import MAPHead, linear_head
from vit_jax.nn.images import check as check_images
from vit_jax.nn.mlp import ACTIVATIONS
from vit_jax.nn.positions import POSEMBS, WHERE
from vit_jax.nn.remat import REMAT
from vit_jax.nn.transformer import BLOCKS, Encoder, EncoderConfig

CLASSIFIERS = ('token', 'gap', 'map', 'none')


class ViT(nn.Module):
  """See `__call__`. Fields up to `num_heads` come from `variant`."""

  num_classes: Count | None = 1000  # None: no head, logits are out['pre_logits']
  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Hybrid (section 3.1): the units per stage of a ResNet whose output is what patches
  # are cut from; (): its root alone; None: no ResNet. Width: channels of the root.
  stem_blocks: tuple[Depth, ...] | None = None
  stem_width: int = 64
  # token: a learned cls token; gap: mean of tokens; map: attention pooling;
  # none: every token is classified, logits are [B, N, K].
  classifier: Literal[CLASSIFIERS] = 'token'
  # Width of the tanh layer before the head (paper 3.2); None: no such layer.
  representation_size: int | None = None
  # learn, learn2d, sincos2d are added to tokens; relative and rotary act in attention.
  posemb: Literal[POSEMBS] = 'learn'
  # Of those added (Table 8): before the first block, or before every block a table of its
  # own, or one for all.
  posemb_where: Literal[WHERE] = 'stem'
  posemb_std: float | None = 0.02  # of initial values; None: 1 / sqrt(width)
  posemb_per_head: bool = False  # relative: a table for each head; else they share one
  # axial (section D.6): each block is one along rows, then one along columns.
  attention: Literal[tuple(BLOCKS)] = 'full'
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_tanh'
  norm_eps: float = 1e-6  # of every LayerNorm; transformers' ViT has 1e-12 by default
  dropout: Share = 0.0  # paper B.1: after the embedding and every dense but q, k, v
  attention_dropout: Share = 0.0
  # In bfloat16, kernels that keep the scores on chip, on TPUs and NVIDIA GPUs, and on TPUs
  # kernels for norms and narrow MLPs of blocks. False: also differentiable forward-mode there.
  fused_attention: bool = True
  stochastic_depth: Share = 0.0
  # -10 for sigmoid losses over i21k: ln(1/21843), the prior of a rare class.
  head_bias_init: float = 0.0
  scan: bool = False  # blocks as one scanned block with stacked parameters
  remat: Literal[tuple(REMAT)] = 'none'  # what to recompute: see nn.remat
  placement: Literal[tuple(PLACEMENTS)] = 'batch'  # of tokens at block entry
  # Of the body; final norm, pooling, head and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Args:
      images: [B, H, W, C] in [-1, 1].
      train: dropout and stochastic depth, which need the 'dropout' rng.
      features: whether the caller reads more of `out` than 'pre_logits'. If not, the
        last block (unless scanned) computes the class token alone.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' [B, h, w, D], 'tokens'
      [B, N, D] with positions added, 'block00', ... [B, N, D], 'encoded' [B, N, D]
      after the final norm, 'pre_logits' [B, D]; of hybrids also 'root', 'stage1', ...
      [B, h, w, C]. With `features=False` only 'pre_logits'.
    """
    check_images(images)
    choose('classifier', self.classifier, CLASSIFIERS)
    out, x, stride = {}, images, resnet.stride(self.stem_blocks)
    if self.stem_blocks is not None:
      x, out = resnet.trunk(
        images, self.stem_blocks, self.stem_width, remat=self.remat, dtype=self.dtype
      )
    out['stem'] = x = patch_embed(
      x, self.width, self.patch_size, name='embedding', dtype=self.dtype, stride=stride
    )
    B, h, w, D = x.shape
    x = x.reshape(B, h * w, D)
    if self.classifier == 'token':
      cls = self.param('cls', nn.initializers.zeros_init(), (1, 1, D), jnp.float32)
      cls = jnp.broadcast_to(cls.astype(x.dtype), (B, 1, D))
      x = jnp.concatenate([cls, x], axis=1)  # [B, 1 + h w, D]

    # Nothing else of the last block reaches the logits: 7 % of a step at depth 12.
    num_queries = 1 if self.classifier == 'token' and not features else None
    encoder = Encoder(EncoderConfig.of(self), name='Transformer')
    x, blocks = encoder(x, (h, w), train=train, num_queries=num_queries)
    out |= blocks
    out['encoded'] = x

    if self.classifier == 'token':
      x = x[:, 0]
    elif self.classifier == 'gap':
      x = x.mean(axis=1)
    elif self.classifier == 'map':
      fields = self.num_heads, self.mlp_dim, self.act, self.norm_eps
      x = MAPHead(*fields, name='MAPHead_0')(x)
    if self.representation_size is not None:
      x = nn.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
    out['pre_logits'] = x
    x = linear_head(x, self.num_classes, self.head_bias_init)
    return x, out if features else {'pre_logits': out['pre_logits']}


FAMILY = Family(
  model=ViT,
  variant=variant,
  blocks=r'(?P<block>Transformer/encoderblock)(?:_(?P<layer>\d+))?/.*',
  before=r'embedding/.*|cls|Transformer/posembed_input/.*|conv_root/.*|gn_root/.*|block\d+/.*',
  matrices=(
    (r'.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (r'.*/MultiHeadDotProductAttention_\d+/out/kernel', ((-3, -2), (-1,))),
    (r'Transformer/encoderblock.*/Dense_\d+/kernel', ((-2,), (-1,))),
  ),
  branch_ends=r'Transformer/encoderblock_\d+/(?:\w+/)?MlpBlock_0',
  prompts=('prepend', 'before_positions', 'add'),
  stems=('conv_root/kernel', 'embedding/kernel'),
  positions=(
    (r'.*/posembed_input/pos_embedding', 'hw'),
    (r'.*/posembed_input/pos_embedding_y', 'h'),
    (r'.*/posembed_input/pos_embedding_x', 'w'),
  ),
  position='Transformer/posembed_input/pos_embedding',
  patches='embedding/kernel',
  stride=lambda f: tuple(
    n * resnet.stride(f.get('stem_blocks')) for n in f['patch_size']
  ),
  any_size=lambda fields: fields['posemb'] in ('sincos2d', 'rotary', 'none'),
  published=PUBLISHED,
  tiny=(
    dict(variant='mu/8', depth=2),
    dict(variant='R50+mu/16', depth=2, stem_blocks=(1,), stem_width=32),
  ),
)
