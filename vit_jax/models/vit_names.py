"""What Vision Transformers are called: sizes, variants, and the names that others use."""

import re

from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.nn import resnet

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
  'giantopt': 'g-opt',
  'gigantic': 'G',
}
_SIZES = '|'.join(_TIMM)


def _gap(asked) -> dict:
  return {'classifier': 'gap'} if asked else {}


# See `Family.published`.
PUBLISHED = (
  # timm: vit_base_patch16_224, vit_base_r50_s16_384, vit_tiny_r_s16_p8_224; its
  # vit_medium_patch16_gap_240 has LayerScale.
  (
    rf'vit_(?!medium_patch\d+_gap)({_SIZES})_patch(\d+)(_gap)?(?:_\d+)?',
    lambda size, patch, gap: (f'{_TIMM[size]}/{patch}', _gap(gap)),
  ),
  (
    rf'vit_({_SIZES})_r(\d+)_s(\d+)(?:_\d+)?',
    lambda size, r, s: (f'R{r}+{_TIMM[size]}/{s}', {}),
  ),
  # DeiT (arXiv 2012.12877), FlexiViT (2212.08013; its patches are resized in training,
  # 16 is what the published files hold), SigLIP (2303.15343).
  (
    r'deit_(tiny|small|base)_patch16(?:_\d+)?',
    lambda size: (f'{_TIMM[size]}/16', {}),
  ),
  (r'flexivit_(small|base|large)', lambda size: (f'{_TIMM[size]}/16', {})),
  (
    rf'vit_({_SIZES})_patch(\d+)_siglip(_gap)?(?:_\d+)?',
    lambda size, patch, gap: (
      f'{_TIMM[size]}/{patch}',
      {'classifier': 'gap' if gap else 'map'},
    ),
  ),
  (rf'vit_({_SIZES})_r_s16_p8(?:_\d+)?', lambda size: (f'R+{_TIMM[size]}/16', {})),
  # Google: ViT-B_16, R50+ViT-B_16
  (
    r'(R\d*\+)?ViT-([A-Za-z0-9]+)_(\d+)(-gap-norep)?',
    lambda r, size, patch, gap: (f'{r or ""}{size}/{patch}', _gap(gap)),
  ),
)
