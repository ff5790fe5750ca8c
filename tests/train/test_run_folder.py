"""The files of a run's folder, damaged in every way: one clear line, or rebuilt."""

import json
import os
import re
import shutil

import pytest
from PIL import Image

from tests.support import naming, runs
from vit_jax import cli, run_config
from vit_jax.data import bad_images
from vit_jax.errors import UserError
from vit_jax.tools import predict
from vit_jax.tools.inspect import source
from vit_jax.train import rows, status

DAMAGE = {
  'empty': b'',
  'NUL': bytes(64),
  'not UTF-8': b'{"step": "\xff\xfe"}',
  'a list': b'[1, 2]',
  'null': b'null',
  'a number': b'3',
  'other keys': b'{"a": 1}',
  'wrong types': b'{"step": [], "state": 3, "model": 5, "resolved": "x", "evals": 1}',
  'deep': b'[' * 100_000,
}
# What a config must hold for its readers, each of another type.
WRONG = {
  'model': {'name': 3},
  'resolved': {'image_shape': [8, 8]},
  'evals': {'test': 3},
  'optim': [],
}


pytestmark = pytest.mark.usefixtures('one_device')


def again(workdir, *changes):
  return runs.run(workdir, *runs.SHORT, *changes)


@pytest.fixture
def finished(short_run, tmp_path):
  return shutil.copytree(short_run, tmp_path / 'run')


@pytest.mark.parametrize('damage', [*DAMAGE, 'gone', 'half'])
def test_a_lost_config_is_that_of_the_checkpoints(finished, capfd, damage):
  path = finished / 'config.json'
  before = path.read_bytes()
  path.write_bytes(DAMAGE.get(damage, before[: len(before) // 2]))
  if damage == 'gone':
    path.unlink()
  # For a tool that reads the folder it is one line.
  with pytest.raises(UserError, match=naming(path)) as error:
    run_config.read(finished)
  assert '\n' not in str(error.value)
  # Other mathematics is still refused, and the same is told its results.
  with pytest.raises(UserError, match=naming('optim.lr', 0.003, 0.5)):
    again(finished, 'optim.lr=0.5')
  capfd.readouterr()
  assert again(finished)[0] == runs.status(finished)
  assert path.read_bytes() == before
  error = capfd.readouterr().err
  assert re.search(naming(path, 'checkpoints'), error)
  assert error.count('\n') == 1


@pytest.mark.parametrize('section', WRONG)
def test_sections_of_another_type(finished, section):
  path = finished / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {section: WRONG[section]}))
  with pytest.raises(UserError, match=naming(path, section)):
    run_config.read(finished)


def test_a_tool_says_one_line(finished, tmp_path, capsys):
  (finished / 'config.json').write_bytes(DAMAGE['NUL'])
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  assert cli.run(predict.main, [str(finished), str(tmp_path / 'x.png')]) == 2
  error = capsys.readouterr().err
  assert re.search(naming(finished / 'config.json'), error)
  assert error.count('\n') == 1


@pytest.mark.parametrize(
  'name', ['config.json', 'status.json', 'metrics.jsonl', 'bad_images.jsonl']
)
@pytest.mark.parametrize('make', [os.mkdir, os.mkfifo])
def test_something_else_in_a_files_place(finished, name, make):
  (finished / name).unlink(missing_ok=True)
  make(finished / name)
  with pytest.raises(UserError, match=naming(finished / name, '--workdir')):
    again(finished)
  if name == 'config.json':
    with pytest.raises(run_config.Unreadable, match=naming(finished / name)):
      run_config.read(finished)


def test_a_file_in_the_place_of_the_checkpoints(finished):
  shutil.rmtree(finished / 'checkpoints')
  (finished / 'checkpoints').touch()
  with pytest.raises(UserError, match=naming(finished / 'checkpoints', '--workdir')):
    again(finished)


@pytest.mark.parametrize('damage', ['a list', 'deep'])
def test_a_damaged_status_is_inspected(finished, damage):
  (finished / 'status.json').write_bytes(DAMAGE[damage])
  assert source.describe(str(finished), {})['state'] is None


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_status_is_none(tmp_path, damage):
  assert status.read(tmp_path) is None
  (tmp_path / 'status.json').write_bytes(DAMAGE[damage])
  assert status.read(tmp_path) is None


@pytest.mark.parametrize('damage', [d for d in DAMAGE if d != 'empty'])
def test_damaged_rows_are_left_out(tmp_path, damage):
  path = tmp_path / 'metrics.jsonl'
  good = [{'step': 1, 'a': 0.5}, {'step': 2, 'a': 1}]
  first, second = (rows.line(row).encode() for row in good)
  path.write_bytes(first + DAMAGE[damage] + b'\n' + second)
  assert rows.read_checked(path) == (good, 1)
  path.write_bytes(first + second + second[:6])  # a kill's
  assert rows.read_checked(path) == (good, 0)


def test_damaged_lines_of_bad_images(tmp_path):
  path = tmp_path / 'bad_images.jsonl'
  path.write_bytes(b'\n'.join([*DAMAGE.values(), b'{"path": "x"}']))
  assert bad_images.read_log(path) == [{'path': 'x'}]


def test_all_at_once_is_rebuilt(finished, capfd):
  before = runs.status(finished), runs.rows(finished)
  files = [finished / name for name in ('config.json', 'status.json', 'metrics.jsonl')]
  first, *_ = lines = files[2].read_bytes().splitlines(keepends=True)
  for path in files:
    path.write_bytes(DAMAGE['not UTF-8'])
  files[2].write_bytes(b''.join([first, b'\xff\n', *lines[2:]]))
  result, _ = again(finished)
  assert (result, runs.status(finished)) == (before[0], before[0])
  assert runs.rows(finished) == [before[1][0], *before[1][2:]]
  error = capfd.readouterr().err
  assert re.search(naming(*files), error)
  assert error.count('\n') == 3
  assert again(finished)[0] == before[0]
