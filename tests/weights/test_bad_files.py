"""Files that are not what they say: one clear line, exit 2, nothing written, no crash."""

import io
import resource
import struct
import zipfile

import numpy as np
import pytest

from tests.support import GOLDEN, hostile_weights, naming
from vit_jax import cli, weights
from vit_jax.errors import UserError
from vit_jax.tools import convert
from vit_jax.weights import readers

TOKEN = GOLDEN / 'vit_google_token.npz'


def lying_header(path):
  """An array whose header says 4 TB."""
  header = io.BytesIO()
  entry = {'descr': '<f4', 'fortran_order': False, 'shape': (10**6, 10**6)}
  np.lib.format.write_array_header_1_0(header, entry)
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('cls.npy', header.getvalue() + b'\0' * 64)


def lying_directory(path):
  """A zip whose directory says that 100 bytes unfold to 4 GB."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('cls.npy', b'\0' * 5000)
  data = bytearray(path.read_bytes())
  at = data.index(b'PK\x01\x02')
  data[at + 24 : at + 28] = struct.pack('<I', 2**32 - 2)  # uncompressed size
  path.write_bytes(data)


def encrypted(path):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('cls.npy', b'\0' * 64)
  data = bytearray(path.read_bytes())
  # The flags of the member, and of its entry in the directory.
  for at in (data.index(b'PK\x03\x04') + 6, data.index(b'PK\x01\x02') + 8):
    data[at] |= 1
  path.write_bytes(data)


def flipped_bit(path):
  data = bytearray(TOKEN.read_bytes())
  data[5000] ^= 1
  path.write_bytes(data)


def lying_safetensors(path):
  entry = b'{"cls":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,64]}}'
  path.write_bytes(struct.pack('<Q', len(entry)) + entry + b'\0' * 64)


def pickled(path):
  np.savez(path, cls=np.array([{'a': 1}], dtype=object))


def cut(path):
  origin = TOKEN if path.suffix == '.npz' else GOLDEN / 'vit_timm/model.safetensors'
  path.write_bytes(origin.read_bytes()[:9000])


# name -> (how it is made, facts of the message)
BAD = {
  'a.txt': (lambda p: p.write_text('hello'), ('.npz', '.safetensors')),
  'empty.npz': (lambda p: p.write_bytes(b''), ('empty', '.npz')),
  'cut.npz': (cut, ('truncated',)),
  'cut.safetensors': (cut, ('incomplete metadata',)),
  'flip.npz': (flipped_bit, ('CRC-32', 'Transformer/encoderblock_0/MlpBlock_3')),
  'objects.npz': (pickled, ("'cls'", 'allow_pickle')),
  'text.npz': (lambda p: np.savez(p, cls=np.array(['a'])), ("'cls'", '<U1')),
  'header.npz': (lying_header, ("'cls'",)),
  'directory.npz': (lying_directory, ('decompress', 'bytes')),
  'encrypted.npz': (encrypted, ("'cls'", 'encrypted')),
  'zip.npz': (
    lambda p: zipfile.ZipFile(p, 'w').writestr('readme.txt', 'x'),
    ("'readme.txt'", '.npz'),
  ),
  'torch.pth': (lambda p: p.write_bytes(TOKEN.read_bytes()), ('pickle', 'safetensors')),
  'model.bin': (lambda p: p.write_bytes(b'\x80\x04abc'), ('pickle', 'safetensors')),
  'lying.safetensors': (lying_safetensors, ('invalid shape',)),
  'other.npz': (lambda p: np.savez(p, a=np.ones(3)), ("['a']", 'google (vit)')),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_one_line(tmp_path, capsys, name):
  make, facts = BAD[name]
  path = tmp_path / name
  archive = make(path)
  del archive
  with pytest.raises(UserError, match=naming(str(path), *facts)) as caught:
    weights.read(str(path))
  assert '\n' not in str(caught.value)
  out = tmp_path / 'out.npz'
  assert cli.run(convert.main, [str(path), str(out)]) == 2
  assert capsys.readouterr().err.count('\n') == 1
  assert not out.exists()


def test_a_compressed_file_of_zeros_is_no_lie(tmp_path):
  np.savez_compressed(tmp_path / 'a.npz', cls=np.zeros((1000, 1000), np.float32))
  assert readers.read(tmp_path / 'a.npz').arrays['cls'].shape == (1000, 1000)


def test_folders_of_odd_content(tmp_path):
  with pytest.raises(UserError, match=naming(tmp_path, 'model.safetensors')):
    weights.read(str(tmp_path))
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text('{"weight_map": {"a": "../secret.safetensors"}}')
  with pytest.raises(UserError, match=naming(index, "'../secret.safetensors'")):
    weights.read(str(tmp_path))
  data = (GOLDEN / 'vit_timm' / 'model.safetensors').read_bytes()
  (tmp_path / 'model.safetensors').write_bytes(data)
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(UserError, match=naming(f'{tmp_path}/config.json', 'JSON')):
    weights.read(str(tmp_path))


# Beyond the memory of the process before: the largest honest file here is of 290 KB, and
# the largest that lies claims exabytes.
MOST_MEMORY = 400 << 20
# Words of the table of faults.
OUTCOMES = {'refused': 'refused', 'loaded': 'handled', 'crashed': 'traceback'}


def survived(folder, every: int, faults_table=lambda *_: None) -> int:
  """Loads each `every`-th hostile case; returns how many were refused."""
  expected = weights.read(TOKEN).flat
  assert hostile_weights.outcome(TOKEN) == ('loaded', '')
  number = len(hostile_weights.recipes())
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  crashed, refused = [], 0
  for name, path in hostile_weights.cases(folder, every):
    what, why = hostile_weights.outcome(path)
    refused += what == 'refused'
    faults_table('weight files', name, OUTCOMES[what], str(why))
    if what == 'crashed':
      crashed.append(f'{name}: {why}')
    if what == 'loaded' and name.startswith('zip: '):  # the change hit no array
      flat = weights.read(path).flat
      assert flat.keys() == expected.keys(), name
      assert all(np.array_equal(flat[n], expected[n]) for n in flat), name
  assert not crashed, '\n'.join(crashed)
  used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert used << 10 < MOST_MEMORY, f'{used >> 10} MB'
  assert number > 400
  return refused


def test_some_hostile_files(tmp_path):
  assert survived(tmp_path, every=8) > 40


@pytest.mark.faults
def test_all_hostile_files(tmp_path, faults_table):
  assert survived(tmp_path, 1, faults_table) > 350
