"""DINO: self-distillation without labels on ImageNet-1k (arXiv 2104.14294).

  vit_jax train --config=dino_i1k                            # S/16, 100 epochs
  vit_jax train --config=dino_i1k:epochs=800,temperature=0.07,free=True
  vit_jax train --config=dino_i1k:data=photos,knn=photos,batch=256,epochs=400
  vit_jax train --config=dino_i1k:data=digits,seed=0 --workdir=runs/dino    # bundled
  vit_jax train --config=dino_i1k:debug

A student sees 2 crops of 224 px (40 % or more of the area) and 8 of 96 px (5 to 40 %), and
predicts how its own average assigns the first two to 65,536 prototypes. AdamW, rate 5e-4 x
batch / 256, 10 epochs of warmup, cosine to 1e-6, weight decay from 0.04 to 0.4 but not of
biases and norms, each parameter clipped at norm 3, the prototypes' rate 0 in the first epoch,
momentum of the average from 0.996 to 1, stochastic depth up to 0.1. Each value is from
main_dino.py in the authors' repository, facebookresearch/dino.

Long runs of the paper have temperature=0.07, reached from 0.04 in 30 epochs (here with every
step, there with every epoch), and free=True, prototypes of any length. weights=SOURCE
continues, see dino_continue. knn=SOURCE, with splits `train` and `val` of labelled images,
measures the features of the average.

data=digits trains a small ViT on bundled digits, which are turned, moved and scaled at random, and
measures kNN on digits that are too: 51.9 % (an untrained encoder 31, pixels 69) in 5 minutes on a
CPU core. It has no local crops, a sharper teacher and KoLeo.

Hardware: as vit_i1k; an epoch has 3.8 times the products of one of supervised training.
Expected (S/16, kNN and linear probe): 69.3 and 74.0 % in 100 epochs, 74.5 and 77.0 in 800. Not
run here, because the data is not available.

Smallest slices: v5e:2x4 (S/16).
"""

import ml_collections

from vit_jax.config import parse_arg

# ImageNet's mean and standard deviation, as black and white.
LEVELS = '(-2.1179, -2.0357, -1.8044), (2.2489, 2.4286, 2.64)'
IMAGES = 1_281_167
DEBUG = dict(data='digits', train='train[:64]', batch=16, epochs=1.0)
# The size of the bundled model, and of its images.
SMALL = dict(width=96, depth=3, mlp_dim=192, num_heads=6, patch_size=(8, 8))
# Nuisances of angle, place and scale, in training and evaluation.
DIGITS = (
  "decode(3)|resize(32, method='bicubic', rounding='nearest')|"
  'random_affine(15, 0.2, (0.6, 1.2))'
)
# Without these, a small model assigns digits to all prototypes alike.
SMALL_TASK = dict(temperature=0.02, koleo=0.1)
# Arguments that DINO and DINOv2 share.
ARGUMENTS = dict(
  weights='',
  data='tfds:imagenet2012',
  train='train',
  knn='',
  res=0,
  local=0,
  crops=0,
  batch=0,
  epochs=0.0,
  lr=0.0,
  dtype='bfloat16',
  seed=0,
)


def get_config(arg=None):
  arg = parse_arg(
    arg, debug=DEBUG, **ARGUMENTS, variant='S/16', temperature=0.0, free=False
  )
  small = arg.data == 'digits'
  c = start(
    arg, batch=1024, epochs=100.0, area=40, blur='p=(1.0, 0.1, 0.5), pillow=True'
  )
  c.model.update(stochastic_depth=0.0 if small else 0.1)

  head = dict(outputs=512, hidden=256, bottleneck=64) if small else {}
  c.task = dict(name='dino', head=dict(head, lengths=arg.free))
  if small:
    c.task.update(SMALL_TASK, koleo_group=min(c.data.batch_size, 64))
  if arg.temperature:
    steps = round(30 * IMAGES / c.data.batch_size)
    c.task.update(temperature=arg.temperature, temperature_start=0.04)
    c.task.temperature_warmup = steps

  lr = arg.lr or (1e-3 if small else 5e-4 * c.data.batch_size / 256)
  # Queries, keys and values are one parameter in the authors' code.
  clip_by = r'(.*/)(?:query|key|value)(/\w+)|(.*)'
  ema = 0.99 if small else 0.996
  c.optim = optimizer(lr, c.epochs, ema=ema, clip_by=clip_by)
  return c


