"""Files that are not what they say: one clear line, exit 2, nothing written."""

import io
import struct
import zipfile

import numpy as np
import pytest

from tests.support import GOLDEN, naming
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


def rewritten(path, offset: int, value: int):
  """An npz with a number of two bytes changed in its member's header and directory."""
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('cls.npy', b'\0' * 64)
  data = bytearray(path.read_bytes())
  # The directory's entry has two bytes more in front.
  for at in (data.index(b'PK\x03\x04'), data.index(b'PK\x01\x02') + 2):
    data[at + offset : at + offset + 2] = struct.pack('<H', value)
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


# name -> (how it is made, what the message must say)
BAD = {
  'a.txt': (lambda p: p.write_text('hello'), ('.npz', '.safetensors')),
  'empty.npz': (lambda p: p.write_bytes(b''), ('empty', '.npz')),
  'cut.npz': (
    lambda p: p.write_bytes(TOKEN.read_bytes()[:9000]),
    ('truncated',),
  ),
  'flip.npz': (
    flipped_bit,
    ('CRC-32', 'Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel'),
  ),
  'objects.npz': (pickled, ("'cls'", 'allow_pickle')),
  'text.npz': (lambda p: np.savez(p, cls=np.array(['a'])), ("'cls'", '<U1')),
  'header.npz': (lying_header, ("'cls'",)),
  'directory.npz': (lying_directory, ('decompress', 'bytes')),
  'method.npz': (lambda p: rewritten(p, 8, 99), ("'cls'", 'compression')),
  # Of kinds that Python's zip reader has not.
  'version.npz': (lambda p: rewritten(p, 4, 99), ('damaged', 'version')),
  'patched.npz': (lambda p: rewritten(p, 6, 0x20), ('damaged', 'patched')),
  'encrypted.npz': (lambda p: rewritten(p, 6, 1), ("'cls'", 'encrypted')),
  'zip.npz': (
    lambda p: zipfile.ZipFile(p, 'w').writestr('readme.txt', 'x'),
    ("'readme.txt'", '.npz'),
  ),
  'torch.pth': (
    lambda p: p.write_bytes(TOKEN.read_bytes()),
    ('pickle', '.safetensors'),
  ),
  'pytorch_model.bin': (
    lambda p: p.write_bytes(b'\x80\x04abc'),
    ('pickle', '.safetensors'),
  ),
  'cut.safetensors': (
    lambda p: p.write_bytes(
      (GOLDEN / 'vit_timm' / 'model.safetensors').read_bytes()[:9000]
    ),
    ('safetensors', 'incomplete metadata'),
  ),
  'lying.safetensors': (lying_safetensors, ('safetensors', 'invalid shape')),
  'other.npz': (lambda p: np.savez(p, a=np.ones(3)), ("['a']", 'google (vit)')),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files(tmp_path, capsys, name):
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


def test_fortran_order_and_scalars(tmp_path):
  x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
  np.savez(tmp_path / 'a.npz', x=x, step=np.int64(3))
  arrays = readers.read(tmp_path / 'a.npz').arrays
  np.testing.assert_array_equal(arrays['x'], x)
  assert arrays['step'] == 3


def test_a_folder_without_weights(tmp_path):
  with pytest.raises(
    UserError, match=naming(tmp_path, 'model.safetensors', 'config.json')
  ):
    weights.read(str(tmp_path))
  (tmp_path / 'config.json').write_text('{')
  (tmp_path / 'model.safetensors').write_bytes(
    (GOLDEN / 'vit_timm' / 'model.safetensors').read_bytes()
  )
  with pytest.raises(UserError, match=naming(f'{tmp_path}/config.json', 'JSON')):
    weights.read(str(tmp_path))


def test_an_index_that_points_outside(tmp_path):
  (tmp_path / 'model.safetensors.index.json').write_text(
    '{"weight_map": {"a": "../secret.safetensors"}}'
  )
  with pytest.raises(
    UserError, match=naming('model.safetensors.index.json', "'../secret.safetensors'")
  ):
    weights.read(str(tmp_path))
