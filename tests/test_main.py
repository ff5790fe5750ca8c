"""Bad input: one clear line, soon, and exit code 2. What a user meets first."""

import os
import re
import shutil

import numpy as np
import pytest
import runs

from vit_jax import cli, main

DIGITS = '--config=configs/digits.py:debug'
B16 = '--config=configs/vit_b16.py'


@pytest.fixture(autouse=True)
def no_prepared_data(monkeypatch, tmp_path):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'nothing'))


@pytest.fixture
def arrays(tmp_path):
  """An .npz file whose labels go from 0 to 11."""
  file = tmp_path / 'twelve.npz'
  images = np.zeros((24, 8, 8, 1), np.uint8)
  np.savez(file, images=images, labels=np.arange(24) % 12)
  return file


def error_of(*arguments, workdir, capfd) -> str:
  """Returns the one line on stderr of a command refused, run in this process."""
  code = cli.run(main.main, [*arguments, f'--workdir={workdir}'])
  line = one_line(capfd.readouterr().err)
  assert code == 2
  return line


def one_line(error: str) -> str:
  assert error.startswith('error: ')
  assert error.endswith('\n')
  assert error.count('\n') == 1, error
  return error.strip()


# -- the command, as a user meets it ---------------------------------------------------

COMMANDS = {
  'key': ([DIGITS, '--config.optim.lrr=1'], ['config.optim.lrr', 'Did you mean "lr"?']),
  'argument': (
    ['--config=configs/digits.py:epoch=3'],
    ["'epoch=3'", 'Did you mean "epochs"?'],
  ),
  'split': (
    [DIGITS, '--config.data.split=trian'],
    ["split 'trian'", 'Did you mean "train"?'],
  ),
  'folder': (
    ['--config=configs/folder.py:data=/no/such/folder'],
    ["no directory '/no/such/folder'", 'configs/folder.py:debug'],
  ),
  'label': (
    [DIGITS, '--config.data.source=ARRAYS', '--config.model.num_classes=10'],
    ['labels run from 0 to 11', 'allows 0 to 9', 'twelve.npz#10 with label 10'],
  ),
  'op': (
    [DIGITS, '--config.data.pp=flip_rl'],
    ["'flip_rl'", 'Did you mean "flip_lr"?'],
  ),
  'workdir': ([DIGITS, '--workdir=FILE/run'], ['FILE/run', 'Choose another --workdir']),
  'not prepared': (
    [B16],
    [
      'tfds:imagenet21k is not prepared',
      'TFDS_DATA_DIR',
      'python -m vit_jax.main --config=configs/vit_b16.py:debug',
    ],
  ),
}


@pytest.mark.parametrize('name', COMMANDS)
def test_refused_within_ten_seconds(name, arrays, tmp_path):
  arguments, words = COMMANDS[name]
  file = tmp_path / 'file'
  file.touch()
  replaced = {'ARRAYS': f'arrays:{arrays}', 'FILE': str(file)}
  for old, new in replaced.items():
    arguments = [argument.replace(old, new) for argument in arguments]
    words = [word.replace(old, new) for word in words]
  for attempt in (1, 2):  # the machine may be busy
    process = runs.Process(f'--workdir={tmp_path}/run', *arguments)
    code, _, error = process.end()
    error = one_line(error)
    assert code == 2
    for word in words:
      assert word in error
    if process.seconds < 10:
      break
    assert attempt == 1, process.seconds


def test_the_hint_is_true(tmp_path):
  # What is given as "the same recipe on bundled data" must not itself lack data.
  with pytest.raises(Exception, match='is not prepared') as error:
    main.main([B16, f'--workdir={tmp_path}'])
  command = re.search(r'--config=\S+$', str(error.value))[0]
  _, config, _ = main.parse([command])
  assert config['data']['source'] == 'digits'
  # Those who asked for the bundled data need no hint at them.
  with pytest.raises(Exception, match='trian') as error:
    main.main([f'{B16}:debug,train=trian', f'--workdir={tmp_path}'])
  assert 'Meanwhile' not in str(error.value)


