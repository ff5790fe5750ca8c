"""The input of `prepare`: folders, tars, lists of labels, and mistakes in them."""

import io
import os
import tarfile

import numpy as np
import pytest

from tests.support import naming
from tests.support.archives import encoded, examples, synsets, write_folder, write_tar
from vit_jax.data import image_file, sources
from vit_jax.data.prepare import imagenet21k, images, manifest, writer
from vit_jax.errors import UserError


def names(directory, split):
  return [name for _, _, name in examples(directory, split)]


def test_a_folder_gives_the_classes_of_the_source_folder(tmp_path):
  files = {
    f'{s}/{c}/{i}.png': encoded(i, 'PNG')
    for s in ('train', 'val')
    for c in 'ba'
    for i in range(3)
  }
  files |= {'train/b/deep/er/9.png': encoded(9, 'PNG'), 'train/b/x.txt': b''}
  root = write_folder(tmp_path / 'pets', files)
  made, result = writer.prepare(images.plan([root], 'pets'), str(tmp_path))
  for split in ('train', 'val'):
    folder = sources.build(f'folder:{root}', split)
    ours = sources.build('tfds:pets', split, data_dir=str(tmp_path))
    assert ours.class_names == folder.class_names
    pairs = [
      sorted((x['image'], int(x['label'])) for x in s.read(np.arange(len(s))))
      for s in (ours, folder)
    ]
    assert pairs[0] == pairs[1]
  assert result['splits']['train']['counts'] == {'a': 3, 'b': 4}
  assert 'train/b/deep/er/9.png' in names(made, 'train')


JPG = encoded(0)


@pytest.mark.parametrize(
  ('tars', 'expected'),
  [
    ({'all.tar': ['cat/1.jpg', 'dog/1.jpg']}, {'train': 'cat dog'}),
    ({'all.tar': ['./top/cat/1.jpg', './top/dog/1.jpg']}, {'train': 'cat dog'}),
    ({'cat.tar': ['1.jpg'], 'dog.tar': ['1.jpg']}, {'train': 'cat dog'}),
    ({'train.tar': ['cat/1.jpg'], 'val.tar': ['cat/1.jpg']}, {'train': 'cat', 'val': 'cat'}),
    ({'x.tar': ['x/test/cat/1.jpg', 'x/train/dog/1.jpg']}, {'test': 'cat', 'train': 'dog'}),
  ],
)  # fmt: skip
def test_the_class_in_a_tar_is_the_folder(tmp_path, tars, expected):
  paths = [
    write_tar(tmp_path / tar, dict.fromkeys(files, JPG)) for tar, files in tars.items()
  ]
  plan = images.plan(paths, 'x')
  _, result = writer.prepare(plan, str(tmp_path / 'A'))
  found = {
    split: ' '.join(c for c, n in record['counts'].items() if n)
    for split, record in result['splits'].items()
  }
  assert found == expected
  # The same, as a folder of tars.
  (tmp_path / 'tars').mkdir()
  for path in paths:
    os.rename(path, tmp_path / 'tars' / os.path.basename(path))
  _, again = writer.prepare(images.plan([f'{tmp_path}/tars'], 'x'), str(tmp_path / 'B'))
  assert again == result


def test_splits_by_name_are_stable(tmp_path):
  files = {f'{c}/{i}.jpg': JPG for c in 'ab' for i in range(100)}
  root = write_folder(tmp_path / 'in', files)
  split = 'train=80%,val=15%,test=5%'
  before, result = writer.prepare(images.plan([root], 'x', split=split), str(tmp_path))
  counts = {s: r['examples'] for s, r in result['splits'].items()}
  # 200 draws: 160, 30, 10 with deviations 5.7, 5.0, 3.1; three of them.
  for name, mean, deviation in (('train', 160, 17), ('val', 30, 15), ('test', 10, 9)):
    assert abs(counts[name] - mean) <= deviation
  write_folder(
    tmp_path / 'in', {f'{c}/new{i}.jpg': JPG for c in 'ab' for i in range(50)}
  )
  plan = images.plan([root], 'x', split=split, version='1.1.0')
  after, _ = writer.prepare(plan, str(tmp_path))
  for name in counts:
    old = names(before, name)
    assert [x for x in names(after, name) if 'new' not in x] == old
  # Both versions are there; the newest is read.
  assert len(sources.build('tfds:x:1.0.0', 'train', data_dir=str(tmp_path))) < len(
    sources.build('tfds:x', 'train', data_dir=str(tmp_path))
  )


