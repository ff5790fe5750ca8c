"""The tool `prepare`, from an archive to batches; its exit codes and messages."""

import json
import re
import tarfile

import numpy as np
import pytest

from tests.support import archives, commands, naming
from tests.support.archives import CLASSES, EACH, add, jpeg
from vit_jax import cli
from vit_jax.data import pipeline
from vit_jax.data.prepare import writer
from vit_jax.errors import DiskFull
from vit_jax.tools import prepare


def run(*args):
  return cli.run(prepare.main, [str(a) for a in args])


@pytest.fixture(scope='module')
def archive(tmp_path_factory):
  path = tmp_path_factory.mktemp('in') / 'winter21_whole.tar.gz'
  archives.imagenet21k(path)
  return path


def test_imagenet21k_from_archive_to_batches(archive, tmp_path, monkeypatch, capsys):
  args = ('imagenet21k', '--from', archive, '--data_dir', tmp_path)
  assert run(*args, '--json') == 0
  record = json.loads(capsys.readouterr().out)  # and nothing else
  assert record['num_classes'] == CLASSES
  bad = {
    file['path'].rpartition('_')[2]: file['reason']
    for file in record['broken']['files']
  }
  assert 'empty' in bad['empty.JPEG']
  assert 'truncated' in bad['broken.JPEG']
  full = json.loads((tmp_path / 'imagenet21k/1.0.0/report.json').read_text())
  assert set(full['splits']['full']['counts'].values()) == {EACH}
  text = (tmp_path / 'imagenet21k/1.0.0/report.txt').read_text()
  assert re.search(naming('full', '2,000 images'), text)
  assert '       100  n00001000\n' in text

  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  pp = 'decode|resize(8)|value_range(-1, 1)'
  batches = pipeline.train('tfds:imagenet21k', 'full', pp, 250)
  assert batches.num_examples == CLASSES * EACH
  assert batches.class_names == [f'n{1000 + 37 * c:08d}' for c in range(CLASSES)]
  assert batches.fingerprint
  epoch = [b for _, b in zip(range(8), batches.iterate(), strict=False)]
  labels = np.concatenate([b['label'] for b in epoch])
  assert np.bincount(labels).tolist() == [EACH] * CLASSES
  assert all(b['mask'].all() for b in epoch)
  # Every image under its own class's label; JPEG keeps a grey to a level or two.
  shown = np.concatenate([b['image'].mean((1, 2, 3)) for b in epoch])
  if epoch[0]['image'].dtype != np.uint8:
    shown = (shown + 1) * 127.5
  assert np.abs(shown - (10 * labels + 20)).max() <= 2
  # A part is a random one: 100 of 2,000 miss a class of 20 in 12 of 1,000 draws.
  part = pipeline.train('tfds:imagenet21k', 'full[:100]', pp, 100)
  (batch,) = [b for _, b in zip(range(1), part.iterate(), strict=False)]
  assert len(set(batch['label'].tolist())) >= 18

  assert run(*args) == 2
  assert re.search(naming('imagenet21k/1.0.0', '--version'), capsys.readouterr().err)
  assert run(*args, '--version', '1.1.0') == 0


