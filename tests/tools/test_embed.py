"""Features of folders of images in Parquet, and the search in them."""

import json
import os
import shutil
import signal
import sys

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support import GOLDEN, commands, image_folder, pairs, runs
from vit_jax import sharding, weights
from vit_jax.tools import embed, feature_file, search

SOURCE = str(GOLDEN / 'vit_google_token.npz')
NAMES = [
  *map('{}.png'.format, range(6)),
  '<b>.png',
  *map('sub/{}.jpg'.format, range(5)),
]

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def folder(tmp_path):
  """Twelve images in a folder and one below it; besides, one that is none."""
  folder = image_folder.write_noise(tmp_path / 'images', NAMES, (5, 6), (60, 50))
  (folder / 'bad.png').write_text('no image')
  return folder


@pytest.fixture
def call(capfd):
  """Runs `embed` or `search` with --json; returns what it prints."""

  def run(tool, *argv):
    code, out, error = commands.run(tool.main, capfd, *argv, '--json')
    assert code == 0, error
    return json.loads(out)

  return run


@pytest.fixture
def refused(capfd):
  """Asserts that `embed` or `search` ends with one line that names all facts."""
  return lambda tool, argv, *facts: commands.assert_refused(
    tool.main, capfd, argv, facts
  )


def array(path, layer, shape):
  column = pq.read_table(path)[layer].combine_chunks()
  return column.flatten().to_numpy().reshape(shape)


def outputs(folder, names):
  loaded = weights.load(SOURCE)
  images = loaded.preprocess([folder / name for name in names])
  return jax.jit(loaded.model.apply)(loaded.variables, images)[1]


def test_a_row_per_image_and_how_it_was_computed(folder, tmp_path, call, monkeypatch):
  monkeypatch.undo()  # on eight devices
  out = tmp_path / 'new' / 'f.parquet'
  shutil.copy(folder / '0.png', os.fsencode(folder) + b'/\xff.png')
  printed = call(embed, SOURCE, folder, '--out', out, '--batch', 5)
  bad = printed['bad_images']
  assert [x['path'] for x in bad] == ['bad.png', '\udcff.png']
  assert 'not an image' in bad[0]['reason']
  assert 'UTF-8' in bad[1]['reason']
  assert printed['images'] == printed['new'] == 12
  table = pq.read_table(out)
  assert table['path'].to_pylist() == NAMES
  # float32, other batches: a few roundings of numbers around 1
  expected = outputs(folder, NAMES)['pre_logits']
  np.testing.assert_allclose(array(out, 'pre_logits', (12, 48)), expected, atol=1e-5)
  record = json.loads(table.schema.metadata[b'vit_jax'])
  assert record['bad_images'] == bad
  assert record['recipe']['pp'] == weights.load(SOURCE).pp
  assert record['recipe']['image_size'] == [32, 32]
  assert record['recipe']['layers'] == {'pre_logits': [48]}
  assert (record['source'], record['folder']) == (SOURCE, f'{folder}/')
  assert not (tmp_path / 'new' / 'f.parquet.parts').exists()


def test_a_row_per_patch(folder, tmp_path, call, refused):
  out = tmp_path / 'f.parquet'
  call(embed, SOURCE, folder, '--out', out, '--layer', 'block00,encoded,stem')
  table, expected = pq.read_table(out), outputs(folder, NAMES)
  assert table.column_names == ['path', 'y', 'x', 'block00', 'encoded', 'stem']
  assert table['path'].to_pylist() == [name for name in NAMES for _ in range(16)]
  assert table['y'].to_pylist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3] * 12
  assert table['x'].to_pylist() == [0, 1, 2, 3] * 48
  for layer in ('block00', 'stem'):  # The class token is the first of its layer
    patches = np.reshape(expected[layer], (12, -1, 48))[:, -16:]
    np.testing.assert_allclose(array(out, layer, (12, 16, 48)), patches, atol=1e-5)
  refused(search, [out, folder], out, 'patch', 'pre_logits')
  half = tmp_path / 'half.parquet'
  call(embed, SOURCE, folder, '--out', half, '--layer', 'stem', '--half')
  np.testing.assert_array_equal(
    array(half, 'stem', -1), array(out, 'stem', -1).astype(np.float16)
  )


