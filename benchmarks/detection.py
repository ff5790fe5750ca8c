"""A training step of DETR beside transformers' PyTorch, and the matcher's share of it.

  .venv-peer/bin/python benchmarks/detection.py [--variant R50] [--batch 1]
    [--size 800 1066] [--objects 7] [--steps 1] [--rounds 3]

Needs scipy as well. Both sides take images of noise with some boxes each, compute the
paper's losses of all decoder layers, their gradients and an update by AdamW with clipped
gradients, in float32 with dropout. The stem and the first stage of the backbone are
trained on neither side. Ours matches on the device, with places for 100 boxes an image as
in `configs/detr_coco.py`; transformers asks SciPy on the host.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import turns

from vit_jax import cli, sharding
from vit_jax.data import pipeline
from vit_jax.detection.tasks import matching
from vit_jax.machine import cores
from vit_jax.train.trainer import Trainer

PLACES = 100  # for boxes of an image
LAYERS, QUERIES, CLASSES = 6, 100, 91
CONFIG = {
  'model': {
    'name': 'detr',
    'num_classes': CLASSES,
    'dropout': 0.1,
    'attention_dropout': 0.1,
  },
  'task': {'name': 'detect'},
  'tune': {'method': 'rules', 'train': [r'(?!backbone/(stem|stage1_)).*']},
  'optim': {'name': 'adamw', 'lr': 1e-4, 'wd': 1e-4, 'clip': 0.1},
  'steps': 10**6,
}


def batch_of(batch: int, size: tuple[int, int], objects: int, places: int) -> dict:
  """Returns images [B, H, W, 3] of noise with `objects` boxes each."""
  rng = np.random.default_rng(0)
  start = rng.uniform(0, 0.6, (batch, places, 2))
  corners = np.concatenate([start, start + rng.uniform(0.1, 0.4, start.shape)], -1)
  valid = np.broadcast_to(np.arange(places) < objects, (batch, places))
  return {
    'image': rng.integers(0, 256, (batch, *size, 3), np.uint8),
    'image_mask': np.ones((batch, *size), np.uint8),
    'boxes': (corners * valid[..., None]).astype(np.float32),
    'boxes_mask': valid.astype(np.float32),
    'label': (rng.integers(0, CLASSES, valid.shape) * valid).astype(np.int32),
    'mask': np.ones(batch, np.float32),
  }


def ours(variant: str, batch: dict):
  """Returns a function that runs some of our steps."""
  mesh = sharding.make_mesh(1, devices=jax.local_devices()[:1])
  spec = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
  config = {**CONFIG, 'model': {**CONFIG['model'], 'variant': variant}}
  with jax.set_mesh(mesh):
    trainer = Trainer(config, spec, mesh, pipeline.scale_on_device)
    step = trainer.lower().compile(sharding.compiler_options())
    state = trainer.init()
    batch = jax.device_put(batch, sharding.batch_sharding(mesh))

  def run(steps: int):
    nonlocal state
    for _ in range(steps):
      state, out = step(state, batch)
    jax.block_until_ready((state, out))

  return run


def theirs(variant: str, batch: int, size: tuple[int, int], objects: int):
  """Returns a function that runs some steps of `DetrForObjectDetection`."""
  import torch
  import transformers

  torch.manual_seed(0)
  torch.set_num_threads(cores())
  layers = {'R50': [3, 4, 6, 3], 'R101': [3, 4, 23, 3]}[variant]
  config = transformers.DetrConfig(
    use_timm_backbone=False,
    backbone=None,
    use_pretrained_backbone=False,
    backbone_config=transformers.ResNetConfig(depths=layers, out_features=['stage4']),
    num_labels=CLASSES,
    auxiliary_loss=True,
    dropout=0.1,
    attention_dropout=0.1,
  )
  model = transformers.DetrForObjectDetection(config).train()
  for name, p in model.named_parameters():
    if 'embedder' in name or 'stages.0.' in name:  # as the reference code
      p.requires_grad_(False)
  trained = [p for p in model.parameters() if p.requires_grad]
  adamw = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4, fused=True)
  images = torch.rand((batch, 3, *size)) * 2 - 1
  mask = torch.ones((batch, *size), dtype=torch.long)
  labels = [
    {
      'class_labels': torch.randint(0, CLASSES, (objects,)),
      'boxes': torch.rand((objects, 4)) * 0.3 + 0.3,
    }
    for _ in range(batch)
  ]

  def run(steps: int):
    for _ in range(steps):
      adamw.zero_grad(set_to_none=True)
      model(images, pixel_mask=mask, labels=labels).loss.backward()
      torch.nn.utils.clip_grad_norm_(trained, 0.1)
      adamw.step()

  return run


def match_seconds(batch: int, objects: int) -> float:
  """Returns the median seconds of matching all layers of a batch, of random costs."""
  rng = np.random.default_rng(0)
  cost = jnp.asarray(rng.normal(size=(batch, LAYERS, QUERIES, PLACES)), jnp.float32)
  valid = jnp.broadcast_to(jnp.arange(PLACES) < objects, (batch, LAYERS, PLACES))
  function = jax.jit(matching.match).lower(cost, valid).compile()
  times = []
  for _ in range(20):
    start = time.perf_counter()
    jax.block_until_ready(function(cost, valid))
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def main(argv: list[str]) -> int:
  parser = cli.Parser('detection.py', description=__doc__.split('\n')[0])
  parser.add_argument('--variant', default='R50', choices=['R50', 'R101'])
  parser.add_argument('--batch', type=cli.positive, default=1)
  parser.add_argument('--size', type=cli.positive, nargs=2, default=(800, 1066))
  parser.add_argument('--objects', type=cli.positive, default=7, help='of an image')
  parser.add_argument('--steps', type=cli.positive, default=1, help='of a turn')
  parser.add_argument('--rounds', type=cli.positive, default=3)
  args = parser.parse_args(argv)
  size = tuple(args.size)
  batch = batch_of(args.batch, size, args.objects, PLACES)
  mine = ours(args.variant, batch)
  other = theirs(args.variant, args.batch, size, args.objects)
  timing = turns.compare(
    turns.timed(lambda: mine(args.steps)),
    turns.timed(lambda: other(args.steps)),
    args.rounds,
  )
  match = match_seconds(args.batch, args.objects)
  step = timing['ours'] / args.steps
  print(
    f'a step of {args.variant}, {args.batch} x {size[0]} x {size[1]}: {step:.2f} s, '
    f'transformers {timing["theirs"] / args.steps:.2f} s, {turns.text(timing)}; matching '
    f'{1e3 * match:.2f} ms, {match / step:.2%} of our step'
  )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
