"""Names under which others publish models."""

import json

import pytest

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.abstract import count
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import timm
from vit_jax.weights import zoo


@pytest.mark.parametrize(
  ('name', 'model', 'variant'),
  [
    ('vit:B/16', 'vit', 'B/16'),
    ('vit', 'vit', None),
    ('vit_tiny_r_s16_p8_224', 'vit', 'R+Ti/16'),
    ('vit_small_r26_s32_224', 'vit', 'R26+S/32'),
    ('vit_base_r26_s32_224', 'vit', 'R26+B/32'),
    ('vit_base_r50_s16_384', 'vit', 'R50+B/16'),
    ('vit_large_r50_s32_224', 'vit', 'R50+L/32'),
    ('mixer_s32_224', 'mixer', 'S/32'),
    ('mixer_b16_224', 'mixer', 'B/16'),
    ('resnetv2_50x1_bit', 'bit', 'R50x1'),
    ('resnetv2_152x4_bit', 'bit', 'R152x4'),
    ('ViT-B_16', 'vit', 'B/16'),
    ('ViT-H_14', 'vit', 'H/14'),
    ('R50+ViT-B_16', 'vit', 'R50+B/16'),
    ('R26+ViT-S_32', 'vit', 'R26+S/32'),
    ('R+ViT-Ti_16', 'vit', 'R+Ti/16'),
    ('Mixer-B_16', 'mixer', 'B/16'),
    ('BiT-R50x1', 'bit', 'R50x1'),
    ('BiT-M-R101x3', 'bit', 'R101x3'),
    ('resnet_gn:R50', 'resnet_gn', 'R50'),
    ('swin_tiny_patch4_window7_224', 'swin', 'T/7'),
    ('swin_base_patch4_window12_384', 'swin', 'B/12'),
    ('swinv2_tiny_window8_256', 'swin', 'V2-T/8'),
    ('swinv2_base_window12to24_192to384', 'swin', 'V2-B/12to24'),
    ('swin:V2-L/16', 'swin', 'V2-L/16'),
    ('resnet18', 'resnet', '18'),
    ('resnet50', 'resnet', '50'),
    ('convnext_atto', 'convnext', 'A'),
    ('microsoft/resnet-152', 'resnet', '152'),
    ('resnet-101', 'resnet', '101'),
    ('mvitv2_tiny', 'mvit', 'T'),
    ('mvitv2_large', 'mvit', 'L'),
    ('facebook/detr-resnet-50', 'detr', 'R50'),
    ('detr-resnet-101-dc5', 'detr', 'R101-DC5'),
    ('detr_resnet50_dc5', 'detr', 'R50-DC5'),
    ('detr:R101', 'detr', 'R101'),
  ],
)
def test_published_names(name, model, variant):
  assert models.parse_name(name) == (model, variant, {})
  models.build(name)


