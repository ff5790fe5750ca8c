"""What `vit_jax paper` trains, in the order in which it does."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vit_jax.lab.ablate import __main__ as ablate
from vit_jax.train import arguments, program


class Experiment(NamedTuple):
  """One experiment.

  Attributes:
    title: what it is, for the page.
    command: PAPER -> the command line that does it, below the folder of the paper; the
      same that a user would type.
  """

  title: str
  command: Callable[[Path], list[str]]


def _train(name: str, spec: str, *flags: str) -> Callable[[Path], list[str]]:
  def command(out: Path) -> list[str]:
    where = f'--workdir={out / name}'
    return ['train', f'--config={spec.format(out=out)}', where, *flags]

  return command


def _ablate(name: str, *flags: str) -> Callable[[Path], list[str]]:
  return lambda out: ['ablate', name, *flags, '--out', str(out / name)]


# With a class token, whose attention the figures are of.
_TOKEN = '--config.model.classifier=token'
_QUICK = '--config.log.report=False'

EXPERIMENTS = {
  'digits': Experiment(
    'Pre-training and evaluation on handwritten digits',
    _train('digits', 'digits', _TOKEN, _QUICK),
  ),
  'resolution': Experiment(
    'Fine-tuning at twice the resolution',
    _train(
      'resolution',
      'finetune:weights={out}/digits,data=digits,res=32,final=True,keep_head=True,'
      'steps=200',
      _QUICK,
    ),
  ),
  'posemb': Experiment('Position embeddings', _ablate('posemb', '--seeds', '0,1,2')),
  'head': Experiment('Class token or pooling', _ablate('head')),
  'shape': Experiment('Depth, width, MLP width and patches', _ablate('shape')),
  'optimizer': Experiment('Adam or SGD for ResNets', _ablate('optimizer')),
  'data_size': Experiment('Size of the pre-training data', _ablate('data_size')),
  'masked': Experiment(
    'Masked patch prediction, then 100 labels',
    _ablate('masked', '--cells', 'scratch,pretrain-mean_color,mean_color'),
  ),
  'axial': Experiment('Axial attention', _ablate('axial')),
}


def run(name: str, out: Path) -> int:
  """Does one experiment, or what is left of it; returns the exit code.

  Raises: as `vit_jax train` and `vit_jax ablate` do.
  """
  command = EXPERIMENTS[name].command(out)
  if command[0] == 'ablate':
    return ablate.main(command[1:])
  args, config, workdir = arguments.parse(command[1:])
  program.train(config, workdir, shown(name, out), args.config)
  return 0


def shown(name: str, out: Path) -> str:
  """Returns the command line of an experiment, as a user would type it."""
  return shlex.join(['vit_jax', *EXPERIMENTS[name].command(out)])
