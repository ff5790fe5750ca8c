"""Measures and draws the features of docs/papers/features.md.

  python docs/images/unlabelled.py RUNS unlabelled.png

RUNS holds the runs of that page, named by method and seed: mae0, mae1, ... A number is what
`vit_jax evaluate RUN --probe PROBE --pp PP` gives, where PP prepares images as in training.
Pixels are measured by the same evaluators.
"""

import sys
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import vit_jax
from vit_jax import evaluators, sharding

SEEDS = 3
# The source, the number of labelled images, and the split to test on.
DATA = {name: ('digits', 100, 'test') for name in ('digits', 'digits, moved')}
DATA['shapes'] = ('shapes', 360, 'test[:1000]')
MOVED = 'random_affine(15, 0.2, (0.6, 1.2))|'
PROBES = {'knn': {'k': [5]}, 'linear_probe': {'l2': [1.0]}}
# For each data set: the names of rows, and of their runs.
DIGITS = {
  'pixels': None,
  'untrained, as MAE': 'maeinit',
  'MAE': 'mae',
  'untrained, as DINO': 'dinoinit',
  'DINO': 'dino',
  'supervised by the labels': 'sup',
}
ROWS = {'digits': DIGITS, 'digits, moved': DIGITS}
ROWS['shapes'] = {
  'pixels': None,
  'untrained, as MAE': 'mae_shapes_untrained',
  'MAE': 'mae_shapes',
  'untrained, as SigLIP': 'siglipinit',
  'SigLIP': 'siglip',
  'supervised by the labels': 'shp',
}


def flatten(_, batch):
  """Returns the pixels of images as features, in place of a model."""
  return {'pre_logits': batch['image'].reshape(len(batch['image']), -1)}


def measure(run: Path | None, name: str, seed: int, mesh) -> list[float]:
  """Returns accuracies in percent, one for each of `PROBES`, of a run or of pixels."""
  source, labels, test = DATA[name]
  predict, variables, channels, side = flatten, {}, 1, 16
  if run:
    loaded = vit_jax.load(str(run), ema=run.name == f'dino{seed}')
    predict = lambda variables, batch: loaded.model.apply(variables, batch['image'])[1]
    variables, channels, side = loaded.variables, loaded.channels, loaded.image_size[0]
  pp = 'value_range(-1, 1)'
  if source == 'digits':
    pp = (MOVED if name == 'digits, moved' else '') + pp
    pp = f"decode({channels})|resize({side}, method='bicubic', rounding='nearest')|{pp}"
  data = dict(source=source, test=test)
  data['train'] = f'train[{labels * seed}:{labels * (seed + 1)}]'
  section = dict(datasets={'x': data}, pp=pp, batch_size=200, mesh=mesh)
  out = []
  for probe, options in PROBES.items():
    values = evaluators.build(type=probe, **options, **section).run(predict, variables)
    out += [100 * v for key, v in values.items() if key.endswith(('nn', 'top1'))]
  return out


def main(runs: str, target: str):
  mesh = sharding.make_mesh()
  figure, axes = plt.subplots(1, len(DATA), figsize=(11, 2.8), layout='constrained')
  for ax, (name, rows) in zip(axes, ROWS.items(), strict=True):
    with jax.set_mesh(mesh):
      x = [
        [measure(m and Path(runs, f'{m}{s}'), name, s, mesh) for s in range(SEEDS)]
        for m in rows.values()
      ]
    means, deviations = np.mean(x, 1), np.std(x, 1, ddof=1)
    for label, mean, deviation in zip(rows, means, deviations, strict=True):
      pairs = zip(mean, deviation, strict=True)
      print(name, label, *[f'{m:.1f} ± {d:.1f}' for m, d in pairs], sep=' | ')
    for i, probe in enumerate(PROBES):
      places = np.arange(len(rows)) + 0.4 * i
      ax.barh(places, means[:, i], 0.4, xerr=deviations[:, i], label=probe)
    ax.set_yticks(np.arange(len(rows)) + 0.2, rows, fontsize=7)
    ax.invert_yaxis()
    ax.set_title(f'{name}, %', fontsize=8)
    ax.tick_params(axis='x', labelsize=7)
  axes[-1].legend(fontsize=7, loc='upper right')
  figure.savefig(target, dpi=110)


if __name__ == '__main__':
  main(*sys.argv[1:])