def test_patches_are_without_registers(golden):
  expected = golden('dinov2_reg4_swiglu_original.expected')
  loaded = weights.load(str(GOLDEN / 'dinov2_reg4_swiglu_original'), num_heads=2)
  function, shapes = embed.extractor(loaded, ['encoded'])
  assert shapes == {'encoded': [4, 4, 32]}
  maps = jax.jit(function)(loaded.variables, {'image': expected['image']})['encoded']
  # The authors' order: a class token, four registers, patches. Tolerance as of the reader.
  patches = expected['tokens'][:, 5:].reshape(maps.shape)
  np.testing.assert_allclose(maps, patches, atol=1e-4)


# Writes a part for each batch, and ends the process when there are two.
KILLED = """
import itertools, os, sys, types
from vit_jax import cli, files
from vit_jax.tools import embed, feature_file
feature_file.time = types.SimpleNamespace(monotonic=itertools.count(step=100).__next__)
replace = files.replace
def then_die(path, write):
  replace(path, write)
  if path.name == '000001.parquet':
    (path.parent / '000002.parquet.9.tmp').write_text('half a part')
    os.kill(os.getpid(), 9)
files.replace = then_die
sys.exit(cli.run(embed.main))
"""


def test_a_killed_run_continues_without_duplicates_or_gaps(
  folder, tmp_path, call, monkeypatch
):
  out, whole = tmp_path / 'f.parquet', tmp_path / 'whole.parquet'
  argv = [SOURCE, folder, '--batch', 3, '--out']
  call(embed, *argv, whole)
  killed = commands.python('-c', KILLED, *argv, out, XLA_FLAGS=runs.one_device())
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert not out.exists()
  # The next run is killed between joining the parts and deleting them.
  monkeypatch.setattr(shutil, 'rmtree', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    embed.main([str(arg) for arg in [*argv, out]])
  monkeypatch.undo()
  runs.on_one_device(monkeypatch)
  assert len([*(tmp_path / 'f.parquet.parts').glob('*.parquet')]) == 3
  again = call(embed, *argv, out)
  assert (again['images'], again['new']) == (12, 0)
  assert pq.read_table(out).equals(pq.read_table(whole), check_metadata=True)
  # The locks stay, so that no process deletes the file that another one has locked.
  locks = {f'.{name}.lock' for name in (out.name, whole.name)}
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {'images', out.name, whole.name, *locks}
  # Neither are images of a file that was written as one part taken again.
  one = tmp_path / 'one.parquet'
  monkeypatch.setattr(shutil, 'rmtree', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    embed.main([str(arg) for arg in [*argv, one]])
  monkeypatch.undo()
  runs.on_one_device(monkeypatch)
  call(embed, *argv, one)
  assert pq.read_table(one).equals(pq.read_table(whole))
  # New images are added; one that is mended, too.
  shutil.copy(folder / '0.png', folder / 'zebra.png')
  shutil.copy(folder / '0.png', folder / 'bad.png')
  assert call(embed, *argv, out)['new'] == 2
  table = pq.read_table(out)
  assert table['path'].to_pylist() == [*NAMES, 'bad.png', 'zebra.png']
  assert json.loads(table.schema.metadata[b'vit_jax'])['bad_images'] == []


def test_another_recipe_or_process_is_refused(folder, tmp_path, call, refused):
  out = tmp_path / 'f.parquet'
  call(embed, SOURCE, folder, '--out', out)
  argv = [SOURCE, folder, '--out', out]
  before = out.read_bytes()
  for more, facts in (
    (['--half'], ('numbers', 'float32', 'float16')),
    (['--layer', 'encoded'], ('layers', 'pre_logits', 'encoded')),
    (['--pp', 'decode|resize(32)|value_range(0, 1)'], ('pp', 'value_range(0, 1)')),
  ):
    refused(embed, [*argv, *more], out, *facts)
    assert not (tmp_path / 'f.parquet.parts').exists()
  other = shutil.copytree(folder, tmp_path / 'other')  # images of the same names
  refused(embed, [SOURCE, other, '--out', out], out, 'folder', f'{other}/')
  assert out.read_bytes() == before
  damaged = bytearray(before)
  damaged[before.index(array(out, 'pre_logits', -1)[:4].tobytes())] ^= 1
  (tmp_path / 'g.parquet').write_bytes(damaged)
  near = [tmp_path / 'g.parquet', '--near_duplicates', 0.9]
  refused(search, near, 'g.parquet', 'damaged')
  record = json.loads(pq.read_schema(out).metadata[b'vit_jax'])
  record['bad_images'] = None
  lock = tmp_path / '.f.parquet.lock'
  number = lock.stat().st_ino
  with feature_file.writing(out, record):
    refused(embed, argv, out, 'process')
  assert lock.stat().st_ino == number


def test_files_that_embed_did_not_write_are_refused(folder, tmp_path, call, refused):
  out, edited = tmp_path / 'f.parquet', tmp_path / 'edited.parquet'
  call(embed, SOURCE, folder, '--out', out)
  table = pq.read_table(out)
  record = json.loads(table.schema.metadata[b'vit_jax'])
  keys = ('recipe', 'source', 'folder', 'options')
  records = [[], None, record | {'options': {'skip': ['head']}}]
  records += [{k: x for k, x in record.items() if k != key} for key in keys]
  for recipe in (
    {'layers': {}},
    {'layers': {'pre_logits': []}},
    {'image_size': []},
    {'pp': None},
    {'numbers': 'int8'},
  ):
    records.append(record | {'recipe': record['recipe'] | recipe})
  rows, kind = table['pre_logits'].to_pylist(), table.schema.field('pre_logits').type
  tables = [
    table[:0],
    table.drop_columns(['path']),
    table.drop_columns(['pre_logits']),
    table.append_column('path', table['path']),
    table.set_column(0, 'path', pa.array([None, *NAMES[1:]])),
    table.set_column(0, 'path', pa.array([*range(12)])),
    table.set_column(0, 'path', pa.array([NAMES[0], *NAMES[:-1]])),
    table.set_column(1, 'pre_logits', pa.array([row[1:] for row in rows])),
    table.set_column(1, 'pre_logits', pa.array([None, *rows[1:]], kind)),
  ]
  cases = [(table, other) for other in records] + [(other, record) for other in tables]
  for columns, metadata in cases:
    metadata = {'vit_jax': json.dumps(metadata)}
    pq.write_table(columns.replace_schema_metadata(metadata), edited)
    refused(search, [edited, '--near_duplicates', 0.9], edited)
  # 20 kB that decompress to 300 MB.
  zeros = pa.array([[0.0] * 48], kind).take(pa.array(np.zeros(100_000, int)))
  table = pa.Table.from_arrays([['a'] * 100_000, zeros], schema=table.schema)
  with pq.ParquetWriter(edited, table.schema, compression='zstd') as writer:
    for _ in range(16):
      writer.write_table(table)
  refused(search, [edited, '--near_duplicates', 0.9], edited, 'decompress')


def test_rows_that_are_not_finite_are_left_out(
  folder, tmp_path, call, capfd, refused, monkeypatch
):
  out = tmp_path / 'f.parquet'
  call(embed, SOURCE, folder, '--out', out)
  table = pq.read_table(out)
  rows, kind = table['pre_logits'].to_pylist(), table.schema.field('pre_logits').type
  rows[3], rows[5] = [np.nan] * 48, [*rows[5][:-1], np.inf]
  pq.write_table(table.set_column(1, 'pre_logits', pa.array(rows, kind)), out)
  result = call(search, out, folder / '0.png', '--top', 20)
  assert result['not_finite'] == 2
  paths = [x['path'] for x in result['queries'][0]['images']]
  assert paths[0] == str(folder / '0.png')
  assert set(paths) == {str(folder / x) for x in {*NAMES} - {NAMES[3], NAMES[5]}}
  call(search, out, '--near_duplicates', 0.1)
  # `embed` leaves them out; features of 10**6 exceed float16.
  with np.load(SOURCE) as file:
    arrays = dict(file)
  arrays['Transformer/encoder_norm/scale'] *= np.float32(1e6)
  np.savez(tmp_path / 'large.npz', **arrays)
  argv = [tmp_path / 'large.npz', folder, '--out', tmp_path / 'g.parquet']
  refused(embed, [*argv, '--half'], 'float16', '--half')
  assert call(embed, *argv)['images'] == 12
  # A query is named.
  function, shapes = embed.extractor(weights.load(SOURCE), ['pre_logits'])
  overflow = lambda *args: {k: x * np.inf for k, x in function(*args).items()}
  monkeypatch.setattr(embed, 'extractor', lambda *_: (overflow, shapes))
  code, _, error = commands.run(search.main, capfd, out, folder / '0.png')
  assert code == 2
  assert 'not finite' in commands.one_line(error)


def test_without_pyarrow_the_error_names_the_extra(
  folder, tmp_path, monkeypatch, refused
):
  out = tmp_path / 'f.parquet'
  argv = [SOURCE, folder, '--out', out]
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  refused(embed, argv, 'pyarrow', 'vit_jax[features]')
  refused(search, [out, folder], 'pyarrow', 'vit_jax[features]')


# --- search -------------------------------------------------------------------------


def test_search_embeds_queries_as_the_file_says(folder, tmp_path, call, refused):
  out, moved = tmp_path / 'f.parquet', tmp_path / 'moved.npz'
  shutil.copy(SOURCE, moved)
  pp = 'decode|resize(32)|value_range(0, 1)'
  call(embed, moved, folder, '--out', out, '--pp', pp)
  query, page = folder / 'sub/2.jpg', tmp_path / 'page' / 'page.html'
  argv = [out, query, folder / 'bad.png', '--top', 3]
  first, bad = call(search, *argv, '--page', page)['queries']
  assert 'not an image' in bad['error']
  x = array(out, 'pre_logits', (12, 48)).astype(np.float64)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  similar = x @ x[NAMES.index('sub/2.jpg')]
  order = np.argsort(-similar)[:3]
  assert [y['path'] for y in first['images']] == [str(folder / NAMES[i]) for i in order]
  numbers = [y['similarity'] for y in first['images']]
  np.testing.assert_allclose(numbers, similar[order], atol=1e-6)
  html = page.read_text()
  assert html.count('src="data:image/jpeg;base64,') == 4
  assert html.count('no picture') == 1
  assert '<b>.png' not in html
  assert str(folder) not in html.replace(str(folder / 'bad.png'), '')
  # Weights that moved, and others.
  moved.rename(tmp_path / 'elsewhere.npz')
  refused(search, argv, moved, '--source')
  assert (
    call(search, *argv, '--source', tmp_path / 'elsewhere.npz')['queries'][0] == first
  )
  with np.load(SOURCE) as file:
    arrays = dict(file)
  arrays['cls'] = arrays['cls'] + 1
  np.savez(tmp_path / 'other.npz', **arrays)
  other = [*argv, '--source', tmp_path / 'other.npz']
  refused(search, other, out, 'written with other weights')


def test_search_by_text_compares_the_vectors_of_two_towers(
  folder, tmp_path, call, refused
):
  out, source = tmp_path / 'f.parquet', pairs.siglip(tmp_path / 'siglip') / 'w.npz'
  call(embed, source, folder, '--out', out)
  loaded, texts = weights.load(str(source)), ['a cat', 'snow']
  similar = loaded.text(texts) @ loaded.image([folder / name for name in NAMES]).T
  argv = ('--top', 4, '--text', *texts[:1], '--text', *texts[1:])
  for query, expected in zip(call(search, out, *argv)['queries'], similar, strict=True):
    order = np.argsort(-expected)[:4]
    assert [x['path'] for x in query['images']] == [
      str(folder / NAMES[i]) for i in order
    ]
    numbers = [x['similarity'] for x in query['images']]
    np.testing.assert_allclose(numbers, expected[order], atol=1e-5)
  call(embed, source, folder, '--out', tmp_path / 'g.parquet', '--layer', 'pre_logits')
  argv = [tmp_path / 'g.parquet', *argv]
  refused(search, argv, '--text', 'g.parquet', 'logits')


def test_a_run_is_remembered_by_its_step(folder, tmp_path, call, short_run):
  out = tmp_path / 'f.parquet'
  pp = ('--pp', 'decode(1)|resize(8)|value_range(-1, 1)')
  call(embed, f'{short_run}@2', folder, '--out', out, *pp)
  record = json.loads(pq.read_schema(out).metadata[b'vit_jax'])
  assert record['source'] == f'{short_run}@2'
  (query,) = call(search, out, folder / '0.png')['queries']
  assert query['images'][0]['path'] == str(folder / '0.png')
  call(embed, short_run, folder, '--out', tmp_path / 'g.parquet', *pp)
  record = json.loads(pq.read_schema(tmp_path / 'g.parquet').metadata[b'vit_jax'])
  assert record['source'] == f'{short_run}@4'


def test_nearest_is_exact_in_chunks_and_keeps_the_order_of_ties():
  rng = np.random.default_rng(0)
  keys, queries = rng.normal(size=(50, 8)), rng.normal(size=(4, 8))
  keys[40] = 2 * keys[3]  # the same direction, in another chunk
  queries[0] = keys[3]
  keys, queries = keys.astype(np.float32), queries.astype(np.float32)
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  similar = unit(queries.astype(np.float64)) @ unit(keys.astype(np.float64)).T
  chunks = (keys[i : i + 16] for i in range(0, 50, 16))
  values, rows = search.nearest(chunks, queries, 5, sharding.make_mesh())
  assert rows[0, :2].tolist() == [3, 40]
  np.testing.assert_array_equal(rows[1:], np.argsort(-similar[1:], 1)[:, :5])
  np.testing.assert_allclose(values, np.take_along_axis(similar, rows, 1), atol=1e-6)


def test_groups_are_the_components_of_all_pairs():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(100, 3)).astype(np.float32)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  near = np.linalg.matrix_power(x @ x.T >= 0.97, 100)  # chains of any length
  np.testing.assert_array_equal(search.link_rows(x, 0.97, 16), near.argmax(1))
  assert 10 < len(set(near.argmax(1))) < 60


def test_near_duplicates_are_grouped(folder, tmp_path, call, capfd):
  Image.open(folder / '3.png').save(folder / 'sub' / 'copy.png')
  Image.open(folder / '3.png').save(folder / 'worse.jpg', quality=60)
  Image.open(folder / '4.png').save(folder / 'zebra.png')
  out = tmp_path / 'f.parquet'
  call(embed, SOURCE, folder, '--out', out)
  groups = call(search, out, '--near_duplicates', 0.999)['near_duplicates']
  paths = [
    [os.path.relpath(x['path'], folder) for x in group['images']] for group in groups
  ]
  assert paths == [['3.png', 'sub/copy.png', 'worse.jpg'], ['4.png', 'zebra.png']]
  similar = [x['similarity'] for x in groups[0]['images']]
  assert 0.999 <= similar[2] < similar[1] <= 1.000001
  assert search.main([str(out), '--near_duplicates', '0.999']) == 0
  assert '3 images, and how similar each is to the first\n' in capfd.readouterr().out
