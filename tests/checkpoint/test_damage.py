"""Damaged checkpoints are always reported, and other errors are not mistaken for damage."""

import dataclasses
import logging
import os
import random
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import naming
from tests.support.states import (
  abstract_of,
  assert_same,
  files_of,
  make_state,
  restore_params,
  steps_in,
  write,
)
from vit_jax import errors
from vit_jax.checkpoint import checkpoints, storage

# Orbax reads several arrays at once and raises the error of the first broken one; Python
# warns about those of the others when it frees them (orbax-checkpoint 0.12.8, 2026-11-23).
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  path = tmp_path_factory.mktemp('good')
  write(path, (1, 2), ema=False)
  return path


def restore(path):
  """Returns (state, meta) of the newest whole step."""
  return checkpoints.Checkpoints(path).restore(abstract_of(make_state()))


def restore_damaged(path, capfd):
  """Returns the step that was used; asserts that any damage was reported."""
  abstract = abstract_of(make_state(ema=False))
  state, meta = checkpoints.Checkpoints(path).restore(abstract)
  error = capfd.readouterr().err  # also Orbax's noise, as it is the file descriptor's
  used = int(state.step)
  assert_same(state, make_state(used, ema=False))
  assert meta == {'position': used * 10}
  if used == 2:  # the damage touched nothing that is read
    assert error == ''
    assert steps_in(path) == [1, 2]
  else:
    assert re.search(naming('step 2', f'{path}/2.corrupt', 'step 1'), error)
    assert error.count('\n') == 1
    assert sorted(os.listdir(path)) == ['1', '2.corrupt']
  return used


FAULTS = ('flip', 'truncate', 'delete')


