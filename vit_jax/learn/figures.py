"""Draws what a run of MAE predicts: `vit_jax figures reconstruction RUN`."""

import itertools
import math

import jax
import numpy as np

from vit_jax import config as config_lib
from vit_jax import tasks, trees, weights
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.learn.mae import MAE
from vit_jax.tools.figures import Drawing
from vit_jax.tools.figures.maps import to_colours

_IMAGES = 8


def reconstruction(args) -> Drawing:
  """Draws held-out images, the patches that the encoder sees, and the reconstructions."""
  from vit_jax.explain import plots

  if len(args.runs) != 1:
    raise UserError(f'reconstruction draws one run, not {len(args.runs)}.')
  (run,) = args.runs
  config = config_lib.read(run)
  if config.get('task', {}).get('name') != MAE.OWN:
    raise UserError(
      f'reconstruction draws runs of MAE, which --config=mae_i1k trains: {run} has another '
      'task.'
    )
  sections = (x for x in config['evals'].values() if x['type'] == 'masked_patches')
  if (section := next(sections, None)) is None:
    raise UserError(f'{run} has no evaluation of type masked_patches.')
  data = pipeline.EvalBatches(**section['data'])
  (batch,) = itertools.islice(data.iterate(), 1)
  batch = {key: x[:_IMAGES] for key, x in data.finish_on_device(batch).items()}

  loaded, source = weights.load(run), weights.read(run)
  task = tasks.build(model=loaded.model, spec=batch, **config['task'])
  params = loaded.params | trees.unflatten(source.own)
  out = jax.device_get(jax.jit(task.predict)({'params': params}, batch))

  images = np.asarray(batch['image'])
  shown = _join(out['reconstruction'], task.grid, task.patch)
  masked = out['masked'][..., None].repeat(math.prod(task.patch), axis=-1)
  masked = _join(masked, task.grid, task.patch)
  images, shown = to_colours(loaded, images), to_colours(loaded, shown)
  seen = np.where(masked, 0.5, images)
  shown = np.where(masked, shown, images)
  tiles = np.stack([images, seen, shown], axis=1).reshape(-1, *images.shape[1:])
  title = 'Image, patches that are seen, reconstruction'
  rows = [('index', 'loss')]
  rows += zip(batch['index'], out['masked_loss'], strict=True)
  return Drawing(plots.filters(tiles, title, 6), rows)


def _join(patches, grid: tuple[int, int], patch: tuple[int, int]) -> np.ndarray:
  """Puts patches [B, N, ph * pw * C] together to images [B, H, W, C]."""
  (h, w), (ph, pw), B = grid, patch, len(patches)
  x = patches.reshape(B, h, w, ph, pw, -1).swapaxes(2, 3)
  return x.reshape(B, h * ph, w * pw, -1)
