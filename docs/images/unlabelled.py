"""Measures and draws the features of docs/papers/features.md.

  python docs/images/unlabelled.py RUNS unlabelled.png

RUNS holds the runs of that page, named by method and seed: mae0, mae1, ... A number is what
`vit_jax evaluate RUN --probe PROBE` gives. Pixels are measured by the same evaluators.
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
DOUBLED = "decode(1)|resize(16, method='bicubic', rounding='nearest')|"
PIXELS = {'digits': DOUBLED, 'digits, moved': DOUBLED, 'shapes': ''}
MOVED = 'random_affine(15, 0.2, (0.6, 1.2))|value_range'
PROBES = {'knn': {'k': [5]}, 'linear_probe': {'l2': [1.0]}}
# For each data set: the names of rows, and of their runs.
DIGITS = {
  'pixels': '',
  "MAE's encoder, untrained": 'maeinit',
  'MAE': 'mae',
  "DINO's encoder, untrained": 'dinoinit',
  'DINO': 'dino',
  'supervised by the labels': 'sup',
}
ROWS = {'digits': DIGITS, 'digits, moved': DIGITS}
ROWS['shapes'] = {
  'pixels': '',
  "SigLIP's encoder, untrained": 'siglipinit',
  'SigLIP': 'siglip',
  'supervised by the labels': 'shp',
}


def flatten(_, batch):
  """Returns the pixels of images as features, in place of a model."""
  return {'pre_logits': batch['image'].reshape(len(batch['image']), -1)}


def measure(runs: Path, method: str, name: str, mesh) -> list[list[float]]:
  """Returns accuracies in percent, [seeds, probes], of a row on one of `DATA`."""
  source, labels, test = DATA[name]
  out = []
  for seed in range(SEEDS):
    predict, variables, pp = flatten, {}, PIXELS[name] + 'value_range(-1, 1)'
    if method:
      loaded = vit_jax.load(str(runs / f'{method}{seed}'), ema=method == 'dino')
      predict = lambda variables, batch, model=loaded.model: model.apply(
        variables, batch['image']
      )[1]
      variables, pp = loaded.variables, loaded.pp
    if name == 'digits, moved':
      pp = pp.replace('value_range', MOVED)
    data = dict(source=source, test=test)
    data['train'] = f'train[{labels * seed}:{labels * (seed + 1)}]'
    section = dict(datasets={'x': data}, pp=pp, batch_size=200, mesh=mesh)
    row = []
    for probe, options in PROBES.items():
      values = evaluators.build(type=probe, **options, **section).run(
        predict, variables
      )
      row += [100 * v for key, v in values.items() if key.endswith(('nn', 'top1'))]
    out.append(row)
  return out


def main(runs: str, target: str):
  mesh = sharding.make_mesh()
  figure, axes = plt.subplots(1, len(DATA), figsize=(11, 2.6))
  for ax, (name, rows) in zip(axes, ROWS.items(), strict=True):
    with jax.set_mesh(mesh):
      x = np.array(
        [measure(Path(runs), method, name, mesh) for method in rows.values()]
      )
    means, deviations = x.mean(1), x.std(1, ddof=1)
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
  figure.tight_layout(pad=0.4)
  figure.savefig(target, dpi=110)


if __name__ == '__main__':
  main(*sys.argv[1:])