def test_images_of_a_list_in_a_tar(tmp_path, capsys):
  with tarfile.open(tmp_path / 'i.tar', 'w') as tar:
    for i in range(8):
      add(tar, f'{i}.jpg', jpeg(9, 9, 20 * i))
  (tmp_path / 'l.tsv').write_text(''.join(f'{i}.jpg\t{i % 2}\n' for i in range(8)))
  given = ('--from', tmp_path / 'l.tsv', tmp_path / 'i.tar', '--name', 'pets')
  args = ('images', *given, '--data_dir', tmp_path, '--split', 'train=50%,val=50%')
  assert run(*args, '--file_format', 'tfrecord', '--json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['directory'] == str(tmp_path / 'pets/1.0.0')
  assert sum(split['examples'] for split in record['splits'].values()) == 8
  assert set(record['splits']) == {'train', 'val'}


@pytest.fixture
def folder(tmp_path):
  for name in ('a', 'b'):
    (tmp_path / 'in' / name).mkdir(parents=True)
    (tmp_path / 'in' / name / '1.jpg').write_bytes(jpeg(9, 9, 50))
  return tmp_path / 'in'


@pytest.mark.parametrize(
  ('args', 'facts'),
  [
    ('imagenet21k --from {}/no.tar', ('/no.tar',)),
    ('imagenet21k --from {}/empty.tar.gz', ('/empty.tar.gz', '0 bytes')),
    ('imagenet21k --from {}/text.tar', ('/text.tar',)),
    ('imagenet21k --from {}/zeros.tar', ('/zeros.tar', 'WordNet')),
    ('imagenet21k --from {}/in', ('/in', 'WordNet')),
    ('images --from {}/no --name x', ('/no',)),
    ('images --from {}/no.csv --name x', ('/no.csv',)),
    ('images --from {}/text.txt --name x', ('/text.txt', 'folder', 'tars')),
    ('images --from {}/zeros.tar --name x', ('image',)),
    ('images --from {}/in/a --name x', ('/in/a', 'class')),
    ('images --from {}/in --name My-Pets', ('My-Pets', 'my_pets')),
    ('images --from {}/in --name x --version 1', ("'1'", 'X.Y.Z')),
    ('images --from {}/in --name x --split train=90', ('train=90',)),
    ('images --from {}/in --name x --max_side 0', ('--max_side', '0', '512')),
    ('images --from {}/in --name x --split train=90%,val=20%', (110,)),
    (
      'images --from {}/in --name x --split train=50%,train=50%',
      ('train=50%,train=50%',),
    ),
    (
      'images --from {}/in --name x --beam_pipeline_options a=b',
      ('--beam_pipeline_options', '--beam_runner'),
    ),
    ('images --from {}/in', ('--name',)),
    ('imagnet --from {}/in', ("'imagnet'", 'imagenet21k')),
    ('', ('DATA_SET',)),
  ],
)
def test_what_is_wrong_is_said_at_once(folder, tmp_path, capsys, args, facts):
  (tmp_path / 'empty.tar.gz').write_bytes(b'')
  (tmp_path / 'text.tar').write_text('no tar' * 500)
  (tmp_path / 'text.txt').write_text('a')
  (tmp_path / 'zeros.tar').write_bytes(bytes(10240))
  args = args.format(*[tmp_path] * args.count('{}')).split()
  if args:
    args += ['--data_dir', tmp_path / 'D']
  commands.assert_refused(prepare.main, capsys, args, facts)
  assert not list((tmp_path / 'D').rglob('*.*'))


def test_splits_of_folders_and_shares_exclude_each_other(folder, tmp_path, capsys):
  (folder / 'a').rename(folder / 'train')
  (folder / 'train/cat').mkdir()
  (folder / 'train/1.jpg').rename(folder / 'train/cat/1.jpg')
  args = ('--from', folder, '--name', 'x', '--data_dir', tmp_path)
  assert run('images', *args, '--split', 'train=50%,val=50%') == 2
  assert re.search(naming('--split', "'train'"), capsys.readouterr().err)


def test_exit_codes_of_ends_that_keep_what_is_done(
  folder, tmp_path, monkeypatch, capsys
):
  args = ('images', '--from', folder, '--name', 'x', '--data_dir', tmp_path)

  def stopped(*args, **kwargs):
    raise KeyboardInterrupt

  def full(*args, **kwargs):
    raise DiskFull('no room')

  for end, code in ((stopped, 75), (full, 74)):
    monkeypatch.setattr(writer, 'prepare', end)
    assert run(*args) == code
  monkeypatch.undo()
  assert re.search(naming('command'), capsys.readouterr().err)
  assert run(*args) == 0
