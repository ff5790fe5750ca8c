"""Vision Transformer: "An Image is Worth 16x16 Words", arXiv 2010.11929.

Differs from the paper in one default: the head is a single linear layer. The paper's
pre-training head has one tanh hidden layer before it; `representation_size` gives it.
"""

import re

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.models.family import Family
from vit_jax.nn import resnet
from vit_jax.nn.embed import patch_embed
from vit_jax.nn.heads import MAPHead, linear_head
from vit_jax.nn.transformer import BlockConfig, Encoder

# width, depth, MLP width, heads. Ti, S: DeiT (arXiv 2012.12877); B, L, H: Table 1 of
# the paper; M, So400m, mu: big_vision; g, G: arXiv 2106.04560 Table 2; the *-opt
# shapes: arXiv 2305.13035; e: arXiv 2209.06794.
VARIANTS = {
  'mu': (32, 1, 128, 2),
  'Ti': (192, 12, 768, 3),
  'S': (384, 12, 1536, 6),
  'M': (512, 12, 2048, 8),
  'B': (768, 12, 3072, 12),
  'L': (1024, 24, 4096, 16),
  'So400m': (1152, 27, 4304, 16),
  'H': (1280, 32, 5120, 16),
  'g': (1408, 40, 6144, 16),
  'g-opt': (1536, 40, 6144, 16),
  'G': (1664, 48, 8192, 16),
  'G-opt': (1536, 48, 8192, 16),
  'e': (1792, 56, 15360, 16),
}
CLASSIFIERS = ('token', 'gap', 'map', 'none')


def variant(name: str) -> dict:
  """Returns the fields of 'B/16', 'B/16x8' (patches of 16 x 8 px) or 'R50+B/16'.

  A hybrid R<layers>+SIZE/STRIDE embeds each position of a ResNet's output: at stride 32
  its four stages; at 16 three, the third with the units of the fourth (section 4.1).
  'R+SIZE/16' is the ResNet's root and patches of 8: 32 px in truth, published as 16.

  Raises:
    UserError: for an unknown name or a missing patch size.
  """
  match = re.fullmatch(r'(?:R(\d*)\+)?([A-Za-z0-9-]+)/(\d+)(?:x(\d+))?', str(name))
  if not match or match[2] not in VARIANTS or match[3] == '0' or match[4] == '0':
    size = str(name).split('/')[0].split('+')[-1]
    raise UserError(
      f"Unknown ViT variant {name!r}: SIZE/PATCH such as 'B/16', or a hybrid such as "
      f"'R50+B/16', SIZE one of {list(VARIANTS)}.{did_you_mean(size, VARIANTS)}"
    )
  width, depth, mlp_dim, num_heads = VARIANTS[match[2]]
  fields = dict(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=num_heads)
  if match[1] is None:
    return dict(fields, patch_size=(int(match[3]), int(match[4] or match[3])))
  size = match[2]
  stems = {f'R+{size}/16': ((), 8)}
  for layers, (*first, third, fourth) in resnet.STAGES.items():
    stems[f'R{layers}+{size}/16'] = (*first, third + fourth), 1
    stems[f'R{layers}+{size}/32'] = (*first, third, fourth), 1
  blocks, patch = choose('hybrid', name, stems)
  return dict(fields, stem_blocks=blocks, patch_size=(patch, patch))


