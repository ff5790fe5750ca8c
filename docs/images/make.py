"""Makes the pictures of the documentation, all or those that are named.

  pip download --no-deps scikit-image && unzip -q scikit_image-*.whl -d ski
  python docs/images/dinov2.py dinov2         # see there: a trained ViT-S/14
  (docs/tutorials/finetune.md trains runs/lora, for `curves`)
  python docs/images/make.py [NAME...]

Photographs of scikit-image: astronaut (NASA, public domain), chelsea (Stéfan van der Walt,
CC0), coffee (Rachel Michetti, CC0), rocket (SpaceX, CC0). They are never committed; the
pictures are.
"""

import json
import pathlib
import subprocess
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import vit_jax
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import registry
from vit_jax.data.sources import order
from vit_jax.optim import schedules
from vit_jax.tasks import mixing

HERE = pathlib.Path(__file__).parent
PHOTOS = pathlib.Path('ski/skimage/data')
NAMES = ('chelsea.png', 'coffee.png', 'astronaut.png', 'rocket.jpg')
MODEL = 'dinov2'


def photo(number: int, pp: str = 'decode|resize_small(224)|central_crop(224)'):
  """Returns one photograph, uint8 [224, 224, 3]."""
  images = vit_jax.preprocess([PHOTOS / NAMES[number]], pp=f'{pp}|value_range(0, 1)')
  return np.asarray(images)[0]


def grid(name: str, rows, titles=None, size: float = 1.5) -> None:
  """Writes images, rows of [H, W, 3], with a title above each column or image."""
  figure, axes = plt.subplots(
    len(rows),
    len(rows[0]),
    figsize=(size * len(rows[0]), size * len(rows)),
    squeeze=False,
  )
  for i, row in enumerate(rows):
    for j, image in enumerate(row):
      axes[i, j].imshow(image, interpolation='nearest')
      axes[i, j].axis('off')
      if titles and i == 0:
        axes[i, j].set_title(titles[j], fontsize=8)
  save(figure, name)


