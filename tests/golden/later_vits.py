"""Writes relpos_timm, srelpos_timm, aimv2_native_hf and aimv2_lit_hf beside this file.

By timm 1.0.31 and transformers 5.24.

.venv-peer/bin/python tests/golden/later_vits.py
"""

from pathlib import Path

import numpy as np
import open_clip
import timm
import torch
from timm.models import save_for_hf
from transformers import Aimv2Config, Aimv2Model, Aimv2VisionConfig, Aimv2VisionModel

HERE = Path(__file__).parent
RELPOS = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
RELPOS |= dict(num_classes=10, rel_pos_dim=12)
RELPOS_MODELS = {
  'relpos_timm': 'vit_relpos_medium_patch16_cls_224',
  'srelpos_timm': 'vit_srelpos_small_patch16_224',
}
VISION = dict(hidden_size=32, intermediate_size=88, num_hidden_layers=2)
VISION |= dict(num_attention_heads=2, image_size=32, patch_size=8)
TEXT = dict(hidden_size=24, intermediate_size=56, num_hidden_layers=2)
TEXT |= dict(num_attention_heads=3, vocab_size=64, max_position_embeddings=12)
TEXT |= dict(eos_token_id=63)
HALF = (0.5,) * 3, (0.5,) * 3
CLIP = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD


def randomise(model):
  for name, x in model.named_parameters():
    if name != 'logit_scale':
      x.add_((0.5 if 'rel_pos' in name else 0.1) * torch.randn_like(x))
  return model.eval()


def draw(size, levels, number=2):
  """Returns standardised images [B, H, W, C]."""
  mean, std = np.float32(levels)
  x = np.random.default_rng(0).uniform(0, 1, (number, *size, 3))
  return (x.astype(np.float32) - mean) / std


def nchw(x):
  return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


def save(name, **arrays):
  arrays = {k: x.numpy() if torch.is_tensor(x) else x for k, x in arrays.items()}
  np.savez_compressed(HERE / f'{name}.expected.npz', **arrays)


def save_relpos(name, model, size):
  image, (first, last) = draw(size, HALF), model.blocks
  out = {}
  first.register_forward_pre_hook(lambda module, x: out.update(embed=x[0]))
  first.register_forward_hook(lambda module, x, y: out.update(block_1=y))
  last.register_forward_hook(lambda module, x, y: out.update(block_2=y))
  tokens = model.forward_features(nchw(image))
  out['pre_logits'] = model.forward_head(tokens, pre_logits=True)
  save(name, image=image, tokens=tokens, logits=model.forward_head(tokens), **out)


def write_relpos():
  torch.manual_seed(57)
  for name, architecture in RELPOS_MODELS.items():
    folder = HERE / name
    model = randomise(timm.create_model(architecture, **RELPOS))
    save_for_hf(model, folder, safe_serialization=True)
    for file in folder.iterdir():
      if file.name not in ('config.json', 'model.safetensors'):
        file.unlink()
    for end, size in (('', (32, 32)), ('.48x24', (48, 24))):
      options = dict(pretrained=True, img_size=size)
      model = timm.create_model(f'local-dir:{folder}', **options).eval()
      save_relpos(f'{name}{end}', model, size)


def write_native():
  config = Aimv2VisionConfig(**VISION, is_native=True, use_head=True)
  name, model = 'aimv2_native_hf', randomise(Aimv2VisionModel(config))
  model.save_pretrained(HERE / name)
  model = Aimv2VisionModel.from_pretrained(HERE / name).eval()
  for end, size in (('', (32, 32)), ('.48x24', (48, 24))):
    image = draw(size, CLIP)
    save(f'{name}{end}', image=image, **model(nchw(image)))


def write_lit():
  towers = dict(text_config=TEXT, vision_config=VISION)
  config = Aimv2Config(**towers, projection_dim=20, max_logit_scale=20.0)
  name, model = 'aimv2_lit_hf', randomise(Aimv2Model(config))
  model.logit_scale.fill_(5.0)
  model.save_pretrained(HERE / name)
  model = Aimv2Model.from_pretrained(HERE / name).eval()
  rng, ids = np.random.default_rng(1), np.full((4, 12), 63)
  for row, length in zip(ids, (9, 8, 5, 11), strict=True):
    row[:length] = [62, *rng.integers(1, 60, length - 1)]
  # The mask ends with the first end token.
  mask = np.cumsum(ids == 63, axis=1) - (ids == 63) == 0
  image = draw((32, 32), CLIP, 3)
  y = model(
    input_ids=torch.from_numpy(ids),
    pixel_values=nchw(image),
    attention_mask=torch.from_numpy(mask.astype(np.int64)),
  )
  save(
    name,
    input_ids=ids,
    image=image,
    logits_per_image=y.logits_per_image,
    image_embeds=y.image_embeds,
    text_embeds=y.text_embeds,
    image_tokens=y.vision_model_output.last_hidden_state,
    image_pooled=y.vision_model_output.pooler_output,
    text_pooled=y.text_model_output.pooler_output,
  )


if __name__ == '__main__':
  torch.set_grad_enabled(False)
  write_relpos()
  torch.manual_seed(57)
  write_native()
  write_lit()
