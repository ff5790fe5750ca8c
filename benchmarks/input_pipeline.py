"""JPEGs in, batches out: images/s of our input pipeline beside torchvision's DataLoader.

  python benchmarks/input_pipeline.py --torch-python PYTHON [--images 400] [--batch 64]
    [--batches 96] [--rounds 5] [--folder DIR] [--out benchmarks/results/NAME.json]

PYTHON is the interpreter of an environment with torch and torchvision. Both sides read
the same folder of photograph-like JPEGs of about 500 x 400 px (made here, unless
`--folder` has some), shuffled, from the page cache, and give batches of uint8 images;
the scaling to [-1, 1] is left to the device. They take turns of `--batches` batches, each
turn from opening the iterator to closing it: a short one measures how both start, and the
two or three batches that were prefetched and are thrown away. Ours has its default
threads, DataLoader a worker process for each core that this process may use; `taskset -c
0` gives them one.

`train` is the recipes' crop and flip. PIL, which torchvision uses on images, cannot
resize without antialiasing, as these recipes do: `train, antialiased` does what it does.
"""

import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from PIL import Image

from vit_jax import cli
from vit_jax.data import lazy_tf, pipeline
from vit_jax.machine import cores
from vit_jax.tools.bench import peer as bench_peer
from vit_jax.tools.bench import record as bench_record
from vit_jax.train import metrics

SCRIPT = pathlib.Path(__file__).with_name('input_torch.py')

# name -> ours, and torchvision's `input_torch.TRANSFORMS`.
MODES = {
  'train': ('decode|inception_crop(224)|flip_lr', 'train'),
  'train, antialiased': (
    'decode|inception_crop(224, antialias=True)|flip_lr',
    'train',
  ),
  'evaluate': ('decode|resize_small(256)|central_crop(224)', 'evaluate'),
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


def ours(folder: pathlib.Path, pp: str, batch_size: int):
  """Returns turn(batches) -> {'wall', 'cpu'} seconds of our pipeline."""
  data = pipeline.train(
    f'folder:{folder}',
    'train',
    f'{pp}|value_range(-1, 1)',
    batch_size,
    host=0,
    hosts=1,
  )

  def turn(batches: int) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.closing(data.iterate()) as iterator:
      for _ in range(batches):
        batch = next(iterator)
    assert batch['image'].shape == (batch_size, 224, 224, 3), batch['image'].shape
    assert batch['image'].dtype == np.uint8
    return {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}

  return turn


def compare(worker, folder: pathlib.Path, mode: str, args) -> dict:
  """Returns the row of a mode."""
  pp, transform = MODES[mode]
  turn = ours(folder, pp, args.batch)
  about = worker.ask(
    build={
      'folder': str(folder / 'train'),
      'transform': transform,
      'batch': args.batch,
      'workers': cores(),
    }
  )
  sides = lambda: turn(args.batches), lambda: worker.ask(turn=args.batches)
  for side in sides:  # files into the page cache, graphs traced
    side()
  us, them = bench_peer.alternate(*sides, args.rounds)
  return {
    'mode': mode,
    'pp': pp,
    'batch': args.batch,
    **_rates(us, args),
    'torchvision': {
      **_rates(them, args),
      **bench_peer.ratios(us, them),
      'transform': about['transform'],
    },
  }


def _rates(turns: list[dict], args) -> dict:
  """Returns images/s by the clock, and by the seconds that a core spent on them."""
  images = args.batch * args.batches
  wall = images / statistics.median(turn['wall'] for turn in turns)
  return {
    'images_per_s': wall,
    'images_per_s_per_core': wall / cores(),
    'images_per_cpu_s': images / statistics.median(turn['cpu'] for turn in turns),
  }


def main(argv: list[str]) -> int:
  parser = cli.Parser(prog='input_pipeline.py', description=__doc__.split('\n')[0])
  parser.add_argument('--torch-python', required=True, metavar='PYTHON')
  parser.add_argument('--images', type=cli.positive, default=400)
  parser.add_argument('--batch', type=cli.positive, default=64)
  parser.add_argument('--batches', type=cli.positive, default=96, help='in a turn')
  parser.add_argument('--rounds', type=cli.positive, default=5)
  parser.add_argument('--folder', help='of DIR/train/CLASS/IMAGE in place of ours')
  parser.add_argument('--out', metavar='FILE.json', help='where to keep the results')
  args = parser.parse_args(argv)
  out = bench_record.check_file(args.out)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # accelerators have no part in this
  with contextlib.ExitStack() as stack:
    worker = bench_peer.Process(args.torch_python, SCRIPT)
    stack.enter_context(contextlib.closing(worker))
    versions = bench_record.versions() | worker.ask(check=None)
    if args.folder:
      folder = pathlib.Path(args.folder).absolute()
    else:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      make_images(folder, args.images)
    machine, rows = bench_record.machine(), []
    versions['tensorflow'] = lazy_tf.load().__version__
    print(f'{machine["device"]}, {machine["cores"]} cores, load {machine["load"]}')
    for mode in MODES:
      row = compare(worker, folder, mode, args)
      rows.append(row)
      print(_line(row), flush=True)
  if out:
    command = bench_record.command('python benchmarks/input_pipeline.py', argv)
    record = bench_record.record('input_pipeline', command, machine, versions, rows)
    metrics.write_json(out, record)
  return 0


def _line(row: dict) -> str:
  theirs = row['torchvision']
  return (
    f'{row["mode"]:20} images/s per core: {row["images_per_s_per_core"]:6.0f}, '
    f'torchvision {theirs["images_per_s_per_core"]:6.0f}, ratio {theirs["ratio"]:.2f} '
    f'({theirs["ratio_min"]:.2f}-{theirs["ratio_max"]:.2f}); images per CPU second: '
    f'{row["images_per_cpu_s"]:.0f}, {theirs["images_per_cpu_s"]:.0f}, ratio '
    f'{theirs["cpu_ratio"]:.2f}'
  )


if __name__ == '__main__':
  sys.exit(cli.run(main))
