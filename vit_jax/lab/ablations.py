"""Ablations of the ViT paper and its successors, as tables of cells.

`vit_jax sweep --ablation NAME` trains one. An ablation is a function from a config to cells,
{name of a cell: {config key: value}}. Each comes with a small config of bundled data, and
also accepts other configs that suit it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.data import sources
from vit_jax.lab import published
from vit_jax.lab.runner import RunOf


class Ablation(NamedTuple):
  """An ablation and its bundled config.

  Attributes:
    cells: a function that maps a config to cells; raises ValueError for an unsuitable one.
    changes: changes to the bundled config.
    beside: title of a column with the paper's numbers, and {cell: number}.
  """

  cells: Callable[[dict], dict[str, dict]]
  title: str
  config: str
  changes: Mapping = {}
  seeds: Sequence[int] = (0,)
  beside: tuple[str, Mapping[str, str]] = ('', {})


ABLATIONS: dict[str, Ablation] = {}

# {ablation: {cell: values}}:
# - posemb: kind, place, and the accuracy in Table 8, which lacks the last two rows.
# - optimizer: the accuracy in Table 7.
# - masked: the section `task`.
# - tune: the section `tune`, and AdamW's learning rate on digits. It was the best of 3e-4,
#   1e-3, 3e-3, 1e-2, 3e-2 and 0.1 on 200 other images of the training split, with seed 0.
# - families: models of two stages whose forward pass costs as much as the ViT of
#   configs/digits.py, within 10 per cent. ConvNeXt's layer scale does not start at 1e-6,
#   which is for deep models: it would hardly grow in a short run.
CELLS = json.loads(Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))


def _ablation(*args, **kwargs) -> Callable:
  def register(cells: Callable) -> Callable:
    ABLATIONS[cells.__name__] = Ablation(cells, *args, **kwargs)
    return cells

  return register


# Changes to configs/digits.py for short runs. There is no EMA, because it would lag behind.
# Position embeddings start at 1 / sqrt(width), because from 0.02 they would hardly grow.
_SHORT = {'optim.ema': None, 'evals.test_ema': None, 'log.every': 0.25}
_SHORT |= {'model.posemb_std': None}
# Few-shot transfer to digits, for models of 32 x 32 colour images.
_TRANSFER = dict(
  type='fewshot',
  datasets=dict(digits=dict(source='digits', train='train', test='test')),
  pp="decode(3)|resize(32, method='bicubic')|value_range(-1, 1)",
  batch_size=360,
  shots=[5, 10],
)


def _split(config: dict) -> str:
  """Returns the training split; raises ValueError unless it is one whole split."""
  split = config['data']['split']
  if not isinstance(config['data']['source'], str) or '[' in split or '+' in split:
    raise ValueError(f'it trains on parts of one split, but data.split={split!r}')
  return split


def _fields(config: dict) -> dict:
  """Returns all fields of the config's ViT."""
  section = dict(config['model'])
  if section.get('name') != 'vit':
    raise ValueError(f'it needs a ViT, but model.name={section.get("name")!r}')
  name, fields = models.resolve(
    section.pop('name'), section.pop('variant', None), **section
  )
  return models.build(name, **fields).fields()


@_ablation(
  'position embeddings (appendix D.4, Table 8)',
  'digits:epochs=12',
  _SHORT,
  (0, 1, 2),
  (
    'ViT-B/16, ImageNet 5-shot (%), paper, Table 8',
    {name: accuracy for name, (*_, accuracy) in CELLS['posemb'].items()},
  ),
)
def posemb(config: dict) -> dict[str, dict]:
  """Compares the paper's position embeddings, rotary ones and sine-cosine ones."""
  return {
    name: {'model.posemb': kind, 'model.posemb_where': where}
    for name, (kind, where, _) in CELLS['posemb'].items()
  }


@_ablation(
  'class token or pooling, and their rates (appendix D.3, Figure 9)',
  'digits:epochs=20',
  _SHORT,
)
def head(config: dict) -> dict[str, dict]:
  """Compares heads. The paper trained the class token at a rate of 8e-4, pooling at 3e-4."""
  rate = config['optim']['lr']
  heads = {'token': rate, 'gap': rate, 'gap-lower-lr': rate * 3e-4 / 8e-4, 'map': rate}
  return {
    name: {'model.classifier': name.partition('-')[0], 'optim.lr': lr}
    for name, lr in heads.items()
  }


