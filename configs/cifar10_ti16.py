"""ViT-Ti/16 fine-tuned on CIFAR-10 as in a widespread timm and PyTorch Lightning example.

  vit_jax train --config=cifar10_ti16:weights=FILE   # a GPU: minutes
  vit_jax train --config=cifar10_ti16:debug

The model is timm's vit_tiny_patch16_224. By default it starts from Google's published
weights; weights=model.safetensors starts from timm's, and weights= from scratch. Images are
resized to 224, with mean and std 0.5. Adam at 1e-3, batch 128, ten epochs, a cosine schedule
that changes once per epoch, and the checkpoint with the best validation loss. From the eighth
epoch on, the rate stays constant and the weights are averaged. Expected: 95 to 97 %. The rate
is high for pre-trained weights; configs/finetune.py does better. Not run here, because
neither weights nor data are available.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(
  variant='mu/8', weights='', res=16, batch=32, data='digits', train='train[:320]'
)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    variant='Ti/16',
    weights='ti16-augreg-i1k-224',
    res=224,
    batch=128,
    epochs=10,
    data='tfds:cifar10',
    train='train',
    val='test',
    seed=42,
    dtype='float32',
  )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.epochs = arg.epochs
  # A period below 1 is a fraction of the run.
  epoch = 1 / arg.epochs

  c.model = dict(dtype=arg.dtype)
  if arg.weights:
    c.weights = dict(source=arg.weights, skip=['head/.*'])
  else:
    c.model.update(name='vit', variant=arg.variant)

  # As Pillow, which antialiases and rounds.
  resize = f"resize({arg.res}, antialias=True, rounding='nearest')"
  pp = f'decode|{resize}|value_range'
  c.data = dict(source=arg.data, split=arg.train, batch_size=arg.batch, pp=pp)
  c.task = dict(name='classify', loss='softmax')
  c.optim = dict(name='adam', lr=1e-3)
  c.optim.swa = dict(start=0.8, every=epoch)
  c.optim.schedule = dict(decay='cosine', staircase=arg.epochs, decay_until=0.8)

  val = dict(source=arg.data, split=arg.val, batch_size=arg.batch, pp=pp)
  c.evals = dict(
    val=dict(type='classification', data=val, every=epoch),
    val_swa=dict(type='classification', data=val, use_ema=True),
  )
  c.checkpoint = dict(every=epoch, best='val/loss')
  c.log = dict(every=epoch / 4)
  return c