LISTS = {
  'plain.csv': 'a.jpg,cat\nsub/b.jpg,dog\n',
  'header.csv': '\ufefffile_name,label\na.jpg,cat\n"sub/b.jpg",dog\n\n',
  'tabs.tsv': 'path\tlabel\na.jpg\tcat\nsub/b.jpg\tdog\n',
  'lines.jsonl': '{"path": "./a.jpg", "label": "cat"}\n{"path": "sub/b.jpg", "label": "dog"}\n',
}  # fmt: skip


@pytest.mark.parametrize('name', LISTS)
@pytest.mark.parametrize('where', ['beside', 'folder', 'tar'])
def test_a_list_of_labels(tmp_path, name, where):
  (tmp_path / name).write_text(LISTS[name])
  files = {'a.jpg': encoded(1), 'sub/b.jpg': encoded(2), 'c.jpg': encoded(3)}
  given = [str(tmp_path / name)]
  if where == 'beside':
    write_folder(tmp_path, files)
  elif where == 'folder':
    given.append(write_folder(tmp_path / 'elsewhere', files))
  else:
    given.append(write_tar(tmp_path / 'images.tar', files))
  made, _ = writer.prepare(images.plan(given, 'x'), str(tmp_path))
  assert sorted(examples(made, 'train')) == [
    (('cat',), files['a.jpg'], 'a.jpg'),
    (('dog',), files['sub/b.jpg'], 'sub/b.jpg'),
  ]


def test_several_labels_and_splits_of_a_list(tmp_path):
  (tmp_path / 'l.csv').write_text(
    'path,label,label,split\na.jpg,3,0,train\nb.jpg,1,,test\n'
  )
  write_folder(tmp_path, {'a.jpg': encoded(1), 'b.jpg': encoded(2)})
  made, result = writer.prepare(images.plan([f'{tmp_path}/l.csv'], 'x'), str(tmp_path))
  assert [x[0] for x in examples(made, 'train')] == [('3', '0')]
  assert result['splits']['train']['none'] == ['1', '2']  # numbers keep their value
  source = sources.build('tfds:x', 'train+test', data_dir=str(tmp_path))
  assert source.features['label'].several
  assert source.num_classes == 4
  assert [list(x['label']) for x in source.read(np.arange(2))] == [[3, 0], [1]]


def test_labels_may_be_none_in_json(tmp_path):
  (tmp_path / 'l.jsonl').write_text(
    '{"path": "a.jpg", "labels": ["x"]}\n{"path": "b.jpg", "labels": []}\n'
  )
  write_folder(tmp_path, {'a.jpg': encoded(1), 'b.jpg': encoded(2)})
  made, _ = writer.prepare(images.plan([f'{tmp_path}/l.jsonl'], 'x'), str(tmp_path))
  assert sorted(x[0] for x in examples(made, 'train')) == [(), ('x',)]


@pytest.mark.parametrize('where', ['folder', 'tar'])
def test_listed_files_that_are_missing_are_reported(tmp_path, where):
  (tmp_path / 'l.csv').write_text('a.jpg,cat\nno.jpg,dog\nbad.jpg,dog\n')
  files = {'a.jpg': encoded(1), 'bad.jpg': b'no image'}
  given = [f'{tmp_path}/l.csv']
  if where == 'tar':
    given.append(write_tar(tmp_path / 'i.tar', files | {'more.jpg': encoded(2)}))
  else:
    write_folder(tmp_path, files)
  _, result = writer.prepare(images.plan(given, 'x'), str(tmp_path))
  assert [f['path'] for f in result['broken']['files']] == ['bad.jpg', 'no.jpg']
  assert result['splits']['train']['none'] == ['dog']
  assert result['skipped']['number'] == (where == 'tar')


def test_a_name_twice_counts_once(tmp_path):
  with tarfile.open(tmp_path / 'x.tar', 'w') as archive:
    for seed in (1, 2):
      data = encoded(seed)
      member = tarfile.TarInfo('cat/1.jpg')
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
  plan = images.plan([f'{tmp_path}/x.tar'], 'x')
  made, result = writer.prepare(plan, str(tmp_path))
  assert [data for _, data, _ in examples(made, 'train')] == [encoded(1)]
  assert result['splits']['train']['counts'] == {'cat': 1}
  assert result['skipped']['files'][0]['reason'] == 'a second file of this name'


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('', ('path,label',)),
    ('a.jpg\n', ('line 1', "'a.jpg'", 'label')),
    (
      'path,label\na.jpg,x\na.jpg,y\n',
      ('line 3', "'a.jpg'", 'line 2', 'path,label,label'),
    ),
    ('path,kind\na.jpg,x\n', ("'kind'", "'path'", "'label'", "'split'")),
    ('a.jpg,"x\ny"\n', ('line 1', r"'x\ny'")),
    (',x\n', ('line 1', 'path')),
    ('path,split,label\na.jpg,,x\nb.jpg,test,x\n', ("'a.jpg'", 'split')),
    ('path,split,label\na.jpg,my split,x\n', ('line 2', "'my split'", "'train'")),
    ('a.jpg,7777777777\n', (7777777777, 'from 0')),
  ],
)
def test_wrong_lists(tmp_path, text, facts):
  (tmp_path / 'l.csv').write_text(text)
  (tmp_path / 'a.jpg').write_bytes(JPG)
  with pytest.raises(UserError, match=naming(f'{tmp_path}/l.csv', *facts)):
    images.plan([f'{tmp_path}/l.csv'], 'x')