@_ablation(
  "a ViT's depth, width, MLP width and patches (appendix D.2, Figure 8)",
  'digits:epochs=12',
  {'model.depth': 2, 'model.width': 48, 'model.mlp_dim': 96, **_SHORT},
)
def shape(config: dict) -> dict[str, dict]:
  """Halves and doubles each axis, and all of them together; patches scale the opposite way."""
  fields = _fields(config)
  axes = ('depth', 'width', 'mlp_dim')
  cells = {'base': {f'model.{axis}': fields[axis] for axis in (*axes, 'patch_size')}}
  for factor in (0.5, 2):
    scaled = {f'model.{axis}': int(fields[axis] * factor) for axis in axes}
    patch = scaled['model.patch_size'] = [int(n / factor) for n in fields['patch_size']]
    for key, value in scaled.items():
      shown = patch[0] if value is patch else value
      axis = key.removeprefix('model.').partition('_')[0]
      cells[f'{axis}-{shown}'] = {**cells['base'], key: value}
    cells[f'all-x{factor:g}'] = scaled
  return cells


@_ablation(
  'Adam or SGD for pre-training ResNets (appendix D.1, Table 7)',
  'shapes:steps=400,test=test[:1000]',
  {
    'model': dict(name='bit', blocks=[1, 1, 1], width=32),
    'evals.transfer': _TRANSFER,
  },
  beside=(
    'fine-tuned after JFT, mean of 5 sets (%), paper, Table 7',
    CELLS['optimizer'],
  ),
)
def optimizer(config: dict) -> dict[str, dict]:
  """Compares AdamW, set as in the paper for ResNets (Table 3), with BiT's SGD.

  The optimizer that the config has is kept as it is. On the bundled data SGD has the best
  rate of 0.03, 0.1 and 0.3, because BiT's rate, 0.03 per 256 images, is for longer runs.
  """
  own = config['optim']
  common = {k: own[k] for k in ('schedule', 'clip', 'accum', 'ema') if k in own}
  rate = 0.03 * config['data']['batch_size'] / 256
  if config['data']['source'] == 'shapes:class':
    rate = 0.3
  sections = {
    'adamw': dict(name='adamw', lr=1e-3, wd=0.1, **common),
    'sgd': dict(name='sgd', lr=rate, wd=1e-3, momentum=0.9, **common),
  }
  if own['name'] not in sections:
    raise ValueError(
      f'the ablation compares adamw and sgd, but optim.name={own["name"]!r}'
    )
  sections[own['name']] = own
  return {name: {'optim': section} for name, section in sections.items()}


# Costs as much as the ViT of the bundled config of `data_size`, within 10 per cent.
RESNET = dict(name='bit', blocks=[1, 1], width=32)


@_ablation(
  'size of the pre-training data, ViT and ResNet (Figures 3, 4)',
  'shapes:examples=10000,steps=300,test=test[:1000]',
  {'model.patch_size': (8, 8), 'model.depth': 3, 'evals.transfer': _TRANSFER},
)
def data_size(config: dict) -> dict[str, dict]:
  """Trains on parts of the data, for the same number of steps.

  The paper's data sets have 9 to 300 million images.
  """
  split = _split(config)
  if config.get('epochs') is not None:
    raise ValueError(
      'all its cells train for the same number of steps: replace epochs by --set steps=N'
    )
  return {
    f'{name}-{share}pct': {'model': model, 'data.split': f'{split}[:{share}%]'}
    for name, model in (('vit', config['model']), ('resnet', RESNET))
    for share in (3, 10, 30, 100)
  }


