"""Writes the goldens of SAM, by timm 1.0.31 and transformers 5.24, beside this file.

.venv-peer/bin/python tests/golden/sam.py
"""

import json
from pathlib import Path

import numpy as np
import timm
import torch
import transformers
from safetensors.torch import save_file

OUT = Path(__file__).parent
TIMM = dict(patch_size=4, embed_dim=16, depth=3, num_heads=2, mlp_ratio=2.0)
TIMM |= dict(window_size=3, global_attn_indexes=(1,))
TIMM_MODELS = {
  'samvit_timm': ('samvit_base_patch16', dict(img_size=32, neck_chans=8), 0),
  'samvit_norm_timm': ('samvit_base_patch16_224', dict(img_size=24), 5),
}
VISION = dict(hidden_size=16, output_channels=8, num_hidden_layers=3, mlp_dim=32)
VISION |= dict(num_attention_heads=2, image_size=32, patch_size=4, window_size=3)
VISION |= dict(global_attn_indexes=[1], num_pos_feats=4)
PROMPTS = dict(hidden_size=8, image_size=32, patch_size=4)
PROMPTS |= dict(image_embedding_size=8, mask_input_channels=4)
DECODER = dict(hidden_size=8, mlp_dim=8, num_hidden_layers=1, num_attention_heads=2)
DECODER |= dict(iou_head_hidden_dim=8)


def randomise(model):
  torch.manual_seed(0)
  for parameter in model.parameters():
    parameter.add_(0.1 * torch.randn_like(parameter))
  return model.eval()


def draw(*size):
  return np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)


def nchw(x):
  return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


def nhwc(x):
  return x.numpy().transpose(0, 2, 3, 1)


def of_timm(model, images):
  x = nchw(images)
  _, maps = model.forward_intermediates(x)
  outputs = {f'block{i:02d}': nhwc(y) for i, y in enumerate(maps)}
  outputs |= {'stem': model.patch_embed(x).numpy()}
  outputs |= {'neck': nhwc(model.forward_features(x))}
  outputs['logits' if model.num_classes else 'pre_logits'] = model(x).numpy()
  return {'image': images, **outputs}


def write_timm(name, architecture, args, classes):
  args = TIMM | args
  model = randomise(timm.create_model(architecture, num_classes=classes, **args))
  side = args['img_size']
  np.savez_compressed(OUT / f'{name}.expected.npz', **of_timm(model, draw(side, side)))
  keys = ('fixed_input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std')
  usual = model.pretrained_cfg
  config = {
    'architecture': architecture,
    'num_classes': classes,
    'num_features': model.num_features,
    'global_pool': 'avg',
    'model_args': args,
    'pretrained_cfg': {key: usual[key] for key in keys if key in usual}
    | {'input_size': [3, side, side], 'num_classes': classes},
  }
  (OUT / name).mkdir(exist_ok=True)
  (OUT / name / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
  save_file(model.state_dict(), OUT / name / 'model.safetensors')
  return model


def write_transformers():
  config = transformers.SamConfig(
    vision_config=VISION, prompt_encoder_config=PROMPTS, mask_decoder_config=DECODER
  )
  model = randomise(transformers.SamModel(config))
  encoder, images, outputs = model.vision_encoder, draw(32, 32), {}
  for i, layer in enumerate(encoder.layers):
    layer.register_forward_hook(
      lambda module, args, y, i=i: outputs.update({f'block{i:02d}': y.numpy()})
    )
  neck = encoder(nchw(images)).last_hidden_state
  outputs |= {'neck': nhwc(neck), 'pre_logits': neck.mean((2, 3)).numpy()}
  outputs['stem'] = encoder.patch_embed(nchw(images)).numpy()
  np.savez_compressed(OUT / 'sam_hf.expected.npz', image=images, **outputs)
  model.save_pretrained(OUT / 'sam_hf')


if __name__ == '__main__':
  torch.set_grad_enabled(False)
  models = {name: write_timm(name, *row) for name, row in TIMM_MODELS.items()}
  other = of_timm(models['samvit_timm'], draw(20, 48))
  np.savez_compressed(OUT / 'samvit_timm_other_size.npz', **other)
  write_transformers()
