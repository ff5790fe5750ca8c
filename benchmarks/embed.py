"""Files in, features out: images/s of `vit_jax embed` beside a loop of timm and PyTorch.

  .venv-peer/bin/python benchmarks/embed.py [--model vit_small_patch16_224] [--images 256]
    [--rounds 5] [--batch 32] [--dtype float32] [--folder DIR]

Both read the same JPEGs of about 500 x 400 px (made here, unless `--folder` has some) and
run the same random weights with timm's preprocessing. timm's loop has a DataLoader with a
worker process for each usable core, pinned memory on GPUs, and inference mode; ours is the
loop of `embed` without its file. Compilation and loading are outside of both.
"""

import contextlib
import os
import pathlib
import sys
import tempfile

import input_pipeline
import numpy as np
import turns

from vit_jax import cli
from vit_jax.machine import cores


def ours(folder: str, paths: list[str], batch: int, dtype: str):
  """Returns a function that returns the features [n, D] by the loop of `embed`."""
  import jax

  from vit_jax import inference, sharding, weights
  from vit_jax.data.single_image import SingleImage
  from vit_jax.tools import embed

  loaded = weights.load(folder, dtype=dtype)
  function, _ = embed.extractor(loaded, ['pre_logits'])
  mesh = sharding.make_mesh()

  def run():
    with jax.set_mesh(mesh):
      stream = inference.stream(
        loaded, paths, SingleImage(loaded.pp), batch, function, mesh
      )
      return np.concatenate([rows['pre_logits'] for rows, _ in stream])

  return run


class Photos:
  """A data set of PyTorch's: the images of some paths, as a model of timm takes them."""

  def __init__(self, paths: list[str], transform):
    self._paths, self._transform = paths, transform

  def __len__(self):
    return len(self._paths)

  def __getitem__(self, i):
    from PIL import Image

    with Image.open(self._paths[i]) as image:
      return self._transform(image.convert('RGB'))


def theirs(model, paths: list[str], batch: int, dtype: str):
  """Returns a function that returns the features [n, D] by timm's model."""
  import timm
  import torch

  torch.set_num_threads(cores())
  torch.set_float32_matmul_precision('high')
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model = model.eval().to(device)
  transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
  half = torch.autocast(device, torch.bfloat16, enabled=dtype == 'bfloat16')

  def run():
    loader = torch.utils.data.DataLoader(
      Photos(paths, transform), batch, num_workers=cores(), pin_memory=device == 'cuda'
    )
    features = []
    with torch.inference_mode(), half:
      for images in loader:
        rows = model.forward_head(
          model.forward_features(images.to(device, non_blocking=True)), pre_logits=True
        )
        features.append(rows.float().cpu().numpy())
    return np.concatenate(features)

  return run


def main(argv: list[str]) -> int:
  parser = cli.Parser('embed.py', description=__doc__.split('\n')[0])
  parser.add_argument('--model', default='vit_small_patch16_224', help="timm's")
  parser.add_argument('--images', type=cli.positive, default=256)
  parser.add_argument('--rounds', type=cli.positive, default=5)
  parser.add_argument('--batch', type=cli.positive, default=32)
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32')
  parser.add_argument('--folder', help='of JPEGs; default: made here')
  args = parser.parse_args(argv)
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # room for PyTorch
  import timm
  import torch

  from vit_jax.tools import bench

  with contextlib.ExitStack() as stack:
    place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if not args.folder:
      input_pipeline.make_images(place / 'photos', min(args.images, 400))
    folder = pathlib.Path(args.folder or place / 'photos')
    paths = sorted(map(str, folder.rglob('*.jpg')))
    paths = (paths * -(-args.images // len(paths)))[: args.images]
    torch.manual_seed(0)
    model = timm.create_model(args.model)
    timm.models.save_for_hf(model, place / 'weights')
    sides = (
      ours(str(place / 'weights'), paths, args.batch, args.dtype),
      theirs(model, paths, args.batch, args.dtype),
    )
    print(bench.this_machine())
    one, other = (side() for side in sides)
    print(f'largest difference {abs(one - other).max():.2g} of {abs(other).max():.2g}')
    timing = turns.compare(
      *(turns.timed(side, input_pipeline.cpu_seconds) for side in sides), args.rounds
    )
  rate = lambda side: args.images / timing[side]
  print(
    f'{args.model} {args.dtype} batch {args.batch}: {rate("ours"):.4g} images/s, timm '
    f'{rate("theirs"):.4g}, {turns.text(timing)}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
