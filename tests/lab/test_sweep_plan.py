"""vit_jax sweep: the values asked for, the runs they make, and what is refused."""

import re

import pytest

from tests.support import commands, naming
from vit_jax.errors import UserError
from vit_jax.lab.sweep import __main__ as sweep
from vit_jax.lab.sweep import arguments, asked, values
from vit_jax.train import program

CONFIG = '--config=digits:debug'

VALUES = {
  'optim.lr=0.001': ['0.001'],
  'optim.lr=0.001,3e-3': ['0.001', '3e-3'],
  'model.patch_size=(4,4),(8,8)': ['(4,4)', '(8,8)'],
  'evals.fewshot.shots=[1,5]': ['[1,5]'],
  'tune={"method": "rules", "train": ["a,b"]},{"method": "full"}': [
    '{"method": "rules", "train": ["a,b"]}',
    '{"method": "full"}',
  ],
  'data.pp=resize(8)|value_range(-1, 1)': ['resize(8)|value_range(-1, 1)'],
  'data.split="a,b",c': ['"a,b"', 'c'],
  "data.source=folder:my cat's": ["folder:my cat's"],
  'log.profile': ['True'],
  'resume_allow=optim.lr,steps': ['optim.lr,steps'],
  'optim.ema=None,0.9': ['None', '0.9'],
}


@pytest.mark.parametrize('assignment', VALUES)
def test_commas_separate_values_outside_of_brackets_and_quotes(assignment):
  key = assignment.partition('=')[0]
  assert values.parse(assignment) == (key, VALUES[assignment])


def test_the_name_of_a_value_is_stable_and_fit_for_a_folder():
  assert values.name_of('optim.lr', 0.001) == 'optim.lr=0.001'
  assert values.name_of('model.patch_size', [4, 4]) == 'model.patch_size=4x4'
  one, other = (values.name_of('data.split', f'train[:{n}%]') for n in '12')
  assert re.fullmatch(r'data\.split=train_1-[0-9a-f]{6}', one)
  assert one != other
  # Two texts that the characters of a name cannot tell apart.
  assert values.name_of('a', 'b|c') != values.name_of('a', 'b/c')


def planned(tmp_path, *argv):
  args = arguments.parse([CONFIG, *argv])
  return asked.sweep(args, tmp_path).search


def test_the_runs_are_all_combinations(tmp_path):
  words = ['optim.lr=0.1,0.2', 'model.patch_size=(4,4),(8,8)', 'seed=3,5', 'epochs=7']
  found = planned(tmp_path, '--set', *words).planned
  assert [run.name for run in found] == [
    f'optim.lr={lr}-model.patch_size={patch}-seed{seed}'
    for seed in (3, 5)
    for lr in (0.1, 0.2)
    for patch in ('4x4', '8x8')
  ]
  last = found[-1].config
  assert (last['optim']['lr'], last['model']['patch_size']) == (0.2, [8, 8])
  assert (last['seed'], last['epochs']) == (5, 7)
  # A duration takes the place of the config's own.
  assert 'epochs' not in planned(tmp_path, '--set', 'steps=9').planned[0].config
  assert [r.name for r in planned(tmp_path, '--set', 'seed=1').planned] == [
    'base-seed1'
  ]


def test_more_values_keep_the_folder():
  out = lambda *words: asked.default_out(arguments.parse([CONFIG, '--set', *words]))
  assert out('optim.lr=1,2', 'steps=9') == 'runs/sweep-digits-debug-steps=9'
  assert out('optim.lr=1,2,3', 'steps=9', 'seed=0,1') == out('optim.lr=1,2', 'steps=9')


REFUSED = {
  'a key': (['--set', 'optim.lrr=1,2'], ('lrr', 'lr')),
  'a key of the final': (
    ['--pick', 'test/top1', '--final', 'optim.lrr=1'],
    ('--final', 'lrr', 'lr'),
  ),
  'a section': (['--set', 'optim=1,2'], ('config.optim', 'section')),
  'a text for a number': (['--set', 'optim.lr=a,b'], ('optim.lr=a', 'float')),
  'a list for a number': (
    ['--set', 'optim.lr=[1,2]'],
    ('optim.lr', 'number', 'commas', 'brackets'),
  ),
  'numbers for a list': (
    ['--set', 'evals.fewshot.shots=[1]', 'evals.fewshot.shots=5'],
    ('evals.fewshot.shots', 'twice'),
  ),
  'a list without brackets': (
    ['--set', 'model.patch_size=4,8'],
    ('model.patch_size', 4),
  ),
  'a value twice': (['--set', 'model.patch_size=4,4'], ('4', '(4,4)')),
  'an open bracket': (['--set', 'model.patch_size=(4,4'], ('model.patch_size', "')'")),
  'a closing bracket': (['--set', 'data.pp=resize(8))'], ('data.pp', "')'")),
  'an open quote': (['--set', 'data.split="a,b'], ('data.split', "'\"'")),
  'an empty value': (['--set', 'optim.lr=1,,2'], ('optim.lr', 'empty')),
  'no key': (['--set', '=1'], ('=1', 'KEY=VALUE')),
  'durations': (['--set', 'steps=1,2', 'epochs=3'], ('steps', 'epochs')),
  'seeds': (['--set', 'seed=a'], ('seed=a', '0,1,2')),
  'pages': (['--set', 'log.report=True'], ('log.report', 'vit_jax report')),
  'no metric of that name': (['--pick', 'val/top1'], ('val', 'test')),
  'no best of a metric': (['--pick', 'test/top9'], ('--pick', 'test/top9', 'top5')),
  'a final of nothing': (['--final', 'optim.lr=1'], ('--final', '--pick')),
  'values of the final': (
    ['--pick', 'test/top1', '--final', 'optim.lr=1,2'],
    ('optim.lr', 'seed'),
  ),
  'a share': (['--task', '4/3'], ('4/3', 'N')),
  'no share': (['--task', '2'], ('2', '1/4')),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused_before_any_run(name, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(program, 'train', None)
  argv, facts = REFUSED[name]
  argv = [CONFIG, '--out', tmp_path / 'out', *argv]
  commands.assert_refused(sweep.main, capsys, argv, facts)
  assert not (tmp_path / 'out').exists()


def test_the_share_of_a_slurm_array():
  of = lambda **values: arguments.of_slurm(
    {f'SLURM_ARRAY_TASK_{key}': str(value) for key, value in values.items()}
  )
  assert of() is None
  assert of(ID=0, COUNT=8, MIN=0, STEP=1) == (0, 8)
  assert of(ID=8, COUNT=8, MIN=1, STEP=1) == (7, 8)
  assert of(ID=9, COUNT=3, MIN=1, STEP=4) == (2, 3)
  some = dict(ID=1, COUNT=3, MIN=1, STEP=1)
  halves = [{k: v for k, v in some.items() if k != key} for key in some if key != 'ID']
  for wrong in (some | dict(ID=9), some | dict(ID='x'), some | dict(STEP=0), *halves):
    with pytest.raises(UserError, match=naming('SLURM_ARRAY_TASK_ID', '--task')):
      of(**wrong)
