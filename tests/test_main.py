"""Bad input to `main`: one clear line, at once, and exit code 2."""

import re
import shlex
import shutil

import numpy as np
import pytest

from tests.support import commands, naming, runs
from vit_jax import config, errors, main
from vit_jax.errors import UserError
from vit_jax.train import program

DIGITS = '--config=digits:debug'
B16 = '--config=configs/vit_b16.py'


@pytest.fixture(autouse=True)
def no_prepared_data(monkeypatch, tmp_path):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'nothing'))


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


KEY = f'{DIGITS} --config.'

# (arguments, words of the error); without --workdir among them it is `run`.
REFUSED = [
  ('', ('--config', '--help')),
  ('--config=configs/digist.py', ('digist.py', 'configs/digits.py')),
  ('--config=digist', ("'digist'", 'Did you mean "digits"', 'vit_b16', 'FILE.py')),
  ('--config=elsewhere/digits.py', ('elsewhere/digits.py', 'mean "digits"')),
  ('--config=folder', ("data.source is ''", 'folder:data=FOLDER', 'folder:PATH')),
  ('--config=folder:data=/no/such/folder', ("'/no/such/folder'", 'folder:PATH')),
  (f'{DIGITS} --wrokdir=x', ("'--wrokdir=x'", '--workdir')),
  (f'{DIGITS} --config.optim.lr 1', ("'1'", '--config.KEY=VALUE')),
  (f'{DIGITS} --steps=9', ("'--steps=9'", '"--config.steps"')),
  (f'{DIGITS} --tune.method=lora', ('mean "--config.tune.method"',)),
  (f'{DIGITS},tune.method=lora', ("'tune.method=lora'", '--config.tune.method=lora')),
  ('--config=folder:data=photos/cat', ('photos/cat/CLASS/1.jpg',)),
  (f'{DIGITS} --num_workers=9', ('"--config.data.workers"',)),
  (f'{DIGITS} --batchsize 9', ("'--batchsize'", '"--config.data.batch_size"')),
  (f'{KEY}optim.lrr=1', ('config.optim.lrr', 'mean "lr"')),
  (f'{KEY}data.batch_size=12', ('batch_size=12', 8)),
  (f'{KEY}optim.accum=3', ('batch_size=64', 24, 'optim.accum')),
  (f'{KEY}optim.schedule.warmup=500', ('warmup', 500, ':warmup=N')),
  (f'{KEY}model.variant=B', ("'B'", 'SIZE/PATCH')),
  (f'{KEY}evals.test.data.split=tset', ("'tset'", "'test'")),
  (f'{KEY}optim.ema=None', ('test_ema.use_ema', 'config.optim.ema')),
  (f'{KEY}model.num_classes=5', ('0 to 9', 'num_classes=5')),
  (f'{KEY}data.source=arrays:twelve.npz --config.model.num_classes=10',
   ('0 to 11', '0 to 9', 'twelve.npz#10', 'label 10')),
  (f'{DIGITS} --workdir=file', ('file', '--workdir')),
  (f'{DIGITS} --workdir=file/run', ('file/run', '--workdir')),
  (f'{DIGITS} --workdir=photos', ("'cat'", '--workdir')),
  (f'{DIGITS} --workdir=s3://bucket/run', ('s3://bucket/run',)),
  # A plain user meets permissions first.
  (f'{DIGITS} --workdir=/proc/run', ('/proc/run', '--workdir')),
  (f'{DIGITS} --workdir=/sys/run', ('/sys/run',)),
]  # fmt: skip


@pytest.mark.parametrize(('arguments', 'words'), REFUSED)
def test_refused_in_one_line(arguments, words, tmp_path, capfd, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'photos/cat').mkdir(parents=True)
  (tmp_path / 'file').touch()
  (tmp_path / 'configs').symlink_to(runs.ROOT / 'configs')
  images = np.zeros((24, 8, 8, 1), np.uint8)
  np.savez(tmp_path / 'twelve.npz', images=images, labels=np.arange(24) % 12)
  argv = shlex.split(arguments)
  if '--workdir' not in arguments:
    argv.append('--workdir=run')
  code, _, error = commands.run(main.main, capfd, *argv)
  assert code == 2
  assert re.search(naming(*words), commands.one_line(error)), error
  assert not (tmp_path / 'run' / 'status.json').exists()
  assert [path.name for path in (tmp_path / 'photos').iterdir()] == ['cat']


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