@pytest.mark.parametrize(
  ('name', 'size', 'parameters'),
  [
    # Exact counts of the published files; without heads, but where one is named.
    ('facebook/dinov2-small', 518, 22_056_192),
    ('facebook/dinov2-giant', 518, 1_136_479_232),
    ('facebook/dinov2-with-registers-base', 518, 86_582_784),
    ('facebook/dinov3-vits16-pretrain-lvd1689m', 224, 21_596_160),
    ('facebook/dinov3-vithplus16-pretrain-lvd1689m', 224, 840_591_360),
    ('facebook/dinov3-vit7b16-pretrain-lvd1689m', 224, 6_716_030_976),
    ('facebook/deit-small-distilled-patch16-224', 224, 22_436_432),
    ('microsoft/beit-base-patch16-224', 224, 86_530_984),
    ('microsoft/beit-large-patch16-512', 512, 305_674_728),
    ('openai/clip-vit-base-patch32', 224, 87_849_216),
    ('openai/clip-vit-large-patch14-336', 336, 304_293_888),
    ('laion/CLIP-ViT-H-14-laion2B-s32B-b79K', 224, 632_076_800),
    ('google/siglip-base-patch16-224', 224, 92_884_224),
    ('google/siglip-so400m-patch14-384', 384, 428_225_600),
    ('google/siglip2-giant-opt-patch16-256', 256, 1_163_168_256),
    ('facebook/vit-mae-huge', 224, 630_764_800),
    ('facebook/sam-vit-base', 1024, 89_670_912),
    ('facebook/ijepa_vitg16_22k', 224, 1_011_368_576),
    ('apple/aimv2-large-patch14-224', 224, 309_197_824),
    ('apple/aimv2-3B-patch14-224', 224, 2_720_658_432),
    ('apple/aimv2-large-patch14-native', 224, 308_935_680),
    ('apple/aimv2-large-patch14-224-lit', 224, 313_132_032),
    # The authors' and open_clip's; timm counts K more, zeros for a bias of its heads.
    ('dinov2_vitb14_reg', 518, 86_582_784),
    ('dinov2_vitg14', 518, 1_136_479_232),
    ('dinov3_vith16plus', 224, 840_591_360),
    ('dinov3_vit7b16', 224, 6_716_030_976),
    ('mae_vit_large_patch16', 224, 303_301_632),
    ('ViT-L-14-336', 336, 304_293_888),
    ('ViT-bigG-14', 224, 1_844_908_544 - 1280),
    ('RN50', 224, 38_316_896),
    ('RN50x64-quickgelu', 448, 420_380_352),
    ('convnext_base_w_320', 320, 88_221_824),
    ('laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg', 256, 846_543_744),
    ('laion/CLIP-convnext_large_d.laion2B-s26B-b102K-augreg', 256, 199_770_816),
    ('PE-Core-T16-384', 384, 6_141_056 - 512),
    ('PE-Core-B16-224', 224, 93_673_984 - 1024),
    ('PE-Core-G14-448', 448, 1_882_033_920 - 1280),
  ],
)
def test_names_of_the_hub_have_the_published_number_of_parameters(
  name, size, parameters
):
  assert count(vit_jax.create_model(name), (size, size)) == parameters


@pytest.mark.parametrize(
  ('name', 'variant', 'fields'),
  [
    ('vit_base_patch16_224.augreg_in1k', 'B/16', {}),
    ('vit_base_patch16_224.augreg_in21k', 'B/16', dict(num_classes=21_843)),
    ('hf:timm/vit_base_patch16_224.mae', 'B/16', dict(num_classes=None)),
    ('deit_tiny_patch16_224', 'Ti/16', {}),
    ('vit_base_patch16_siglip_224', 'B/16', dict(classifier='map', num_classes=None)),
    (
      'vit_giantopt_patch16_siglip_256',
      'g-opt/16',
      dict(act='gelu_tanh', classifier='map', num_classes=None),
    ),
    ('flexivit_large', 'L/16', dict(posemb_tokens='patches')),
    (
      'vit_small_patch14_reg4_dinov2.lvd142m',
      'S/14',
      dict(posemb_tokens='patches', registers=4, layer_scale=1e-5, num_classes=None),
    ),
  ],
)
def test_names_of_timm(name, variant, fields):
  fields = {'act': 'gelu_erf'} | fields
  fields = {k: v for k, v in fields.items() if (k, v) != ('act', 'gelu_tanh')}
  assert models.parse_name(name) == ('vit', variant, fields)
  assert models.build(name).fields().items() >= fields.items()


def test_names_of_models_that_average():
  assert models.build('ViT-S_16-gap-norep').classifier == 'gap'


# timm 1.0.31: [name, parameters, outputs, (height, width)] of its ViT-like names and of those round
# them, from its registry.
CENSUS = json.loads((GOLDEN / 'timm_census.json').read_text(encoding='utf-8'))