@pytest.mark.parametrize(
  'shift', [0, *(pytest.param(i, marks=pytest.mark.faults) for i in (1, 2))]
)
def test_damage_of_each_file_is_never_silent(
  good, tmp_path, capfd, shift, faults_table
):
  rng = random.Random(shift)
  used = []
  # Of every file, and the data of the arrays, where Orbax itself notices nothing.
  data = max(files_of(good / '2' / 'train'), key=lambda p: p.stat().st_size)
  cases = [
    (path, FAULTS[(i + shift) % 3]) for i, path in enumerate(files_of(good / '2'))
  ]
  for i, (original, fault) in enumerate([*cases, (data, 'flip'), (data, 'flip')]):
    path = shutil.copytree(good, tmp_path / str(i))
    target = path / original.relative_to(good)
    size = target.stat().st_size
    if fault == 'flip':
      flipped = bytearray(target.read_bytes())
      flipped[rng.randrange(size)] ^= 1 << rng.randrange(8)
      target.write_bytes(flipped)
    elif fault == 'truncate':
      os.truncate(target, rng.choice([0, size // 2, size - 1]))
    else:
      target.unlink()
    used.append(restore_damaged(path, capfd))
    name = f'{original.relative_to(good)} {fault} {shift}'
    faults_table('checkpoint files', name, 'handled', f'step {used[-1]} is used')
  assert 1 in used  # some faults reach files that are read


def test_the_message_names_the_leaf(tmp_path, capfd, monkeypatch):
  # The checksum as saved is of another kernel, as after a flipped bit that no decoder
  # notices.
  leaf, survey = 'params/head/kernel', checkpoints.survey

  def other(flat):
    prints, bad = survey(flat)
    return prints | {leaf: prints[leaf] ^ 1}, bad

  write(tmp_path, [1])
  with monkeypatch.context() as patch:
    patch.setattr(checkpoints, 'survey', other)
    write(tmp_path, [2])
  restore(tmp_path)
  facts = ('step 2', leaf, f'{tmp_path}/2.corrupt', 'step 1')
  assert re.search(naming(*facts), capfd.readouterr().err)


def test_several_damaged_steps_and_a_name_already_taken(tmp_path, capfd):
  write(tmp_path)
  edit_meta(tmp_path / '2', lambda text: text.replace('"position": ', '"position": 1'))
  edit_meta(tmp_path / '3', lambda text: f'{text} and no JSON')
  (tmp_path / '3.corrupt').mkdir()
  assert int(restore(tmp_path)[0].step) == 1
  first, second = capfd.readouterr().err.splitlines()
  assert re.search(naming('step 3', '3.corrupt1', 'step 1'), first)
  assert re.search(naming('step 2', 'meta', '2.corrupt', 'step 1'), second)
  assert sorted(os.listdir(tmp_path)) == ['1', '2.corrupt', '3.corrupt', '3.corrupt1']
  # The run goes on: those steps are saved again beside the ones set aside.
  write(tmp_path, steps=(2, 3))
  assert steps_in(tmp_path) == [1, 2, 3]


def test_a_manifest_that_is_another(tmp_path, capfd):
  """A step copied under another number, and meta without its checksum."""
  write(tmp_path)
  shutil.copytree(tmp_path / '1', tmp_path / '4')
  edit_meta(tmp_path / '3', lambda text: '[1]')
  assert int(restore(tmp_path)[0].step) == 2
  first, second = capfd.readouterr().err.splitlines()
  assert re.search(naming('step 4', 'step 1', '4.corrupt'), first)
  assert re.search(naming('step 3', 'meta', '3.corrupt'), second)


def edit_meta(step, change) -> None:
  path = step / 'meta' / 'metadata'
  path.write_text(change(path.read_text()))


def test_all_damaged_is_an_error_and_nothing_moves(tmp_path, capfd):
  saved = write(tmp_path)
  for step in (1, 2, 3):
    os.truncate(tmp_path / str(step) / 'meta' / 'metadata', 10)
  for _ in range(2):  # a restart says the same: it never starts from 0 by itself
    with pytest.raises(errors.NoUsableCheckpoint) as caught:
      restore(tmp_path)
    text = str(caught.value)
    assert re.search(naming(tmp_path, 'step 1', 'step 2', 'step 3', 'workdir'), text)
    assert '\n' not in text
    assert sorted(os.listdir(tmp_path)) == ['1', '2', '3']
  with pytest.raises(errors.NoUsableCheckpoint):
    saved.meta()
  aside = tmp_path / 'aside'
  (aside / '4.corrupt').mkdir(parents=True)
  with pytest.raises(errors.NoUsableCheckpoint, match=naming('4.corrupt')):
    restore(aside)
  with pytest.raises(errors.NoUsableCheckpoint, match=naming('step 2')):
    restore_params(saved, abstract_of(make_state()).params, step=2)
  assert capfd.readouterr().err == ''


def test_restore_params_reports_damage_but_moves_nothing(tmp_path, capfd):
  saved = write(tmp_path)
  shutil.rmtree(tmp_path / '3' / 'params')
  params, _ = restore_params(saved, abstract_of(make_state()).params)
  assert_same(params, make_state(2).params)
  error = capfd.readouterr().err
  assert re.search(naming('step 3', 'step 2'), error)
  assert steps_in(tmp_path) == [1, 2, 3]


def test_another_configuration_is_no_damage(tmp_path, capfd):
  saved = write(tmp_path)
  abstract = abstract_of(make_state())
  head = abstract.params['head']
  wide = jax.ShapeDtypeStruct((16, 99), jnp.float32)
  half = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)
  cases = [
    ({**head, 'kernel': wide}, ('kernel', '(16, 24) float32', '(16, 99) float32')),
    ({**head, 'kernel': half}, ('kernel', '(16, 24) float32', '(16, 24) bfloat16')),
    ({**head, 'scale': wide}, ('scale', '(16, 99) float32')),
    ({'bias': head['bias']}, ('kernel', '(16, 24) float32')),
  ]
  for changed, (name, *shapes) in cases:
    params = {**abstract.params, 'head': changed}
    message = naming(tmp_path, 'step 3', f'params/head/{name}', *shapes)
    state = dataclasses.replace(abstract, params=params)
    for refused in (saved.restore, saved.check_structure):
      with pytest.raises(errors.UserError, match=message):
        refused(state)
    with pytest.raises(errors.UserError, match=message):
      restore_params(saved, params)
  other = optax.sgd(0.1, momentum=0.9).init(abstract.params)
  with pytest.raises(errors.UserError, match=r'train/opt_state/.*\d+ more'):
    saved.restore(dataclasses.replace(abstract, opt_state=other))
  assert steps_in(tmp_path) == [1, 2, 3]
  assert capfd.readouterr().err == ''


def test_trouble_of_the_machine_is_no_damage(tmp_path, monkeypatch):
  saved = write(tmp_path, steps=(1, 2))
  kinds = [
    (MemoryError(), MemoryError),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED'), jax.errors.JaxRuntimeError),
    (PermissionError(13, 'Permission denied'), errors.UserError),
    (ValueError('PERMISSION_DENIED: file'), errors.UserError),
  ]
  for raised, expected in kinds:

    def fail(*_, error=raised, **__):
      raise error

    monkeypatch.setattr(storage.ocp.Checkpointer, 'restore', fail)
    with pytest.raises(expected):
      saved.restore(abstract_of(make_state()))
  assert steps_in(tmp_path) == [1, 2]


def test_reads_that_fail_after_the_first_are_not_logged(caplog):
  log = logging.getLogger('asyncio')
  late = ValueError('UNKNOWN: Error opening "zarr" driver [tensorstore_spec={}]')
  log.error('Future exception was never retrieved', exc_info=late)
  assert caplog.records == []
  log.error('Future exception was never retrieved', exc_info=ValueError('of ours'))
  assert len(caplog.records) == 1


# -- a full disk, and other errors of a write ----------------------------------------


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
  assert_same(restore(small_disk)[0], make_state(1))
  again = checkpoints.Checkpoints(small_disk)
  assert again.save(make_state(3), {})  # the half-written step is swept up first
  again.close()
  assert steps_in(small_disk) == [1, 3]


def test_other_errors_of_a_write_keep_their_type(tmp_path, monkeypatch):
  def fail(*_, **__):
    raise PermissionError(13, 'Permission denied')

  saved = write(tmp_path, steps=[1])
  monkeypatch.setattr(storage.ocp.CheckpointManager, 'save', fail)
  with pytest.raises(PermissionError):
    saved.save(make_state(2), {})
  assert steps_in(tmp_path) == [1]
