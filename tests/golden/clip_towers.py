"""Makes clip_resnet_open_clip, clip_resnet_timm and clip_convnext_open_clip.

By open_clip 3.3 and timm 1.0.31.

python tests/golden/clip_towers.py
"""

import json
import re
from pathlib import Path

import numpy as np
import open_clip
import timm
import torch
from safetensors.torch import save_file
from timm.models import byobnet

HERE = Path(__file__).parent
TEXT = dict(context_length=12, vocab_size=60, width=64, heads=1, layers=1)
# Small models under the names of large ones.
TRUNK = dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))
TOWERS = {
  'resnet': dict(image_size=64, layers=[1, 2, 1, 1], width=4),
  'convnext': dict(
    image_size=64, timm_model_name='convnext_xxlarge', timm_pool='', timm_proj='mlp'
  ),
}


def randomise(model):
  """Makes every parameter and statistic random, and exact in float16."""
  for name, x in model.state_dict().items():
    if name.endswith('logit_scale'):
      x.fill_(2.5)
    elif name.endswith('running_var'):
      x.uniform_(0.5, 1.5)
    elif x.dtype == torch.float32:
      scale = (
        0.02 if name.endswith('embedding.weight') else max(x[0].numel(), 1) ** -0.5
      )
      is_norm = x.ndim == 1 and name.endswith(('weight', 'gamma'))
      x.copy_(torch.randn_like(x) * (0.2 if x.ndim == 1 else scale) + is_norm)
    x.copy_(x.half())
  return model.eval()


def as_timm(name):
  """Returns timm's name of an array of OpenAI's ResNet."""
  parts = {'1': 'conv1_1x1', '2': 'conv2_kxk', '3': 'conv3_1x1'}
  kinds = {'conv': 'conv', 'bn': 'bn', '0': 'conv', '1': 'bn'}
  stage = lambda m: f'stages.{int(m[1]) - 1}.{m[2]}'
  block = lambda m: f'{stage(m)}.{parts[m[4]]}.{kinds[m[3]]}'
  name = re.sub(r'^layer(\d)\.(\d)\.(conv|bn)(\d)', block, name)
  shortcut = lambda m: f'{stage(m)}.shortcut.conv.{kinds[m[3]]}'
  name = re.sub(r'^layer(\d)\.(\d)\.downsample\.(\d)', shortcut, name)
  name = re.sub(r'^(conv|bn)(\d)', r'stem.conv\2.\1', name)
  name = re.sub(r'^attnpool\.(.)_proj', r'head.\1', name).replace('head.c', 'head.proj')
  return name.replace('attnpool.positional_embedding', 'head.pos_embed')


def timm_resnet(visual):
  """Returns timm's ResNet of CLIP with the weights of open_clip's."""
  cfg = byobnet.model_cfgs['resnet50_clip']
  tower = TOWERS['resnet']
  blocks = tuple(
    byobnet.replace(block, d=depth, c=4 * tower['width'] * 2**s)
    for s, (block, depth) in enumerate(zip(cfg.blocks, tower['layers'], strict=True))
  )
  cfg = byobnet.replace(cfg, blocks=blocks, stem_chs=(2, 2, 4))
  divisible = byobnet.make_divisible
  byobnet.make_divisible = int  # timm rounds the channels of small models
  model = byobnet.ByobNet(cfg, num_classes=24, img_size=64)
  byobnet.make_divisible = divisible
  arrays = {as_timm(name): x for name, x in visual.state_dict().items()}
  model.load_state_dict(arrays, strict=True)
  return model.eval()


def random_images(number, height, width):
  """Returns images of squares of 8 x 8 px, exact in float16."""
  x = torch.randn(number, 3, height // 8, width // 8).half().float()
  return x.repeat_interleave(8, 2).repeat_interleave(8, 3)


def main():
  create = timm.create_model
  timm.create_model = lambda name, **options: create(name, **options | TRUNK)
  preprocess = dict(
    mean=open_clip.OPENAI_DATASET_MEAN, std=open_clip.OPENAI_DATASET_STD
  )
  preprocess |= dict(interpolation='bicubic', resize_mode='shortest')
  for name, vision in TOWERS.items():
    torch.manual_seed(0)
    model = dict(embed_dim=24, vision_cfg=vision, text_cfg=TEXT, quick_gelu=True)
    clip = randomise(open_clip.CLIP(**model))
    images = random_images(2, 64, 64)
    ids = torch.tensor([[58, 4, 9, 59] + [0] * 8, [58, 7, 59] + [0] * 9])
    with torch.no_grad():
      x, y = clip.encode_image(images), clip.encode_text(ids)
      unit = lambda x: x / x.norm(dim=-1, keepdim=True)
      logits = clip.logit_scale.exp() * unit(x) @ unit(y).T
      arrays = dict(image_features=x, text_features=y, logits_per_image=logits)
      arrays |= dict(image=images.half().permute(0, 2, 3, 1), input_ids=ids)
      save(f'clip_{name}_open_clip', arrays)
      if name == 'resnet':
        tower = timm_resnet(clip.visual)
        assert (tower(images) - x).abs().max() < 1e-5
        wide = random_images(1, 64, 96)
        features = tower(wide)
        arrays = dict(image=wide.half().permute(0, 2, 3, 1), image_features=features)
        save('clip_resnet_timm.64x96', arrays)
        config = dict(architecture='resnet50_clip', num_classes=24, global_pool='token')
        config['pretrained_cfg'] = dict(input_size=[3, 64, 64])
        write('clip_resnet_timm/config.json', config, tower)
    config = dict(model_cfg=model, preprocess_cfg=preprocess)
    write(f'clip_{name}_open_clip/open_clip_config.json', config, clip)


def write(name, config, model):
  """Writes a config, and the arrays of a model beside it."""
  path = HERE / name
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(config, indent=1))
  half = lambda x: x.half() if x.dtype == torch.float32 else x
  arrays = {name: half(x).contiguous() for name, x in model.state_dict().items()}
  save_file(arrays, path.parent / 'model.safetensors')


def save(name, arrays):
  arrays = {key: np.ascontiguousarray(x.numpy()) for key, x in arrays.items()}
  np.savez_compressed(HERE / f'{name}.expected.npz', **arrays)


if __name__ == '__main__':
  main()
