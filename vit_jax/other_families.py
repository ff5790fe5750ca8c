"""Model families that this library does not have, by the names that others publish.

A vision transformer of another family often has a ViT's parameters and computes something
else with them. Names are those of timm's architectures and of transformers' `model_type`.
"""

import re

# (regex of the whole name without timm's tag, family, how it differs from models here)
_FAMILIES = (
  (r'deit_.*distilled.*', 'distilled DeiT', 'a distillation token and a second head'),
  (r'deit3_.*', 'DeiT III', 'LayerScale in every block'),
  (r'beit3_.*', 'BEiT-3', 'norms inside attention and MLP'),
  (r'beit(v2)?(_.*)?', 'BEiT', 'relative positions and LayerScale'),
  (r'data2vec-vision', 'data2vec', 'relative positions and LayerScale'),
  (r'eva02_.*', 'EVA-02', 'rotary positions and gated MLPs'),
  (r'eva_.*', 'EVA', 'another pooling, and attention without a bias of the keys'),
  (r'vit_.*_dinov3.*|dinov3_vit', 'DINOv3', 'rotary positions, LayerScale, registers'),
  (r'vit_.*_reg\d_dinov2|dinov2_with_registers', 'DINOv2', 'LayerScale and registers'),
  (r'vit_.*_dinov2|dinov2', 'DINOv2', 'LayerScale in every block'),
  (r'vit_.*_tipsv2', 'TIPS', 'LayerScale and registers'),
  (r'vit_.*_rope_.*', 'RoPE-ViT', 'rotary positions'),
  (r'vit_.*s?relpos_.*', 'ViT with relative positions', 'a bias of relative positions'),
  (r'vit_.*_quickgelu_.*', 'CLIP', 'a norm before the blocks, and QuickGELU'),
  (r'vit_.*_clip_.*|clip(_vision_model)?', 'CLIP', 'a norm before the blocks'),
  (r'vit_.*_rpn_.*', 'ViT with norms after the layers', 'norms at other places'),
  (r'vit_.*_reg\d_.*', 'ViT with registers', 'registers, and mostly LayerScale'),
  (
    r'vit_(medium|betwixt)_patch\d+_gap_.*',
    'timm ViT-M',
    'LayerScale, no bias of q, k, v',
  ),
  (r'vit_.*_miil', 'ViT of MIIL', 'attention without a bias of q, k, v'),
  (
    r'vit_.*_plus_.*|vit_.*x\d_\d+',
    'timm ViT variant',
    'LayerScale or parallel layers',
  ),
  (
    r'vit_.*resnet\d+d_.*|vit_base_mci.*|vit-hybrid',
    'hybrid ViT',
    'another stem than BiT',
  ),
  (r'vit_pe_.*', 'Perception Encoder', 'rotary positions'),
  (r'vit_.*_radio_.*', 'RADIO', 'several class tokens'),
  (r'vit_intern.*', 'InternViT', 'LayerScale in every block'),
  (r'aimv2_.*|aimv2', 'AIMv2', 'RMSNorm and gated MLPs'),
  (r'ijepa', "transformers' I-JEPA", "names that are not read (timm's are)"),
  (
    r'samvit_.*|sam',
    'SAM image encoder',
    'windows of attention and relative positions',
  ),
  (r'vitamin_.*', 'ViTamin', 'convolutional stages before the blocks'),
  (r'naflexvit_.*', 'NaFlexViT', 'images of any aspect ratio in one batch'),
  (r'swinv2_cr_.*', 'Swin V2 (CR)', 'attention in shifted windows'),
  (r'swin_s3_.*', 'AutoFormerV2', 'depths and windows found by search'),
  (r'cait_.*', 'CaiT', 'LayerScale, talking heads and class-attention layers'),
  (r'convnextv2(_.*)?', 'ConvNeXt V2', 'global response normalization'),
  (r'maxvit_.*|maxxvit.*', 'MaxViT', 'convolutions between grid and block attention'),
  (r'coatnet_.*|coat_.*', 'CoAtNet or CoaT', 'convolutional stages'),
  (r'xcit_.*', 'XCiT', 'attention between channels'),
  (r'levit.*', 'LeViT', 'convolutional attention in stages'),
  (r'pvt.*', 'PVT', 'attention over pooled keys, in stages'),
  (
    r'(pit|tnt|crossvit|volo|visformer|twins|nest)_.*',
    'ViT variant',
    'other blocks or several stages',
  ),
  (r'mobilevit.*|efficientformer.*', 'mobile hybrid', 'convolutional stages'),
  (r'(g|res)mlp_.*', 'gMLP or ResMLP', 'other mixing layers than MLP-Mixer'),
  (r'resnet-?(18|34)', 'ResNet', 'blocks of two 3x3 convolutions'),
  (r'resnetv2_.*(?<!_bit)', 'ResNet V2', 'norms before the convolutions'),
  (
    r'resnet(\d+\D|aa|blur|rs).*|resnext.*|wide_resnet.*|regnet.*',
    'ResNet variant',
    'another stem, width, norm or grouping of channels',
  ),
  (
    r'(tf_)?(efficient|mobile|dense|ghost|mnas|inception|vgg|nf|xcep).*',
    'convolutional network',
    'other layers than the models here',
  ),
  (r'deit', "transformers' DeiT", "names that are not read (timm's deit_* are)"),
  (r'vit_mae', "transformers' ViT MAE", "a decoder (timm's vit_*.mae are read)"),
  (r'vit_msn', "transformers' ViT MSN", 'names that are not read'),
  (
    r'siglip2?(_vision_model)?',
    "transformers' SigLIP",
    "names that are not read (timm's are)",
  ),
)


def describe(name: str) -> str | None:
  """Returns the family of a name and how it differs, or None for a name not listed.

  For 'deit3_base_patch16_224': 'DeiT III: LayerScale in every block'.

  Args:
    name: an architecture of timm, with or without its tag, or a `model_type`.
  """
  plain = str(name).split('.')[0]
  for regex, family, has in _FAMILIES:
    if re.fullmatch(regex, plain):
      return f'{family}: {has}'
  return None