def save(figure, name: str) -> None:
  figure.tight_layout(pad=0.4)
  path = HERE / f'{name}.png'
  figure.savefig(path, dpi=110, facecolor='white')
  plt.close(figure)
  image = Image.open(path).convert('RGB')
  image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
  print(path, path.stat().st_size // 1000, 'kB')


def patches():
  """A photograph, its 16 x 16 patches, and the sequence that the encoder reads."""
  image = photo(0)
  cut = np.ones((14, 18, 14, 18, 3))
  cut[:, 1:17, :, 1:17] = image.reshape(14, 16, 14, 16, 3)
  some = (
    image.reshape(14, 16, 14, 16, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 16, 16, 3)
  )
  line = np.ones((18, 14 * 18, 3))
  for i in range(14):
    line[1:17, 18 * i + 1 : 18 * i + 17] = some[14 * 5 + i]
  figure, axes = plt.subplots(1, 3, figsize=(9, 3), width_ratios=(1, 1.1, 1.6))
  titles = (
    '224 x 224 pixels',
    '196 patches of 16 x 16',
    '... one sequence (its sixth row)',
  )
  for ax, shown, title in zip(
    axes, (image, cut.reshape(252, 252, 3), line), titles, strict=True
  ):
    ax.imshow(shown)
    ax.axis('off')
    ax.set_title(title, fontsize=9)
  save(figure, 'patches')


def features():
  """The first three principal components of DINOv2's patch features, as colours."""
  loaded = vit_jax.load(MODEL, image_size=448)
  images = np.asarray(loaded.preprocess([PHOTOS / name for name in NAMES]))
  tokens = np.asarray(
    jax.jit(loaded.model.apply)(loaded.variables, images)[1]['encoded']
  )
  rows = [[], []]
  for image, token in zip(images, tokens[:, 1:], strict=True):
    _, _, axes = np.linalg.svd(token - token.mean(0), full_matrices=False)
    parts = token @ axes[:3].T
    low, high = np.percentile(parts, (2, 98), axis=0)
    parts = np.clip((parts - low) / (high - low), 0, 1).reshape(32, 32, 3)
    rows[0].append((image - image.min()) / (image.max() - image.min()))
    rows[1].append(parts)
  grid('features', rows, size=2)


def heads():
  """The class token's attention in the last block, head by head."""
  loaded = vit_jax.load(MODEL, image_size=448)
  paths = [PHOTOS / name for name in NAMES[:2]]
  images = np.asarray(loaded.preprocess(paths))
  rows = []
  for path, image in zip(paths, images, strict=True):
    row = [(image - image.min()) / (image.max() - image.min())]
    for head in range(6):
      (weights,) = vit_jax.attention_maps(
        loaded, [path], kind='attention', layer=11, head=head
      )
      low, high = np.percentile(weights, (2, 99))
      row.append(plt.cm.inferno(np.clip((weights - low) / (high - low), 0, 1)))
    rows.append(row)
  grid('heads', rows, ['input', *(f'head {i}' for i in range(6))])


def augmentations():
  """A photograph as the ops of training leave it."""
  ops = ('inception_crop(224)', 'flip_lr', 'randaug(2, 15)', 'random_erasing(1.0)')
  rows = [
    [photo(number), *(_augmented(number, op, number + 3) for op in ops)]
    for number in range(3)
  ]
  grid('augmentations', rows, ['as it is', *ops], size=1.7)


def crops():
  """A photograph, and the crops that DINO compares, in their colours."""
  pp = (
    'multi_crop(112, 56, 4, 32)|color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8)|grayscale(0.2)|'
    'gaussian_blur((1.0, 0.1, 0.5))|solarize((0, 0.2, 0))'
  )
  first, *colors = registry.parse(pp)
  rows = []
  for number in range(2):
    rng = np.random.default_rng(number + 4)
    image = (255 * photo(number)).astype(np.uint8)
    u = rng.random(first.draws, np.float32)
    batch = first({'image': tf.constant(image)}, tf.constant(u))
    batch = {name: np.asarray(x)[None] for name, x in batch.items()}
    for op in colors:
      batch = op.on_device(batch, rng.random((1, op.draws), np.float32))
    parts = [x for name in ('image', 'local') for x in np.asarray(batch[name])[0] / 255]
    rows.append([image / 255, *parts])
  names = ['first global', 'second global', *('local' for _ in range(4))]
  grid('crops', rows, ['as it is', *names], size=1.3)


def randaug():
  """RandAugment at the strengths of AugReg."""
  ops = [f'randaug({n}, {m})' for n, m in ((2, 5), (2, 10), (2, 15), (2, 20), (4, 20))]
  rows = [[_augmented(number, op, 7) for op in ops] for number in range(2)]
  grid('randaug', rows, ops, size=1.7)


def _augmented(number: int, pp: str, seed: int):
  (op,) = registry.parse(pp)
  image = photo(number)
  if 'erasing' not in pp:
    image = (255 * image).astype(np.uint8)
  draws = op.draws or getattr(op.apply, 'draws', 1)
  u = np.random.default_rng(seed).random(draws, np.float32)
  image = np.asarray(op({'image': tf.constant(image)}, tf.constant(u))['image'])
  return image / 255 if image.dtype == np.uint8 else np.clip(image, 0, 1)


def mixes():
  """Two photographs under mixup and CutMix."""
  images = np.stack([photo(0), photo(1)]).astype(np.float32)
  row = [images[0], images[1]]
  for kind in (mixing._mixup, mixing._cutmix):
    _, keep = kind(jax.random.key(2), 1.0, (1,), images)
    row.append(np.asarray(keep * images[:1] + (1 - keep) * images[1:])[0])
  grid('mixes', [row], ['first', 'second', 'mixup', 'cutmix'], size=1.8)


def rates():
  """Learning rates of the schedules."""
  figure, ax = plt.subplots(figsize=(6, 2.6))
  steps = np.arange(1000)
  for decay, more in (
    ('cosine', {}),
    ('linear', {}),
    ('rsqrt', dict(timescale=100)),
    ('constant', {}),
  ):
    made = schedules.make_schedule(1.0, 1000, decay=decay, warmup=100, **more)
    ax.plot(steps, [float(made(step)) for step in steps], label=decay)
  ax.set(xlabel='step', ylabel='rate / optim.lr')
  ax.legend(frameon=False, fontsize=8)
  save(figure, 'schedules')


def orders():
  """The order of 64 examples in four epochs, and the part of each that two hosts read."""
  figure, axes = plt.subplots(1, 4, figsize=(8, 2.3))
  indices = order.shuffle(64, seed=0).indices(np.arange(256)).reshape(4, 8, 8)
  for epoch, ax in enumerate(axes):
    ax.imshow(indices[epoch], cmap='viridis')
    ax.set_title(f'epoch {epoch}', fontsize=9)
    ax.set(xticks=[], yticks=[])
  axes[0].set_ylabel('batch', fontsize=8)
  save(figure, 'order')


def curves():
  """Loss and accuracy of the fine-tuning of docs/tutorials/finetune.md."""
  lines = pathlib.Path('runs/lora/metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  figure, axes = plt.subplots(1, 2, figsize=(7, 2.4))
  for ax, names in zip(axes, (('train/loss', 'val/loss'), ('val/top1',)), strict=True):
    for name in names:
      points = [(row['step'], row[name]) for row in rows if name in row]
      ax.plot(*zip(*points, strict=True), label=name)
    ax.set_xlabel('step')
    ax.legend(frameon=False, fontsize=8)
  save(figure, 'curves')


def figures():
  """Figures of the ViT paper by `vit_jax figures`: distances, positions, filters, rollout."""
  photos = [str(PHOTOS / name) for name in NAMES[:3]]
  for name, more in (
    ('rollout', [*photos, '--overlay', 'heat', '--resolution', '448']),
    ('distance', photos),
    ('posemb', ['--resolution', '224']),
    ('filters', []),
  ):
    command = [
      sys.executable,
      '-m',
      'vit_jax',
      'figures',
      name,
      MODEL,
      *more,
      '--out',
      'figs',
    ]
    subprocess.run(command, check=True)
    image = Image.open(f'figs/{name}.png').convert('RGB')
    image.thumbnail((900, 900))
    image.quantize(256).save(HERE / f'dinov2_{name}.png', optimize=True)


PICTURES = (
  patches,
  features,
  heads,
  augmentations,
  crops,
  randaug,
  mixes,
  rates,
  orders,
  curves,
  figures,
)

if __name__ == '__main__':
  for draw in PICTURES:
    if len(sys.argv) == 1 or draw.__name__ in sys.argv[1:]:
      draw()
