"""Every figure of `vit_jax figures`, of the models and runs of the experiments."""

import shlex
from pathlib import Path

import numpy as np

from vit_jax.data import sources
from vit_jax.tools import out_folder
from vit_jax.tools.figures import __main__ as figures

MODEL = (
  'resolution'  # the run whose attention is looked at: 8 x 8 patches, a class token
)
_FEW, _MANY = 8, 128  # the paper's figure 7 takes 128 images

# Name -> what it shows, and what of it is drawn.
OF_IMAGES = {
  'rollout': 'Where the model looks: attention rollout (Figures 6 and 14)',
  'attention': 'The attention of its last layer',
  'class_rollout': 'Which patches speak for the class, by attention and its gradient',
  'gradient': 'Which pixels speak for the class: gradient times input',
  'integrated': 'Which pixels speak for the class: integrated gradients',
}
OF_THE_MODEL = {
  'posemb': 'Similarity of position embeddings (Figure 7 centre)',
  'filters': 'Principal components of the patch embedding (Figure 7 left)',
  'interpolation': 'Position embeddings before and after resizing (section 3.2)',
}
OF_RUNS = {
  'compute': 'Accuracy against compute (Figure 5)',
  'data': 'Accuracy against pre-training data (Figure 3)',
  'vtab': 'VTAB by groups of tasks, numbers of the paper only (Figure 2)',
  'shape': 'Scaling the shape of the model (Figure 8)',
}
DISTANCE = {'distance': 'Attention distance of each head (Figure 7 right)'}
TITLES = {**OF_IMAGES, **DISTANCE, **OF_THE_MODEL, **OF_RUNS}


def commands(out: Path) -> dict[str, list[str]]:
  """Returns {figure: its arguments}, of the folder of a paper."""
  model, images = str(out / MODEL), out / 'images'
  to = ['--out', str(out / 'figures')]

  def runs(name: str) -> list[str]:
    found = (out / name / 'runs').glob('*-seed0')
    return [*sorted(map(str, found)), '--metric', 'test/top1']

  found = {name: [name, model, str(images / 'few')] for name in OF_IMAGES}
  found['distance'] = ['distance', model, str(images / 'many')]
  found |= {name: [name, model] for name in OF_THE_MODEL}
  found['interpolation'] += ['--to', '64']
  found |= {name: [name, *runs('data_size')] for name in ('compute', 'data')}
  found |= {'vtab': ['vtab'], 'shape': ['shape', *runs('shape')]}
  return {name: [*arguments, *to] for name, arguments in found.items()}


def draw(name: str, out: Path) -> int:
  """Draws one figure; returns the exit code.

  Raises:
    UserError: where the run that it is of is not there.
  """
  return figures.main(commands(out)[name])


def shown(name: str, out: Path) -> str:
  """Returns the command line of a figure."""
  return shlex.join(['vit_jax', 'figures', *commands(out)[name]])


def write_images(out: Path) -> None:
  """Writes test images of the digits as files: one of each class, and many of all."""
  from PIL import Image

  source = sources.build('digits', 'test')
  examples = source.read(np.arange(_MANY))
  one_each = {example['label']: example for example in reversed(examples)}
  few = [one_each[label] for label in sorted(one_each)][:_FEW]
  for folder, chosen in (('few', few), ('many', examples)):
    out_folder.make(out / 'images' / folder)
    for i, example in enumerate(chosen):
      path = out / 'images' / folder / f'{i:03d}-{example["label"]}.png'
      Image.fromarray(np.squeeze(example['image'])).save(path)