def start(arg, *, batch: int, epochs: float, area: int, blur: str):
  """Returns a config with model, data and evaluation.

  Args:
    batch, epochs: the recipe's values, for which arguments can be set.
    area: the area that separates local from global crops, in percent.
    blur: arguments of the op `gaussian_blur`.
  """
  small = arg.data == 'digits'
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.epochs = arg.epochs or (50.0 if small else epochs)
  c.model = dict(name='vit', act='gelu_erf')
  if arg.weights:
    c.model = dict(dtype=arg.dtype)
    c.weights = dict(source=arg.weights, skip=['head/.*'])
  elif small:
    c.model.update(SMALL)
  else:
    c.model.update(variant=arg.variant, dtype=arg.dtype)

  res, local = arg.res or (32 if small else 224), arg.local or (16 if small else 96)
  # A small part of a digit says little about it.
  number = arg.crops or (0 if small else 8)
  levels = 'value_range(-1, 1)' if small else f'value_range({LEVELS})'
  if arg.weights:
    # The range of the pixels for which the weights were trained.
    levels = 'value_range'
  ops = [DIGITS if small else 'decode', f'multi_crop({res}, {local}, {number}, {area})']
  if small:
    ops.append('color_jitter(0.4, 0.4, p=0.8)')
  else:
    ops += ['color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8)', 'grayscale(0.2)']
    ops += [f'gaussian_blur({blur})', 'solarize(p=(0.0, 0.2, 0.0))']
  ops.append(levels)
  c.data = dict(source=arg.data, split=arg.train, pp='|'.join(ops))
  c.data.batch_size = arg.batch or (64 if small else batch)

  # A share of the run.
  every = 0.25 if small else 0.05
  small_side = round(res * 256 / 224)
  how = "method='bicubic', antialias=True, rounding='nearest'"
  pp = f'decode|resize_small({small_side}, {how})|central_crop({res})|{levels}'
  if arg.weights:
    pp = f'decode|resize_as_weights({res}, {how})|{levels}'
  knn = dict(source=arg.knn or arg.data, train='train', test='val')
  if arg.knn == '' and arg.data == 'tfds:imagenet2012':
    knn.update(train='train[:10%]', test='validation')
  if small:
    knn.update(test='test')
    pp = f'{DIGITS}|{levels}'
  c.evals = {}
  if small or arg.knn or arg.data == 'tfds:imagenet2012':
    knn = dict(type='knn', datasets=dict(images=knn), pp=pp, use_ema=True)
    c.evals.knn = dict(knn, batch_size=c.data.batch_size, every=every)
  c.checkpoint = dict(every=every)
  c.log = dict(every=every / 10)
  return c


def optimizer(lr: float, epochs: float, warmup: float = 10, **options):
  """Returns the section `optim` of DINO and DINOv2, with further options.

  Args:
    warmup: number of epochs, up to a tenth of the run.
  """
  optim = dict(name='adamw', lr=lr, wd=0.04, wd_end=0.4, clip=3.0, ema_end=1.0)
  optim['wd_rules'] = [('.*(bias|scale|gamma)', 0.0), ('.*', 1.0)]
  optim['schedule'] = dict(decay='cosine', early_peak=True, end=min(1e-6 / lr, 1.0))
  optim['schedule']['warmup'] = min(warmup / epochs, 0.2)
  # The authors freeze the prototypes in the first epoch.
  optim['lr_starts'] = [('dino/.*/(prototypes|lengths)', min(1 / epochs, 0.05))]
  return optim | options
