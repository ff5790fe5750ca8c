"""Fine-tunes any weights on any data set, by the protocol of the paper (Table 4, B.1.1).

  vit_jax train --config=finetune:weights=SOURCE,data=FOLDER
  vit_jax train --config=finetune:weights=b16-i21k,data=cifar10
  vit_jax train --config=finetune:debug     # from scratch, on digits

SOURCE is a file, a hub folder, the folder of a run or a name of the zoo, and names the model.
`data` is imagenet, cifar10, cifar100, pets, flowers (prepared by TFDS), digits, a folder with
one sub-folder per class, or labels:FILE.csv, a table of images that may have several labels.

SGD with momentum 0.9, batch 512, no weight decay, cosine, gradients clipped at norm 1, 384
px, a new head of zeros, no pre_logits. A local file or run for images of fewer than 96 px
keeps its size. Steps are the paper's. Rates are from the middle of its grids, {.003, .01,
.03, .06} for imagenet and {.001, .003, .01, .03} for the others. Choose the rate by the val
split, then train with final=True on all of the training data and read the test accuracy.
keep_head=True keeps the head, for the same classes at another resolution. channels=3 is for
digits with weights of colour images, and channels=1 for photographs with weights of gray
ones. The weights determine the mean and deviation of pixels, the interpolation and the
central crop. If they do not, preprocessing is as in the paper: [-1, 1] and a resize. With
fewer steps the warmup is shortened in proportion, unless warmup=N sets it. RUN@best is the
step with the best accuracy on val; a run with final=True has none.

loss=focal trains with another loss. For labels:FILE.csv it is sigmoid, and the best step
the one with the best mean average precision; loss=asymmetric is for many classes. Where
classes have few images, class_weights=balanced weighs them more in the loss, and
sampling=balanced shows them more often. augment=OPS adds ops to the preprocessing of
training, such as three_augment or randaug.

With --config.tune.method=linear, a head alone, the rate is 0.1. epochs=N sets the length in
passes over the images; a tenth is then warmup.

teacher=SOURCE learns from a classifier of the same classes instead of labels, as "A good teacher
is patient and consistent" (arXiv 2106.05237): both see the same crop of the same mixed images.
It takes long: set steps or epochs.

A folder trains 500 steps of 64 images. If it holds only the classes, add
train=train[:90%],val=train[90%:]. Digits, which the paper does not have, train 1,000 steps of
64 images at rate 0.03 and 32 px, with labels smoothed by 0.1 as in configs/digits.py. res=N
sets another size.

Hardware: the batch is cut into parts of 64 to fit one device (accum). Expect for b16-i21k
98.95 % on cifar10, 91.67 cifar100, 94.43 pets, 99.38 flowers, 83.97 imagenet (the paper's
Table 5; not run here, because neither weights nor data are available). Runs of
configs/digits.py with seeds 0, 1 and 2, which have 99.17, 98.89 and 99.44 % at 16 px, reach
99.17, 99.44 and 99.44 % with data=digits,final=True,keep_head=True in 3 minutes on 2 CPU
cores.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import contextlib
from pathlib import Path

import ml_collections

from vit_jax import weights
from vit_jax.config import ByMethod, parse_arg
from vit_jax.errors import UserError

# Sources of boxes.
BOXES = ('coco', 'yolo', 'voc')

# {data: (source, per cent of train to hold out as val, test, batch, steps, warmup, rate)}.
DATASETS = {
  'imagenet': ('tfds:imagenet2012', 1, 'validation', 512, 20_000, 500, 0.03),
  'cifar10': ('tfds:cifar10', 2, 'test', 512, 10_000, 500, 0.01),
  'cifar100': ('tfds:cifar100', 2, 'test', 512, 10_000, 500, 0.01),
  'pets': ('tfds:oxford_iiit_pet', 10, 'test', 512, 500, 100, 0.003),
  # The validation split, which is as large as train, is not used, as in big_vision.
  'flowers': ('tfds:oxford_flowers102', 10, 'test', 512, 500, 100, 0.003),
  'digits': ('digits', 10, 'test', 64, 1000, 50, 0.03),
}
FOLDER = ('train', 'val', 'train+val', 'test', 64, 500, 50, 0.003)
# Rate of a head alone, whose weights have to grow from 0.
LINEAR = 0.1

# Weights for images below this size keep it.
SMALL = 96

DEBUG = dict(
  weights='',
  data='digits',
  res=16,
  batch=32,
  accum=2,
  steps=8,
  warmup=2,
  variant='mu/4',
)


def usual_size(source: str) -> int:
  """Returns the paper's 384 pixels, or the size of weights that are for small images."""
  if source and Path(source.partition('@')[0]).exists():
    with contextlib.suppress(UserError):  # The run reports it.
      size = weights.read_header(source).image_size or (384,)
      return max(size) if max(size) < SMALL else 384
  return 384


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    weights='b16-i21k',
    # Whose predictions to learn instead of labels.
    teacher='',
    data='cifar10',
    train='',
    val='',
    final=False,
    variant='',
    res=0,
    channels=0,
    batch=0,
    accum=0,
    steps=0,
    epochs=0.0,
    warmup=-1,
    lr=0.0,
    keep_head=False,
    loss='',
    class_weights='',
    sampling='',
    augment='',
    resize='origin',
    dtype='float32',
    seed=0,
  )
  if arg.data.partition(':')[0] in BOXES:
    raise UserError(
      f'data={arg.data} has boxes; finetune trains classes of images: '
      f'--config=detect:data={arg.data}.'
    )
  if arg.data in DATASETS:
    source, held_out, test, *numbers = DATASETS[arg.data]
    end, train_all = f'{100 - held_out}%', 'train'
    train, val = f'train[:{end}]', f'train[{end}:]'
  else:
    source, train, val, train_all, test, *numbers = (arg.data, *FOLDER)
  batch, steps, warmup, lr = numbers
  if arg.final:
    train, val = train_all, test
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  warmup = min(warmup, warmup * (arg.steps or steps) // steps)
  if arg.epochs:
    c.epochs, warmup = arg.epochs, 0.1
  else:
    c.steps = arg.steps or steps

  c.model = dict(representation_size=None, dtype=arg.dtype)
  skip = ['pre_logits/.*'] if arg.keep_head else ['pre_logits/.*', 'head/.*']
  c.weights = dict(source=arg.weights, skip=skip, resize=arg.resize)
  if arg.weights and arg.variant:
    c.weights.variant = arg.variant
  # `:debug` has no weights.
  if not arg.weights:
    c.model.update(name='vit', variant=arg.variant)
    c.weights = dict()

  batch = arg.batch or batch
  # Digits are gray, and a mirrored 2 is not a 2.
  digits = arg.data == 'digits'
  decode = f'decode({arg.channels or (1 if digits else 3)})'
  # The reference code does not round. Rounding to the nearest level is as good and needs a
  # quarter of the bytes. Truncation, the default, would darken the images.
  how = "method='bicubic', rounding='nearest'" if digits else "rounding='nearest'"
  res = arg.res or (32 if digits else usual_size(arg.weights))
  resize = f'resize({res}, {how})'
  augment = f"inception_crop({res}, rounding='nearest')|flip_lr"
  # Digits are augmented as in configs/digits.py.
  if digits:
    augment = f'{resize}|random_affine(8, 0.05, (0.95, 1.05))'
  else:
    resize = f'resize_as_weights({res}, {how})'
  c.data = dict(source=source, split=arg.train or train, batch_size=batch)
  if arg.augment:
    augment = f'{augment}|{arg.augment}'
  c.data.pp = f'{decode}|{augment}|value_range'
  if arg.sampling:
    c.data.sampling = arg.sampling

  several = arg.data.startswith('labels:')
  c.task = dict(name='classify', loss=arg.loss or ('sigmoid' if several else 'softmax'))
  if arg.class_weights:
    c.task.class_weights = arg.class_weights
  if arg.teacher:
    c.task.update(name='distill', teacher=arg.teacher, mixup=1.0)
  elif digits:
    c.task.label_smoothing = 0.1
  c.optim = dict(
    name='sgd',
    lr=arg.lr or ByMethod(lr, linear=LINEAR),
    momentum=0.9,
    clip=1.0,
    accum=arg.accum or max(batch // 64, 1),
  )
  c.optim.moment_dtype = 'bfloat16'
  warmup = warmup if arg.warmup < 0 else arg.warmup
  c.optim.schedule = dict(decay='cosine', warmup=warmup)

  held_out = dict(source=source, split=arg.val or val, batch_size=batch)
  held_out['pp'] = f'{decode}|{resize}|value_range'
  # A fraction of the run.
  every = 0.1 if arg.epochs else max(c.steps // 10, 1)
  c.evals = dict(val=dict(type='classification', data=held_out, every=every))
  if several:
    c.evals.val.update(confusion=True, ranking=True)
  best = 'val/mean_ap' if several else 'val/top1'
  # With `final` the evaluation is on the test split, which must not choose a checkpoint.
  c.checkpoint = dict(every=every, best=None if arg.final else best)
  c.log = dict(every=every / 4 if arg.epochs else max(every // 4, 1))
  return c
