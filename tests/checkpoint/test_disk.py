"""Checkpoints on a disk that is full, and what else keeps one from being written."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from tests.support.states import abstract_of, assert_same, make_state, steps_in
from vit_jax import errors
from vit_jax.checkpoint import checkpoints, storage


def test_a_disk_that_fills_up_while_saving(mount_tmpfs, capfd):
  small_disk = mount_tmpfs('size=4m')
  saved = checkpoints.Checkpoints(small_disk, keep_latest=9)
  assert saved.save(make_state(1), {'position': 10})
  saved.wait()
  rng = np.random.default_rng(0)
  big = {'w': jnp.asarray(rng.integers(0, 2**32, (2**21,), np.uint32))}  # 8 MB
  state = dataclasses.replace(make_state(2), opt_state=big)
  with pytest.raises(errors.DiskFull, match=naming(small_disk, 'step 2', 1)):  # noqa: PT012
    saved.save(state, {})
    saved.wait()
  saved.close()
  assert capfd.readouterr().err == ''  # one line, the exception's, not pages of logs
  again = checkpoints.Checkpoints(small_disk)
  restored, _ = again.restore(abstract_of(make_state()))
  assert_same(restored, make_state(1))
  assert again.save(make_state(3), {})  # the half-written step is swept up first
  again.close()
  assert steps_in(small_disk) == [1, 3]


def test_other_write_errors_keep_their_type(tmp_path, monkeypatch):
  saved = checkpoints.Checkpoints(tmp_path)

  def fail(*_, **__):
    raise RuntimeError('something else')

  monkeypatch.setattr(storage._Manager, 'save', fail)
  with pytest.raises(RuntimeError, match='something else'):
    saved.save(make_state(1), {})
  saved.close()


def test_meta_that_is_not_json_is_refused_before_writing(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  with pytest.raises(TypeError, match='JSON'):
    saved.save(make_state(1), {'x': object()})
  saved.close()
  assert steps_in(tmp_path) == []
