"""Bad input to `main`: one clear line, at once, and exit code 2."""

import os
import re
import shutil

import numpy as np
import pytest

from tests.support import commands, naming, runs
from vit_jax import config, errors, main
from vit_jax.errors import UserError
from vit_jax.train import program

DIGITS = '--config=configs/digits.py:debug'
B16 = '--config=configs/vit_b16.py'


@pytest.fixture(autouse=True)
def no_prepared_data(monkeypatch, tmp_path):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'nothing'))


def error_of(*arguments, workdir, capfd) -> str:
  """Runs a command that is refused, in this process; returns its one line on stderr."""
  argv = (*arguments, f'--workdir={workdir}')
  code, _, error = commands.run(main.main, capfd, *argv)
  assert code == 2
  return commands.one_line(error)


def test_the_hint_is_true(tmp_path):
  # The command named as "the same recipe on bundled data" must not itself lack data.
  with pytest.raises(UserError, match=naming('imagenet21k')) as error:
    main.main([B16, f'--workdir={tmp_path}'])
  command = re.search(r'--config=\S+$', str(error.value))[0]
  _, config, _ = program.parse([command])
  assert config['data']['source'] == 'digits'
  # Those who asked for the bundled data need no hint at them.
  with pytest.raises(UserError, match=naming('trian', 'train')) as error:
    main.main([f'{B16}:debug,train=trian', f'--workdir={tmp_path}'])
  assert 'debug' not in str(error.value)
  # Nor do those whose own images are not as they should be.
  (tmp_path / 'photos' / 'train' / 'cat').mkdir(parents=True)
  for data in (tmp_path / 'photos', tmp_path / 'fotos'):
    with pytest.raises(UserError, match=naming(data)) as error:
      main.main([f'--config=configs/folder.py:data={data}', f'--workdir={tmp_path}'])
    assert 'debug' not in str(error.value)


# -- every other slip, in this process -------------------------------------------------


@pytest.mark.parametrize(
  ('arguments', 'facts'),
  [
    ([], ('--config', '--help')),
    (['--config=configs/digist.py'], ('digist.py', 'configs/digits.py')),
    (['--config=digist'], ("'digist'", 'Did you mean "digits"', 'vit_b16', 'FILE.py')),
    (['--config=elsewhere/digits.py'], ('elsewhere/digits.py', 'mean "digits"')),
    ([DIGITS, '--wrokdir=x'], ("'--wrokdir=x'", '--workdir')),
    ([DIGITS, '--config.optim.lr', '1'], ("'1'", '--config.KEY=VALUE')),
    ([DIGITS, '--steps=9'], ("'--steps=9'", '"--config.steps"')),
    ([DIGITS, '--num_workers=9'], ('"--config.data.workers"',)),
    ([DIGITS, '--batchsize', '9'], ("'--batchsize'", '"--config.data.batch_size"')),
    ([DIGITS, '--config.data.batch_size=12'], ('batch_size=12', 8)),
    ([DIGITS, '--config.optim.accum=3'], ('batch_size=64', 24, 'optim.accum')),
    ([DIGITS, '--config.optim.schedule.warmup=500'], ('warmup', 500, ':warmup=N')),
    ([DIGITS, '--config.model.variant=B'], ("'B'", 'SIZE/PATCH')),
    ([DIGITS, '--config.evals.test.data.split=tset'], ("'tset'", "'test'")),
    ([DIGITS, '--config.optim.ema=None'], ('test_ema.use_ema', 'config.optim.ema')),
    ([DIGITS, '--config.model.num_classes=5'], ('0 to 9', 'num_classes=5')),
    (['--config=folder'], ("data.source is ''", 'folder:PATH')),
    (
      ['--config=folder:data=/no/such/folder'],
      ("'/no/such/folder'", 'folder:PATH'),
    ),
  ],
  ids=lambda value: str(value[-1]).rpartition('config')[2] if value else 'nothing',
)
def test_refused_in_one_line(arguments, facts, tmp_path, capfd):
  error = error_of(*arguments, workdir=tmp_path / 'run', capfd=capfd)
  assert re.search(naming(*facts), error)
  assert not (tmp_path / 'run' / 'status.json').exists()