# -- every other slip, in this process -------------------------------------------------


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ([], ['--config', '--help']),
    (['--config=configs/digist.py'], ['Did you mean "configs/digits.py"?']),
    (['--config=README.md'], ["No config file 'README.md'"]),
    (['--config=configs'], ["No config file 'configs'"]),
    ([DIGITS, '--wrokdir=x'], ["'--wrokdir=x'", 'Did you mean "--workdir"?']),
    ([DIGITS, '--config.optim.lr', '1'], ["'1'", '--config.KEY=VALUE']),
    ([DIGITS, '--config.optm.lr=1'], ['config.optm', 'Did you mean "optim"?']),
    ([DIGITS, '--config.optim.lr=fast'], ['config.optim.lr=fast', 'expected float']),
    ([DIGITS, '--config.model.depth=two'], ['config.model.depth=two', 'expected int']),
    ([DIGITS, '--config.model.width=0.5'], ['config.model.width=0.5', 'expected int']),
    (['--config=configs/digits.py:epochs=many'], ["epochs='many'", 'expected']),
    ([DIGITS, '--config.evals=3'], ['config.evals', 'section']),
    ([DIGITS, '--config.steps=10'], ['exactly one of steps, epochs, examples']),
    ([DIGITS, '--config.epochs=0'], ['config.epochs=0', 'above 0']),
    ([DIGITS, '--config.data.batch_size=0'], ['batch_size', '0']),
    ([DIGITS, '--config.data.batch_size=12'], ['batch_size=12', 'a multiple of 8']),
    (
      [DIGITS, '--config.optim.accum=3'],
      ['batch_size=64', 'a multiple of 24', 'optim.accum'],
    ),
    ([DIGITS, '--config.optim.accum=0'], ['config.optim.accum=0', '1 or more']),
    ([DIGITS, '--config.optim.name=adamv'], ["'adamv'", 'adamw']),
    ([DIGITS, '--config.optim.schedule.decay=cosin'], ['Did you mean "cosine"?']),
    ([DIGITS, '--config.optim.schedule.warmup=500'], ['warmup 500', 'train longer']),
    ([DIGITS, '--config.model.name=vitt'], ['Did you mean "vit"?']),
    ([DIGITS, '--config.model.variant=B'], ["'B'", 'SIZE/PATCH']),
    ([DIGITS, '--config.model.remat=some'], ["'some'"]),
    ([DIGITS, '--config.model.patch_size=4'], ['patch_size=4', 'tuple[int, int]']),
    ([DIGITS, '--config.model.patch_size=(3,3)'], ['16x16', '3x3']),
    ([DIGITS, '--config.model.num_heads=5'], ['num_heads', '5']),
    ([DIGITS, '--config.model.dtype=float8'], ['Unknown dtype', 'float8']),
    ([DIGITS, '--config.task.name=clasify'], ['Did you mean "classify"?']),
    ([DIGITS, '--config.task.loss=l2'], ["'l2'", 'softmax']),
    ([DIGITS, '--config.sharding=fsdq'], ['Did you mean "fsdp"?']),
    ([DIGITS, '--config.sharding=3'], ['config.sharding=3']),
    ([DIGITS, '--config.mesh.fsdp=3'], ['config.mesh', 'number of devices']),
    ([DIGITS, '--config.seed=None'], ['config.seed=None', 'int']),
    ([DIGITS, '--config.seed=-1'], ['seed=-1']),
    ([DIGITS, '--config.max_bad_steps=few'], ["max_bad_steps='few'", 'int']),
    ([DIGITS, '--config.log.every=0'], ['config.log.every=0', '1 or more']),
    ([DIGITS, '--config.log.evry=5'], ['config.log.evry', 'Did you mean "every"?']),
    (
      [DIGITS, '--config.checkpoint.every=0'],
      ['config.checkpoint.every=0', 'fraction'],
    ),
    ([DIGITS, '--config.checkpoint.best=tset/top1'], ['Did you mean "test"?']),
    ([DIGITS, '--config.evals.test.type=clasification'], ['"classification"?']),
    ([DIGITS, '--config.evals.test.type=None'], ["config.evals.test lacks 'type'"]),
    ([DIGITS, '--config.evals.test.every=0'], ['config.evals.test.every=0']),
    ([DIGITS, '--config.evals.test.use_ema=yes'], ['use_ema', 'bool']),
    ([DIGITS, '--config.evals.test.dta=3'], ['evals.test.dta', 'Did you mean "data"?']),
    ([DIGITS, '--config.evals.test.data.split=tset'], ['Did you mean "test"?']),
    ([DIGITS, '--config.evals.test.data.pp=vale_range'], ['"value_range"?']),
    ([DIGITS, '--config.optim.ema=None'], ['test_ema.use_ema needs config.optim.ema']),
    ([DIGITS, '--config.data.source=digist'], ['Did you mean "digits"?']),
    ([DIGITS, '--config.data.source_options=3'], ['source_options=3', 'dict']),
    ([DIGITS, '--config.data.pp=value_range(-1)'], ['value_range']),
    ([DIGITS, '--config.data.pp=value_range('], ['value_range(']),
    ([DIGITS, '--config.model.num_classes=5'], ['labels run from 0 to 9']),
    (['--config=configs/folder.py'], ["data.source is ''"]),
  ],
  ids=lambda value: value[-1].rpartition('config')[2] if value else 'nothing',
)
def test_refused_in_one_line(arguments, words, tmp_path, capfd):
  error = error_of(*arguments, workdir=tmp_path / 'run', capfd=capfd)
  for word in words:
    assert word in error
  assert not (tmp_path / 'run' / 'status.json').exists()