@_ablation(
  'masked patch prediction, then 100 labels (section 4.6, appendix B.1.2)',
  'digits:epochs=500,batch=50',
  {
    'optim.ema': None,
    'evals.test_ema': None,
    'evals.test.every': None,
    'evals.fewshot.shots': [10],
    'log.every': 0.25,
  },
  beside=(
    'B/16, all labels of ImageNet (%), paper, section 4.6 and Table 5',
    {'mean_color': '79.9', 'scratch': str(published.TABLE_5['ViT-B/16'][0])},
  ),
)
def masked(config: dict) -> dict[str, dict]:
  """Pre-trains without labels, then trains on 100 labels; compares with training from scratch.

  The paper chose the target by few-shot accuracy. The mean colour was best; pixels, and a
  rate of 15 per cent, were slightly worse. It has no numbers for few labels.
  """
  split, evals = _split(config), {}
  for name, section in config.get('evals', {}).items():
    if section['type'] == 'fewshot':
      evals[name] = {k: v for k, v in section.items() if k != 'use_ema'}
    elif section['type'] == 'classification':
      shared = {key: section[key] for key in ('data', 'every') if key in section}
      evals[f'masked_{name}'] = dict(type='masked_patches', **shared)
  before = {'steps': 1000, 'data.batch_size': 128, 'evals': evals, 'weights': {}}
  before |= {'checkpoint.best': None, 'checkpoint.patience': None}
  few = {'data.split': f'{split}[:100]'}
  cells = {
    f'pretrain-{name}': {**before, 'task': dict(name='masked_patches', **task)}
    for name, task in CELLS['masked'].items()
  }
  cells['scratch'] = few
  for name in CELLS['masked']:
    cells[name] = {**few, 'weights': {'source': RunOf(f'pretrain-{name}')}}
  return cells


@_ablation(
  'ways to tune on few labels of new classes (VPT, section 4)',
  'digits:epochs=30',
  {**_SHORT, 'evals.fewshot': None, 'evals.test.every': None},
  (0, 1, 2),
)
def tune(config: dict) -> dict[str, dict]:
  """Pre-trains on half of the classes, then tunes on 80 labelled images of the other half."""
  data, split = config['data'], _split(config)
  source = sources.build(data['source'], split, **data.get('source_options', {}))
  half, number = source.num_classes // 2, source.num_classes
  few = {
    'data.classes': list(range(half, number)),
    'data.split': f'{split}[:80]',
    'data.batch_size': 40,
    'weights': {'source': RunOf('pretrain'), 'skip': ['head/.*']},
    'steps': 200,
    'checkpoint.every': 200,
  }
  cells = {
    name: few | {'tune': t, 'optim.lr': lr} for name, (t, lr) in CELLS['tune'].items()
  }
  return {'pretrain': {'data.classes': list(range(half))}, **cells}


@_ablation(
  'a ViT beside models of other families that cost as much', 'digits', _SHORT, (0, 1, 2)
)
def families(config: dict) -> dict[str, dict]:
  """Compares families with the config's data, optimizer and steps, which suit the ViT."""
  vit = config['model']
  common = {key: vit[key] for key in ('num_classes', 'dtype') if key in vit}
  others = {
    name: {'name': name, **fields, **common}
    for name, fields in CELLS['families'].items()
  }
  return {name: {'model': model} for name, model in {'vit': vit, **others}.items()}


@_ablation(
  'full attention, or along rows and columns (appendix D.6, Figure 13)',
  'digits:epochs=20',
  _SHORT,
)
def axial(config: dict) -> dict[str, dict]:
  """Compares kinds of attention. 'full-deeper' has as many parameters as 'axial'."""
  depth = _fields(config)['depth']
  kinds = {'full': ('full', 1), 'axial': ('axial', 1), 'full-deeper': ('full', 2)}
  gap = {'model.classifier': 'gap'}  # axial attention has no class token
  return {
    name: {'model.attention': kind, 'model.depth': depth * times, **gap}
    for name, (kind, times) in kinds.items()
  }


@_ablation('fine-tuning at a higher resolution (section 3.2)', 'digits')
def resolution(config: dict) -> dict[str, dict]:
  """Trains on digits at 16 px, then fine-tunes at 32 px with the recipe `finetune`."""
  tuned = config_lib.load(
    'finetune:weights=x,data=digits,res=32,final=True,keep_head=True,steps=200'
  )
  del tuned['seed']
  tuned['weights']['source'] = RunOf('16px')
  tuned['evals'] = {'test': tuned['evals'].pop('val')}
  return {'16px': {'model.classifier': 'token'}, '32px': tuned}


@_ablation(
  "what a plain ViT's pyramid adds (ViTDet, arXiv 2203.16527, Table 1)",
  'vitdet_digits:head=rcnn',
  {'model.backbone.backbone.global_blocks': (0, 1, 2, 3)},  # four stages, for the FPN
  beside=('COCO AP, ViT-B, Table 1', {k: x for k, (x, _) in CELLS['pyramid'].items()}),
)
def pyramid(config: dict) -> dict[str, dict]:
  """Compares the paper's three pyramids with no pyramid, where one map has all anchors."""
  return {name: cell for name, (_, cell) in CELLS['pyramid'].items()}