class ViT(nn.Module):
  """See `__call__`. Fields up to `num_heads` come from `variant`."""

  num_classes: int | None = 1000  # None: no head, logits are out['pre_logits']
  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: int = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Hybrid (section 3.1): the units per stage of a ResNet whose output is what patches
  # are cut from; (): its root alone; None: no ResNet. Width: channels of the root.
  stem_blocks: tuple[int, ...] | None = None
  stem_width: int = 64
  # token: a learned cls token; gap: mean of tokens; map: attention pooling;
  # none: every token is classified, logits are [B, N, K].
  classifier: str = 'token'
  # Width of the tanh layer before the head (paper 3.2); None: no such layer.
  representation_size: int | None = None
  posemb: str = 'learn'
  posemb_std: float | None = 0.02  # of initial values; None: 1 / sqrt(width)
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6  # of every LayerNorm; transformers' ViT has 1e-12 by default
  dropout: float = 0.0  # paper B.1: after the embedding and every dense but q, k, v
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0
  # -10 for sigmoid losses over i21k: ln(1/21843), the prior of a rare class.
  head_bias_init: float = 0.0
  scan: bool = False  # blocks as one scanned block with stacked parameters
  remat: str = 'none'  # what to recompute: see nn.stack.remat_policy
  placement: str = 'batch'  # of tokens at block entry, see nn.placement
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
    choose('classifier', self.classifier, CLASSIFIERS)
    out, x, stride = {}, images, 1
    if self.stem_blocks is not None:
      x, out = resnet.trunk(
        images, self.stem_blocks, self.stem_width, remat=self.remat, dtype=self.dtype
      )
      stride = resnet.stride(self.stem_blocks)
    out['stem'] = x = patch_embed(
      x, self.width, self.patch_size, name='embedding', dtype=self.dtype, stride=stride
    )
    B, h, w, D = x.shape
    x = x.reshape(B, h * w, D)
    if self.classifier == 'token':
      cls = self.param('cls', nn.initializers.zeros_init(), (1, 1, D), jnp.float32)
      cls = jnp.broadcast_to(cls.astype(x.dtype), (B, 1, D))
      x = jnp.concatenate([cls, x], axis=1)  # [B, 1 + h w, D]

    encoder = Encoder(
      BlockConfig(
        self.num_heads,
        self.mlp_dim,
        self.dropout,
        self.attention_dropout,
        self.act,
        self.norm_eps,
        self.placement,
        self.dtype,
      ),
      self.depth,
      self.stochastic_depth,
      self.posemb,
      self.posemb_std,
      self.scan,
      self.remat,
      name='Transformer',
    )
    # Nothing else of the last block reaches the logits: 7 % of a step at depth 12.
    num_queries = 1 if self.classifier == 'token' and not features else None
    x, blocks = encoder(x, (h, w), train=train, num_queries=num_queries)
    out |= blocks
    out['encoded'] = x

    if self.classifier == 'token':
      x = x[:, 0]
    elif self.classifier == 'gap':
      x = x.mean(axis=1)
    elif self.classifier == 'map':
      pool = MAPHead(
        self.num_heads, self.mlp_dim, self.act, self.norm_eps, name='MAPHead_0'
      )
      x = pool(x)
    if self.representation_size is not None:
      x = nn.Dense(self.representation_size, name='pre_logits')(x)
      x = nn.tanh(x)
    out['pre_logits'] = x
    x = linear_head(x, self.num_classes, self.head_bias_init)
    return x, out if features else {'pre_logits': out['pre_logits']}


def stride(fields) -> tuple[int, int]:
  """Returns the pixels per token, down and across."""
  blocks = fields.get('stem_blocks')
  stem = 1 if blocks is None else resnet.stride(blocks)
  ph, pw = fields['patch_size']
  return ph * stem, pw * stem


# timm's words for the sizes.
_TIMM = {
  'tiny': 'Ti',
  'small': 'S',
  'medium': 'M',
  'base': 'B',
  'large': 'L',
  'so400m': 'So400m',
  'huge': 'H',
  'giant': 'g',
  'gigantic': 'G',
}
_SIZES = '|'.join(_TIMM)


def _gap(asked) -> dict:
  return {'classifier': 'gap'} if asked else {}


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
  stems=('conv_root/kernel', 'embedding/kernel'),
  position='Transformer/posembed_input/pos_embedding',
  patches='embedding/kernel',
  stride=stride,
  any_size=lambda fields: fields['posemb'] != 'learn',
  published=(
    # timm: vit_base_patch16_224, vit_base_r50_s16_384, vit_tiny_r_s16_p8_224
    (
      rf'vit_({_SIZES})_patch(\d+)(_gap)?(?:_\d+)?',
      lambda size, patch, gap: (f'{_TIMM[size]}/{patch}', _gap(gap)),
    ),
    (
      rf'vit_({_SIZES})_r(\d+)_s(\d+)(?:_\d+)?',
      lambda size, r, s: (f'R{r}+{_TIMM[size]}/{s}', {}),
    ),
    (rf'vit_({_SIZES})_r_s16_p8(?:_\d+)?', lambda size: (f'R+{_TIMM[size]}/16', {})),
    # Google: ViT-B_16, R50+ViT-B_16
    (
      r'(R\d*\+)?ViT-([A-Za-z0-9]+)_(\d+)(-gap-norep)?',
      lambda r, size, patch, gap: (f'{r or ""}{size}/{patch}', _gap(gap)),
    ),
  ),
  tiny=(
    dict(variant='mu/8', depth=3),
    dict(variant='R50+mu/16', depth=2, stem_blocks=(1,), stem_width=32),
  ),
)