def test_only_regular_files_are_opened(tmp_path):
  home = tmp_path / 'photos' / 'a'
  home.mkdir(parents=True)
  (home / '1.jpg').write_bytes(JPG)
  (home / 'loop.jpg').symlink_to('loop.jpg')
  (tmp_path / 'photos' / 'loop').symlink_to('loop')
  os.mkfifo(home / 'f.jpg')
  with open(home / 'huge.jpg', 'wb') as file:
    file.truncate(image_file.MAX_BYTES + 1)
  made, result = writer.prepare(
    images.plan([str(tmp_path / 'photos')], 'x'), str(tmp_path)
  )
  assert len(names(made, 'train')) == 1
  broken = {f['path']: f['reason'] for f in result['broken']['files']}
  assert set(broken) == {f'a/{name}.jpg' for name in ('loop', 'f', 'huge')}
  assert 'FIFO' in broken['a/f.jpg']
  assert f'{image_file.MAX_BYTES:,}' in broken['a/huge.jpg']
  os.mkfifo(tmp_path / 'x.tar')
  with pytest.raises(UserError, match=naming(f'{tmp_path}/x.tar', 'regular file')):
    images.plan([str(tmp_path / 'x.tar')], 'x')


def test_a_huge_member_of_a_tar_is_not_read(tmp_path, monkeypatch):
  monkeypatch.setattr(image_file, 'MAX_BYTES', 2000)
  files = {'a/1.jpg': JPG, 'a/huge.jpg': bytes(2001), 'a/2.jpg': JPG}
  plan = images.plan([write_tar(tmp_path / 'x.tar', files)], 'x')
  reads, extract = [], tarfile.TarFile.extractfile
  recorded = lambda tar, member: reads.append(member.name) or extract(tar, member)
  monkeypatch.setattr(tarfile.TarFile, 'extractfile', recorded)
  kinds = {o.path: o.kind for piece in plan.pieces for o in plan.outcomes(piece)}
  assert kinds['x/a/huge.jpg'] == 'broken'
  assert reads == ['a/1.jpg', 'a/2.jpg']


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('{"path": "a"', ('JSON', 'column 13')),
    ('["a", "b"]', ('"path": "a.jpg"', '"label": "cat"')),
    ('{"path": "a", "label": 1.5}', ('label', 'integer', 'list')),
    ('{"path": "a", "label": "x", "labels": []}', ('label', 'labels')),
    ('{"path": "a", "lable": "x"}', ("'lable'", 'path', 'label', 'split')),
  ],
)
def test_wrong_json_lines(tmp_path, text, facts):
  (tmp_path / 'l.jsonl').write_text(text)
  with pytest.raises(UserError, match=naming('l.jsonl, line 1', *facts)):
    manifest.read(f'{tmp_path}/l.jsonl')


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
@pytest.mark.parametrize('part', [0.3, 0.7, 0.97])
def test_an_archive_that_ends_early_is_an_error(tmp_path, mode, part):
  path = write_tar(tmp_path / 'a.tar', synsets(), mode)
  data = (tmp_path / 'a.tar').read_bytes()
  end = len(data)
  if mode == 'w':  # before the zeros at its end
    end = len(data.rstrip(b'\0'))
  (tmp_path / 'a.tar').write_bytes(data[: int(end * part)])
  with pytest.raises(UserError, match=naming(path, 'again')):
    writer.prepare(imagenet21k.plan(path), str(tmp_path))
  assert not (tmp_path / 'imagenet21k/1.0.0').exists()


def test_a_damaged_header_is_no_end(tmp_path):
  # tarfile takes it for one, in silence.
  path = write_tar(
    tmp_path / 'a.tar',
    {f'{c}/{i}.png': encoded(i, 'PNG') for c in 'ab' for i in range(9)},
  )
  data = bytearray((tmp_path / 'a.tar').read_bytes())
  at = data.index(b'b/3.png')
  data[at + 148 : at + 156] = b'99999999'  # the checksum
  (tmp_path / 'a.tar').write_bytes(data)
  with pytest.raises(UserError, match=naming(path, 'byte', 12288)):
    writer.prepare(images.plan([path], 'x'), str(tmp_path))