def in_tables(model, size: tuple[int, int]) -> int:
  """Returns the numbers in the tables of positions for images of this size."""
  fields = model.fields()
  h, w = (n // p for n, p in zip(size, fields['patch_size'], strict=True))
  rows, before = 0, model.prefix
  if fields.get('posemb', 'learn') == 'learn':
    rows = h * w + (before if fields.get('posemb_tokens', 'prefix') == 'prefix' else 0)
  table = fields.get('relpos') == 'layer' and fields['relpos_dim'] is None
  offsets = (2 * h - 1) * (2 * w - 1) + 3 if table else 0
  return rows * fields['width'] + offsets * fields['num_heads'] * fields['depth']


@pytest.mark.parametrize('part', range(4))
def test_timm_names_have_the_parameters_of_timm(part):
  for name, parameters, outputs, size in CENSUS[part::4]:
    if models.parse_name(name)[0] not in models.MODELS:
      continue
    model = models.build(f'{name}.a_tag')
    assert model.num_classes == (outputs or None), name
    number, size = 0, tuple(size)
    if name in timm.architectures():
      # Models that differ in these fields alone are traced once, and at one size: the
      # tables of positions are counted by hand.
      number, size = in_tables(model, size), model.patch_size
      same = dict(act='gelu_erf', norm_eps=1e-6)
      if model.fields().get('relpos_dim') is None:
        same['relpos'] = 'none'
      model = model.change(posemb='none', **same)
    assert number + count(model, size) == parameters, name


def test_the_rest_of_timm_is_refused_by_name():
  unknown = []
  for name, *_ in CENSUS:
    if models.parse_name(name)[0] not in models.MODELS:
      with pytest.raises(UserError, match=f"'{name}': its family is published"):
        models.resolve(name)
      unknown.append(name)
  assert (len(CENSUS), len(unknown)) == (436, 74)


@pytest.mark.parametrize(
  ('name', 'facts'),
  [
    ('vit_base_r50_s14', ('R50+B/14', 'R50+B/16')),
    ('ViT-X_16', ('X/16', 'B/16', 'So400m')),
    ('Mixer-B_0', ('B/0', 'B/16')),
    ('mixr', ('mixr', 'mixer', 'vit_base_patch16_224')),
    (
      'swinv2_cr_tiny_ns_224.sw_in1k',
      ('swinv2_cr_tiny_ns_224', 'not built', 'models.md'),
    ),
    ('mask_rcnn_X_101_32x8d_FPN_3x', ('not built', 'mask_rcnn_R_101_FPN_3x')),
    ('mask_rcnn_R_50_FPN_3X', ('expected one of', 'mask_rcnn_R_50_FPN_3x')),
    (
      'vit_small_patch14_dinov4',
      ("'vit_small_patch14_dinov4'", 'vit_small_patch14_dinov2'),
    ),
    ('ViT-B/16', ('ViT-B/16', 'Did you mean "ViT-B_16"')),
    ('vit_tiny', ('mean "vit_tiny_patch16_224"',)),
    ('vit_b_16', ('vit_b_16', 'Did you mean "ViT-B_16"')),
    ('vit_base_path16_224', ("'vit_base_path16_224'", 'mean "vit_base_patch16_224"')),
    (
      'facebook/dinov2_small',
      ('facebook/dinov2_small', 'Did you mean "facebook/dinov2-small"'),
    ),
  ],
)
def test_other_names_are_refused(name, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    vit_jax.create_model(name)


def test_listed_names_are_of_models_and_weights():
  for name in vit_jax.list_models():
    if name.startswith('hf:timm/'):
      name = name.removeprefix('hf:timm/').partition('.')[0]
    if not name.startswith('hf:') and name not in zoo.ENTRIES:
      models.resolve(name)
  dino = vit_jax.list_models('*dino*', pretrained=True)
  assert 'hf:timm/vit_base_patch16_224.dino' in dino
  with pytest.raises(
    UserError, match=naming('vit_jax.load', 'vit_base_patch16_224.dino')
  ):
    vit_jax.create_model('vit_base_patch16_224', pretrained=True)