@pytest.mark.skipif(os.geteuid() != 0, reason='a plain user meets permissions first')
@pytest.mark.parametrize('workdir', ['/proc/run', '/sys/run', 's3://bucket/run'])
def test_unwritable_folders(workdir, capfd):
  assert workdir in error_of(DIGITS, workdir=workdir, capfd=capfd)


def test_a_config_without_get_config(tmp_path, capfd):
  file = tmp_path / 'mine.py'
  file.write_text('x = 1\n')
  assert 'get_config' in error_of(f'--config={file}', workdir=tmp_path, capfd=capfd)


def test_missing_sections(tmp_path, capfd):
  file = tmp_path / 'mine.py'
  file.write_text("def get_config(arg):\n  return {'model': {'name': 'vit'}}\n")
  error = error_of(f'--config={file}', workdir=tmp_path, capfd=capfd)
  assert "config lacks the section 'data'" in error


def test_the_run_folder_is_named_after_the_command():
  default = main.default_name
  assert default('configs/vit_b16.py:debug', []) == 'vit_b16-debug'
  assert default('configs/vit_b16.py', ['optim.lr=3e-4']) == 'vit_b16-optim.lr=3e-4'
  changes = ['resume_allow=optim.lr', 'log.every=5']
  assert default('configs/folder.py:data=~/x,res=64', changes) == (
    'folder-data=_x-res=64'
  )
  _, _, workdir = main.parse([DIGITS])
  assert str(workdir) == 'runs/digits-debug'


def test_help_names_the_exit_codes(capsys):
  with pytest.raises(SystemExit, match='0'):
    main.main(['--help'])
  out = capsys.readouterr().out
  for code in (2, 65, 74, 75, 76, 77):
    assert re.search(rf'\b{code} [a-z]', out)


def test_a_config_of_ones_own_from_anywhere(tmp_path):
  shutil.copy(runs.ROOT / 'configs/digits.py', tmp_path / 'mine.py')
  _, config, workdir = main.parse([f'--config={tmp_path}/mine.py:debug'])
  assert config['epochs'] == 0.5
  assert str(workdir) == 'runs/mine-debug'
