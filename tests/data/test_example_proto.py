"""tf.train.Example, read without TensorFlow."""

import numpy as np
import pytest

from tests.support import naming
from tests.support.example_records import example, serialised
from vit_jax.data.sources import example_proto


def test_examples_as_tensorflow_writes_them():
  given = {
    'bytes': [b'', b'\xff\x00'],
    'ints': [0, 1, -1, 127, 128, 2**62, -(2**63)],
    'floats': [0.5, -1.0, 3e38],
    'nothing': [],
    'one': [7],
  }
  got = example_proto.parse(serialised(given))
  assert got.keys() == given.keys()
  assert got['bytes'] == given['bytes']
  assert got['ints'].tolist() == given['ints']
  assert got['ints'].dtype == np.int64
  np.testing.assert_array_equal(got['floats'], np.array(given['floats'], np.float32))
  assert len(got['nothing']) == 0
  assert list(example_proto.parse(serialised(given), ('one', 'other'))) == ['one']
  # Numbers one by one, as old writers of protocol buffers wrote them: field 1 of an
  # Int64List as varints 3 and 300, in a feature named 'a'.
  unpacked = bytes([0x08, 3, 0x08, 0xAC, 2])
  for tag, key in ((0x1A, None), (0x12, b'\x0a\x01a'), (0x0A, None), (0x0A, None)):
    unpacked = (key or b'') + bytes([tag, len(unpacked)]) + unpacked
  assert example_proto.parse(unpacked)['a'].tolist() == [3, 300]


@pytest.mark.parametrize('cut', [1, 10, 40])
def test_what_is_no_example(cut):
  whole = example(0)
  with pytest.raises(ValueError, match=naming('tf.train.Example')):
    example_proto.parse(whole[:-cut])
  with pytest.raises(ValueError, match=naming('tf.train.Example')):
    example_proto.parse(b'\xff' * 20)