def test_a_label_out_of_range(tmp_path, capfd):
  file = tmp_path / 'twelve.npz'
  images = np.zeros((24, 8, 8, 1), np.uint8)
  np.savez(file, images=images, labels=np.arange(24) % 12)
  arguments = [DIGITS, f'--config.data.source=arrays:{file}']
  arguments.append('--config.model.num_classes=10')
  error = error_of(*arguments, workdir=tmp_path / 'run', capfd=capfd)
  assert re.search(naming('0 to 11', '0 to 9', 'twelve.npz#10', 'label 10'), error)


def test_a_file_where_the_folder_goes(tmp_path, capfd):
  (tmp_path / 'file').touch()
  workdir = f'{tmp_path}/file/run'
  error = error_of(DIGITS, workdir=workdir, capfd=capfd)
  assert re.search(naming(workdir, '--workdir'), error)


@pytest.mark.skipif(os.geteuid() != 0, reason='a plain user meets permissions first')
@pytest.mark.parametrize('workdir', ['/proc/run', '/sys/run', 's3://bucket/run'])
def test_unwritable_folders(workdir, capfd):
  assert workdir in error_of(DIGITS, workdir=workdir, capfd=capfd)


def test_the_run_folder_is_named_after_the_command():
  default = program.default_name
  assert default('configs/vit_b16.py:debug', []) == 'vit_b16-debug'
  assert default('configs/vit_b16.py', ['optim.lr=3e-4']) == 'vit_b16-optim.lr=3e-4'
  changes = ['resume_allow=optim.lr', 'log.every=5']
  assert default('configs/folder.py:data=~/x,res=64', changes) == (
    'folder-data=_x-res=64'
  )
  for spec in ('digits:debug', 'configs/digits.py:debug'):
    _, _, workdir = program.parse([f'--config={spec}'])
    assert str(workdir) == 'runs/digits-debug'


def test_the_names_of_run_folders_do_not_grow_for_ever():
  default = program.default_name
  source, names = 'runs/folder-data=photos-variant=S_16-res=224', []
  for _ in range(4):  # fine-tuned from one another
    name = default(f'finetune:weights={source}@best,data=flowers,res=384', [])
    source = f'runs/{name}'
    names.append(name)
  assert len(set(names)) == 4
  for name in names[1:]:
    assert len(name) <= 100
    assert re.fullmatch(r'finetune-weights=runs_.*-[0-9a-f]{8}', name)
  # The same command gives the same folder, a different command a different one.
  long = [f'optim.{"x" * 90}={i}' for i in range(3)]
  assert default('digits', long) == default('digits', long)
  assert default('digits', long) != default('digits', long[:2] + ['optim.x=7'])
  assert len(default('digits', [f'optim.lr{i}=1' for i in range(90)])) <= 100


def test_help_names_the_exit_codes_and_the_configs(capsys):
  with pytest.raises(SystemExit, match='0'):
    main.main(['--help'])
  out = capsys.readouterr().out
  for path in config.recipes().values():
    assert re.search(naming(path.stem), out)
  for code, meaning in errors.EXIT_CODES.items():
    assert f'{code} {meaning}' in out
  kinds = [k for k in vars(errors).values() if isinstance(k, type)]
  codes = {kind.exit_code for kind in kinds if kind is not errors.RunError}
  assert codes <= set(errors.EXIT_CODES)


def test_a_config_by_name_from_anywhere(tmp_path, monkeypatch):
  shutil.copy(runs.ROOT / 'configs/digits.py', tmp_path / 'mine.py')
  _, own, workdir = program.parse([f'--config={tmp_path}/mine.py:debug'])
  assert own['epochs'] == 0.5
  assert str(workdir) == 'runs/mine-debug'
  here = config.load('configs/vit_b16.py:variant=L/16')
  monkeypatch.chdir(tmp_path)
  assert config.load('vit_b16:variant=L/16') == here
  (tmp_path / 'vit_b16.py').write_text("def get_config(arg):\n  return {'mine': 1}\n")
  assert config.load('vit_b16.py') == {'mine': 1}
  assert config.load('vit_b16:variant=L/16') == here  # a name is not a file
