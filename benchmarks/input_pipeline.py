"""JPEGs in, batches out: images/s of our input pipeline beside torchvision's DataLoader.

  .venv-peer/bin/python benchmarks/input_pipeline.py [--images 400] [--batch 64]
    [--batches 96] [--rounds 5] [--folder DIR]

Both sides read the same folder of photograph-like JPEGs of about 500 x 400 px (made here,
unless `--folder` has some), shuffled, from the page cache, and give batches of uint8
images. A turn opens the iterator and closes it: a short one measures how both start, and
the batches that were prefetched and are thrown away. Ours has its default threads,
DataLoader a worker process for each usable core; `taskset -c 0` gives them one.

`train` is the recipes' crop and flip. PIL, which torchvision uses on images, cannot
resize without antialiasing, as these recipes do: `train, antialiased` does what it does.
"""

import contextlib
import os
import pathlib
import resource
import sys
import tempfile

import numpy as np
import turns
from PIL import Image

from vit_jax import cli
from vit_jax.data import pipeline
from vit_jax.machine import cores

# Name -> our ops, and the key of `transforms`.
MODES = {
  'train': ('decode|inception_crop(224)|flip_lr', 'train'),
  'train, antialiased': (
    'decode|inception_crop(224, antialias=True)|flip_lr',
    'train',
  ),
  'evaluate': ('decode|resize_small(256)|central_crop(224)', 'evaluate'),
}


def transforms(t) -> dict[str, list]:
  """Returns the transforms of `torchvision.transforms` that do the same."""
  train = [t.RandomResizedCrop(224, scale=(0.05, 1.0)), t.RandomHorizontalFlip()]
  evaluate = [t.Resize(256), t.CenterCrop(224)]
  return {
    'train': [*train, t.PILToTensor()],
    'evaluate': [*evaluate, t.PILToTensor()],
  }


def make_images(folder: pathlib.Path, number: int) -> None:
  """Writes JPEGs of about 500 x 400 px in two classes, with the detail of photographs.

  Noise whose amplitude grows with its scale (the 1/f spectrum of natural images) and
  a little of the sensor's, at quality 90: files of 50 to 100 kB.
  """
  rng = np.random.default_rng(0)
  for i in range(number):
    width, height = (int(n) for n in rng.normal((500, 400), 40).clip(300, 700))
    image = np.full((height, width, 3), 127.0)
    for octave in range(7):
      shape = (2 ** (octave + 1), 2 ** (octave + 1), 3)
      noise = rng.integers(0, 256, shape, np.uint8)
      grown = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
      image += (np.asarray(grown) - 127.0) * 0.6**octave
    image += rng.normal(0, 3, image.shape)
    path = folder / 'train' / f'class{i % 2}' / f'{i:05}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def ours(folder: pathlib.Path, pp: str, batch: int, batches: int):
  """Returns a function that reads some batches by our pipeline."""
  pp = f'{pp}|value_range(-1, 1)'
  data = pipeline.TrainBatches(f'folder:{folder}', 'train', pp, batch, host=0, hosts=1)

  def read():
    with contextlib.closing(data.iterate()) as iterator:
      for _ in range(batches):
        images = next(iterator)['image']
    assert images.shape == (batch, 224, 224, 3), images.shape
    assert images.dtype == np.uint8

  return read


def theirs(folder: pathlib.Path, transform: str, batch: int, batches: int):
  """Returns a function that reads as many by torchvision and a DataLoader."""
  import torchvision
  from torch.utils import data

  steps = transforms(torchvision.transforms)[transform]
  images = torchvision.datasets.ImageFolder(
    folder / 'train', torchvision.transforms.Compose(steps)
  )
  images = data.ConcatDataset([images] * -(-batches * batch // len(images)))

  def read():
    sampler = data.RandomSampler(images, num_samples=batches * batch)
    loader = data.DataLoader(images, batch, sampler=sampler, num_workers=cores())
    assert sum(len(labels) for _, labels in loader) == batches * batch

  return read


def cpu_seconds() -> float:
  """Returns the processor time of this process and of its workers that have ended."""
  usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
  return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(argv: list[str]) -> int:
  parser = cli.Parser('input_pipeline.py', description=__doc__.split('\n')[0])
  parser.add_argument('--images', type=cli.positive, default=400)
  parser.add_argument('--batch', type=cli.positive, default=64)
  parser.add_argument('--batches', type=cli.positive, default=96, help='of a turn')
  parser.add_argument('--rounds', type=cli.positive, default=5)
  parser.add_argument('--folder', help='with train/CLASS/*.jpg; default: made here')
  args = parser.parse_args(argv)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # accelerators have no part in this
  with contextlib.ExitStack() as stack:
    if args.folder:
      folder = pathlib.Path(args.folder).absolute()
    else:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      make_images(folder, args.images)
    size = args.batch, args.batches
    for mode, (pp, transform) in MODES.items():
      timing = turns.compare(
        turns.timed(ours(folder, pp, *size), cpu_seconds),
        turns.timed(theirs(folder, transform, *size), cpu_seconds),
        args.rounds,
      )
      rate = lambda side, timing=timing: (
        args.batch * args.batches / timing[side] / cores()
      )
      print(
        f'{mode:20} images/s per core: {rate("ours"):.0f}, torchvision '
        f'{rate("theirs"):.0f}, {turns.text(timing)}',
        flush=True,
      )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
