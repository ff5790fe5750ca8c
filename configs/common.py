"""Shared by several recipes: default arguments, preprocessing and evaluations.

This is not a recipe, and has no `get_config`. A config file may import the files beside it.
"""

import ml_collections

# Arguments of `:debug`: a few steps on the bundled digits, on any machine.
DEBUG = dict(
  variant='mu/8',
  res=16,
  batch=32,
  epochs=1.0,
  warmup=2,
  data='digits',
  train='train[:320]',
  val='test',
  classes=10,
  eval_every=5,
)
DEBUG_I1K = DEBUG | dict(minival='train[320:400]')

# Default arguments on ImageNet-1k; minival is held out from train.
IMAGENET = dict(
  res=224,
  data='tfds:imagenet2012',
  train='train[:99%]',
  minival='train[99%:]',
  val='validation',
  classes=1_000,
  eval_every=5_000,
  dtype='bfloat16',
)
# Default arguments on ImageNet-21k, split as in big_vision.
IMAGENET21K = dict(
  res=224,
  data='tfds:imagenet21k',
  train='full[51200:]',
  val='full[25600:51200]',
  # A data set for a few-shot evaluation.
  fewshot='',
  classes=21_843,
  eval_every=5_000,
  dtype='bfloat16',
)


# Default arguments of AugReg, on both data sets; see `augreg_i1k`.
AUGREG = dict(
  variant='B/16',
  aug='',
  names='config',
  dropout=0.0,
  sd=0.0,
  wd=0.1,
  batch=4096,
  epochs=300.0,
  warmup=10_000,
)
# The mixing of ConvNeXt, Swin and MViT, as in timm's recipes.
MIXING = dict(loss='softmax', label_smoothing=0.1, mixup=0.8, cutmix=1.0)


def classifier(arg, name: str, pp: str, **task) -> ml_collections.ConfigDict:
  """Returns a config with duration, model, data and task, but without the optimizer."""
  c = ml_collections.ConfigDict()
  duration = 'steps' if hasattr(arg, 'steps') else 'epochs'
  c[duration] = getattr(arg, duration)
  c.model = dict(name=name, variant=arg.variant, num_classes=arg.classes)
  c.model.dtype = arg.dtype
  c.data = dict(source=arg.data, split=arg.train, batch_size=arg.batch, pp=pp)
  c.task = dict(name='classify', **task)
  return c


def inception(res: int, augment: str = '') -> str:
  """Returns the ops for training images: a random crop, a flip, and `augment`."""
  augment = f'|{augment}' if augment else ''
  return f'decode|inception_crop({res})|flip_lr{augment}|value_range'


def erasing(res: int, layers: int) -> str:
  """Returns the ops for training images of ConvNeXt, Swin and MViT, as in timm's recipes."""
  augment = (
    f'inception_crop({res}, 8, 100)|flip_lr|randaug_increasing({layers}, 9, 0.5)'
  )
  return f'decode|{augment}|value_range|random_erasing(0.25)'


def central(res: int) -> str:
  """Returns the ops for evaluation images: the central 224 of 256 pixels, scaled to `res`."""
  small = round(res * 256 / 224)
  return f'decode|resize_small({small})|central_crop({res})|value_range'


def squashed(res: int) -> str:
  """Returns the ops for few-shot images, which squeeze the whole image to a square.

  From big_vision's configs/common_fewshot.py.
  """
  small = round(res * 256 / 224)
  return f'decode|resize({small})|central_crop({res})|value_range'


def accuracy(arg, split: str, **options) -> dict:
  """Returns an evaluation of the accuracy on central crops of a split."""
  data = dict(source=arg.data, split=split, batch_size=arg.batch, pp=central(arg.res))
  return dict(type='classification', data=data, every=arg.eval_every, **options)


def fewshot(source: str, pp: str, batch: int, every: int) -> dict:
  """Returns a few-shot evaluation on the splits train and test of a data set."""
  datasets = dict(fewshot=dict(source=source, train='train', test='test'))
  return dict(type='fewshot', datasets=datasets, pp=pp, batch_size=batch, every=every)


def evaluate_i1k(c, arg) -> None:
  """Adds the evaluations, checkpoints and log of a run on ImageNet-1k.

  The best step is chosen on images held out from training, not on the reported images.
  """
  c.evals = dict(minival=accuracy(arg, arg.minival), val=accuracy(arg, arg.val))
  c.checkpoint = dict(every=arg.eval_every, best='minival/top1')
  c.log = dict(every=min(100, arg.eval_every))


def evaluate_pretraining(c, arg) -> None:
  """Adds the evaluations, checkpoints and log of a pre-training run."""
  c.evals = dict(val=accuracy(arg, arg.val))
  if arg.fewshot:
    pp = squashed(arg.res)
    c.evals.fewshot = fewshot(arg.fewshot, pp, arg.batch, arg.eval_every)
  c.checkpoint = dict(every=arg.eval_every, keep_every=10 * arg.eval_every)
  c.checkpoint.best = 'val/top1'
  c.log = dict(every=min(100, arg.eval_every))
