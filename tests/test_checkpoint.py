"""Checkpoints: fingerprints, round trips, damage of every kind, retention, disk."""

import dataclasses
import os
import random
import re
import shutil
import subprocess
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import naming
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax import errors, sharding
from vit_jax.checkpoint import checkpoints, fingerprint, manifest, storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  step: Any
  params: Any
  opt_state: Any
  ema: Any
  skipped: Any
  frozen: Any = dataclasses.field(default_factory=dict)


# bf16 moments, masked and empty optax containers: what real optimizers store.
TX = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.masked(
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16), {'cls': True, 'head': True, 'pos': False}
  ),
)


def make_state(step=0, ema=True, width=16):
  rng = np.random.default_rng(step)
  params = {
    'cls': jnp.asarray(rng.normal(size=(1, 1, width)), jnp.float32),
    'head': {
      'kernel': jnp.asarray(rng.normal(size=(width, 24)), jnp.float32),
      'bias': jnp.zeros(24),
    },
    'pos': jnp.asarray(rng.normal(size=(8, width)), jnp.bfloat16),
  }
  opt_state = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), TX.init(params)
  )
  return State(
    step=jnp.int32(step),
    params=params,
    opt_state=opt_state,
    ema=jax.tree.map(lambda x: x * 0.5, params) if ema else None,
    skipped={'total': jnp.int32(step % 3), 'consecutive': jnp.int32(0)},
  )


def abstract_of(state, mesh=None, rules='replicate'):
  shapes = jax.eval_shape(lambda s: s, state)
  if mesh is None:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
  shardings = sharding.state_shardings(shapes, mesh, rules)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def write(directory, steps=(1, 2, 3), **options):
  saved = checkpoints.Checkpoints(directory, **options)
  for step in steps:
    assert saved.save(make_state(step), {'position': step * 10})
  saved.close()
  return saved


def steps_in(path):
  return sorted(int(name) for name in os.listdir(path) if name.isdecimal())


# -- fingerprints -------------------------------------------------------------------


def reference_fingerprint(x):
  """The documented formula in exact Python and numpy integers."""
  x = np.asarray(x)
  if x.dtype == bool:
    words = x.astype(np.uint64)
  else:
    words = x.reshape(-1).view(f'u{min(x.dtype.itemsize, 4)}').astype(np.uint64)
  words, m = words.reshape(-1), np.uint64(2**32 - 1)
  u = np.uint64
  h = words ^ ((np.arange(words.size, dtype=u) * u(0x9E3779B9)) & m)
  h = ((h ^ (h >> u(16))) * u(0x7FEB352D)) & m
  h = ((h ^ (h >> u(15))) * u(0x846CA68B)) & m
  return int((h ^ (h >> u(16))).sum()) % 2**32


SHAPES = [(), (1,), (5, 3), (2, 3, 4, 5), (0, 4)]
DTYPES = ['bfloat16', 'float16', 'int32', 'uint32', 'int8', 'uint8', 'bool']


def test_fingerprint_is_the_documented_formula():
  kinds = [('float32', shape) for shape in SHAPES] + [(d, (5, 3)) for d in DTYPES]
  rng = np.random.default_rng(0)
  tree = {
    f'{dtype} {shape}': jnp.asarray(rng.normal(size=shape) * 50).astype(dtype)
    for dtype, shape in kinds
  }
  expected = {name: reference_fingerprint(x) for name, x in tree.items()}
  assert fingerprint.fingerprints(tree) == expected


def test_fingerprint_of_64_bit_words():
  x = np.random.default_rng(0).normal(size=(3, 5))
  with jax.enable_x64(True):
    assert fingerprint.fingerprints([x]) == {'0': reference_fingerprint(x)}


def test_fingerprint_does_not_depend_on_sharding_or_devices():
  x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
  seen = {reference_fingerprint(x)}
  meshes = {
    (1, 1): [()],
    (4, 2): [('fsdp', 'data')],
    (8, 2): [(), ('data',), (None, 'fsdp'), ('fsdp', 'data'), (('data', 'fsdp'),)],
    (8, 8): [('data',)],
  }
  for (count, data), specs in meshes.items():
    mesh = sharding.make_mesh(data, -1, devices=jax.devices()[:count])
    for spec in specs:
      y = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
      seen.add(fingerprint.fingerprints({'x': y})['x'])
  assert len(seen) == 1


def test_fingerprint_sees_every_single_bit():
  x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
  was = reference_fingerprint(x)
  prints = set()
  for bit in range(x.size * 32):
    y = x.copy().reshape(-1).view(np.uint32)
    y[bit // 32] ^= np.uint32(1 << bit % 32)
    prints.add(fingerprint.fingerprints([y.view(np.float32).reshape(4, 4)])['0'])
  assert was not in prints


def test_fingerprint_sees_swapped_rows_transposes_and_pairs_of_signs():
  x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  signs = x.copy()
  signs[0, :2] *= -1  # two top bits: what a plain weighted sum does not see
  others = [x[[1, 0, *range(2, 8)]], x.T, signs, np.roll(x, 1)]
  prints = [fingerprint.fingerprints([y])['0'] for y in [x, *others]]
  assert len(set(prints)) == len(prints)


def test_digest_is_of_the_whole_and_ignores_order():
  prints = fingerprint.fingerprints(make_state(1))
  assert 'params/head/kernel' in prints
  reverse = dict(reversed(prints.items()))
  assert fingerprint.digest(prints) == fingerprint.digest(reverse)
  assert fingerprint.digest(prints) != fingerprint.digest(prints | {'step': 0})
  assert len(fingerprint.digest(prints)) == 64


# -- round trips --------------------------------------------------------------------


def test_restore_returns_every_bit_and_the_meta(tmp_path):
  state = make_state(7)
  saved = checkpoints.Checkpoints(tmp_path / 'c')
  assert saved.restore(abstract_of(state)) is None
  assert saved.latest() is None
  meta = {'config': {'lr': 0.1, 'sizes': (1, 2)}, 'nan': float('nan'), 'name': 'é'}
  assert saved.save(state, meta, {'accuracy': np.float32(0.5)})
  saved.wait()
  assert saved.latest() == 7
  saved.close()
  restored, got = checkpoints.Checkpoints(tmp_path / 'c').restore(abstract_of(state))
  assert_same(restored, state)
  assert got['config'] == {'lr': 0.1, 'sizes': [1, 2]}
  assert np.isnan(got['nan'])
  assert got['name'] == 'é'
  body = checkpoints.Checkpoints(tmp_path / 'c')._read(7)
  assert body['metrics'] == {'accuracy': 0.5}
  assert {'jax', 'flax', 'orbax-checkpoint'} <= body['versions'].keys()


def test_state_without_ema(tmp_path):
  state = make_state(1, ema=False)
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(state, {})
  saved.close()
  restored, _ = saved.restore(abstract_of(state))
  assert restored.ema is None
  assert_same(restored, state)
  with pytest.raises(errors.UserError, match='ema/cls'):
    saved.restore(abstract_of(make_state(1, ema=True)))
  with pytest.raises(errors.UserError, match='ema/cls'):
    saved.restore_params(abstract_of(state).params, ema=True)


@pytest.mark.parametrize('count', [1, 4])
def test_restore_onto_another_mesh(tmp_path, count, monkeypatch):
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 8)
  state = make_state(3)
  mesh = sharding.make_mesh(2, 4)
  placed = jax.device_put(state, sharding.state_shardings(state, mesh, 'fsdp'))
  saved = checkpoints.Checkpoints(tmp_path)
  assert saved.save(placed, {})
  saved.close()
  other = sharding.make_mesh(1, count, devices=jax.devices()[:count])
  abstract = abstract_of(state, other, 'fsdp')
  restored, _ = saved.restore(abstract)
  assert_same(restored, state)
  kernel = restored.params['head']['kernel']
  assert kernel.sharding == abstract.params['head']['kernel'].sharding
  assert len(kernel.sharding.device_set) == count


def test_buffers_may_be_donated_while_the_save_runs(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path, keep_latest=8)
  spoil = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 0 + 3, s), donate_argnums=0, keep_unused=True
  )
  for step in range(1, 4):
    # Copied: buffers that JAX borrows from numpy are never donated. (On CPU the save
    # lends its buffers too, then JAX copies instead; elsewhere they are overwritten.)
    state = jax.tree.map(jnp.copy, make_state(step, width=2048))
    assert saved.save(state, {})
    spoiled = jax.block_until_ready(spoil(state))
    assert float(spoiled.params['cls'].max()) == 3
  saved.close()
  abstract = abstract_of(make_state(0, width=2048))
  assert_same(saved.restore(abstract)[0], make_state(3, width=2048))
  for step in range(1, 4):
    params, _ = saved.restore_params(abstract.params, step=step)
    assert_same(params, make_state(step, width=2048).params)


def test_restore_params_reads_nothing_else(tmp_path):
  saved = write(tmp_path)
  shutil.rmtree(tmp_path / '3' / 'train')
  abstract = abstract_of(make_state(3))
  params, meta = saved.restore_params(abstract.params)
  assert_same(params, make_state(3).params)
  assert meta == {'position': 30}
  ema, _ = saved.restore_params(abstract.ema, ema=True)
  assert_same(ema, make_state(3).ema)
  params, meta = saved.restore_params(abstract.params, step=1)
  assert meta == {'position': 10}
  assert saved.meta() == {'position': 30}
  assert saved.meta(2) == {'position': 20}
  with pytest.raises(errors.UserError, match=naming('step 9', [1, 2, 3])):
    saved.restore_params(abstract.params, step=9)


def test_frozen_parameters_are_described_and_not_stored(tmp_path):
  rng = np.random.default_rng(0)
  wide = {'embedding': {'kernel': rng.normal(size=(512, 512)).astype(np.float32)}}
  state = dataclasses.replace(make_state(1), frozen=jax.tree.map(jnp.asarray, wide))
  saved = checkpoints.Checkpoints(tmp_path)
  assert saved.save(state, {})
  saved.close()
  stored = sum(path.stat().st_size for path in files_of(tmp_path))
  assert stored < wide['embedding']['kernel'].nbytes / 4
  assert saved.frozen() == ['embedding/kernel']
  frozen = {'embedding/kernel': wide['embedding']['kernel'], 'unused': np.zeros(3)}
  restored, _ = saved.restore(abstract_of(state), frozen)
  assert_same(restored, state)
  both = {**abstract_of(state).params, **abstract_of(state).frozen}
  params, _ = saved.restore_params(both, frozen=frozen)
  assert_same(params, {**state.params, **state.frozen})
  trained, _ = saved.restore_params(abstract_of(state).ema, ema=True)
  assert_same(trained, state.ema)
  other = wide['embedding']['kernel'].copy()
  other[3, 4] += 1e-6
  for wrong in ({}, {'embedding/kernel': other}, {'embedding/kernel': other[:-1]}):
    with pytest.raises(errors.UserError, match=naming('embedding/kernel', 'step 1')):
      saved.restore(abstract_of(state), wrong)
    with pytest.raises(errors.UserError, match=naming('config.weights.source')):
      saved.restore_params(both, frozen=wrong)
  assert steps_in(tmp_path) == [1]


def test_shapes_without_sharding_go_to_one_device(tmp_path):
  saved = write(tmp_path, steps=[1])
  abstract = jax.eval_shape(lambda: make_state(1).params)
  params, _ = saved.restore_params(abstract)
  assert_same(params, make_state(1).params)


def test_reading_leaves_an_unfinished_step_of_another_process_alone(tmp_path):
  saved = write(tmp_path, steps=[1])
  unfinished = tmp_path / '2.orbax-checkpoint-tmp'
  unfinished.mkdir()
  assert saved.restore(abstract_of(make_state(1)))[1] == {'position': 10}
  assert unfinished.exists()
  assert saved.latest() == 1
  saved.save(make_state(2), {})  # now it is our folder: left-overs are swept
  saved.close()
  assert sorted(os.listdir(tmp_path)) == ['1', '2']


def test_reading_an_empty_folder_is_the_users_error(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path / 'none')
  with pytest.raises(errors.UserError, match=naming(tmp_path / 'none')):
    saved.restore_params(abstract_of(make_state()).params)
  with pytest.raises(errors.UserError, match=naming(tmp_path / 'none')):
    saved.meta()
  assert not (tmp_path / 'none').exists()


# -- what is saved, and kept --------------------------------------------------------


def test_a_step_is_saved_once(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  assert saved.save(make_state(5), {'first': True})
  assert saved.save(make_state(5), {'first': False})
  saved.close()
  assert saved.meta() == {'first': True}
  again = checkpoints.Checkpoints(tmp_path)
  assert again.save(make_state(5), {'first': False})
  again.close()
  assert again.meta() == {'first': True}


@pytest.mark.parametrize(('field', 'value'), [('params', np.nan), ('ema', -np.inf)])
def test_non_finite_parameters_are_never_saved(tmp_path, capfd, field, value):
  saved = checkpoints.Checkpoints(tmp_path)
  state = make_state(2)
  tree = getattr(state, field)
  tree['pos'] = tree['pos'].at[3, 2].set(value)
  assert saved.save(state, {}) is False
  saved.close()
  assert os.listdir(tmp_path) == []
  error = capfd.readouterr().err
  assert re.search(naming('step 2', 1, f'{field}/pos'), error)
  assert error.count('\n') == 1


@pytest.mark.parametrize(
  ('options', 'kept'),
  [
    (dict(keep_latest=1, keep_every=3), [3, 6]),
    (dict(keep_latest=2, best='accuracy'), [2, 5, 6]),
    (dict(keep_latest=2, best='val_loss', larger_is_better=False), [4, 5, 6]),
    (dict(keep_latest=2, best='absent'), [5, 6]),
  ],
)
def test_what_is_kept(tmp_path, options, kept):
  accuracy = {1: 0.1, 2: 0.9, 3: 0.5, 4: np.nan, 5: 0.7}
  loss = {1: 3.0, 2: 2.0, 3: 1.5, 4: 0.5, 5: np.inf}
  # A new manager at every step: what is best must be known after a restart, too.
  for step in range(1, 7):
    metrics = {}
    if step in accuracy:
      metrics = {'accuracy': accuracy[step], 'val_loss': loss[step]}
    saved = checkpoints.Checkpoints(tmp_path, **options)
    assert saved.save(make_state(step), {}, metrics or None)
    saved.close()
  assert steps_in(tmp_path) == kept
  if 'best' in options:
    reader = checkpoints.Checkpoints(tmp_path, **options)
    if options['best'] == 'absent':
      with pytest.raises(errors.UserError, match=naming("'absent'", "step='best'")):
        reader.restore_params(abstract_of(make_state()).params, step='best')
    else:
      params, _ = reader.restore_params(abstract_of(make_state()).params, step='best')
      assert_same(params, make_state(kept[0]).params)


@pytest.mark.parametrize(
  'options', [dict(every=0), dict(keep_latest=0), dict(keep_every=-1)]
)
def test_options_out_of_range(tmp_path, options):
  with pytest.raises(
    errors.UserError, match=naming(f'checkpoint.{next(iter(options))}', 1)
  ):
    checkpoints.Checkpoints(tmp_path, **options)


def test_a_bucket_is_refused():
  with pytest.raises(errors.UserError, match=naming('gs://bucket/run', 'mount')):
    checkpoints.Checkpoints('gs://bucket/run')


# -- damage -------------------------------------------------------------------------


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  path = tmp_path_factory.mktemp('good')
  saved = checkpoints.Checkpoints(path)
  for step in (1, 2):
    assert saved.save(make_state(step, ema=False), {'position': step * 10})
  saved.close()
  return path


def files_of(step_dir):
  return sorted(p for p in step_dir.rglob('*') if p.is_file())


def flip(path, position, bit):
  data = bytearray(path.read_bytes())
  data[position] ^= 1 << bit
  path.write_bytes(data)


def restore_damaged(path, capfd):
  """Returns the step that was used; asserts that whatever happened was said."""
  abstract = abstract_of(make_state(ema=False))
  state, meta = checkpoints.Checkpoints(path).restore(abstract)
  error = capfd.readouterr().err  # of the file descriptor: Orbax's noise, too
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
def test_damage_of_each_file_is_never_silent(good, tmp_path, capfd, shift):
  rng = random.Random(shift)
  used = []
  for i, original in enumerate(files_of(good / '2')):
    fault = FAULTS[(i + shift) % 3]
    path = tmp_path / str(i)
    shutil.copytree(good, path)
    target = path / original.relative_to(good)
    size = target.stat().st_size
    if fault == 'flip':
      flip(target, rng.randrange(size), rng.randrange(8))
    elif fault == 'truncate':
      os.truncate(target, rng.choice([0, size // 2, size - 1]))
    else:
      target.unlink()
    used.append(restore_damaged(path, capfd))
  assert 1 in used  # the faults reach what is read


def test_flipped_bits_of_the_arrays_are_found(good, tmp_path, capfd):
  # The array data, where Orbax itself notices nothing.
  data = max(files_of(good / '2' / 'train'), key=lambda p: p.stat().st_size)
  rng = random.Random(0)
  for i in range(4):
    path = tmp_path / str(i)
    shutil.copytree(good, path)
    flip(path / data.relative_to(good), rng.randrange(data.stat().st_size), i)
    restore_damaged(path, capfd)


def test_the_message_names_the_leaf(tmp_path, capfd, monkeypatch):
  # The checksum as saved is of another kernel: what a decoder that does not notice
  # a flipped bit leaves us with.
  path = tmp_path / 'c'
  saved = checkpoints.Checkpoints(path)
  saved.save(make_state(1), {})
  saved.wait()
  real = checkpoints.survey

  def survey(flat):
    prints, bad = real(flat)
    return prints | {'params/head/kernel': prints['params/head/kernel'] ^ 1}, bad

  monkeypatch.setattr(checkpoints, 'survey', survey)
  saved.save(make_state(2), {})
  saved.close()
  monkeypatch.undo()
  saved.restore(abstract_of(make_state()))
  facts = ('step 2', 'params/head/kernel', f'{path}/2.corrupt', 'step 1')
  assert re.search(naming(*facts), capfd.readouterr().err)


def test_several_damaged_steps_and_a_name_already_taken(tmp_path, capfd):
  write(tmp_path)
  for step in (2, 3):
    (tmp_path / str(step) / 'meta' / 'metadata').write_text('{"body": {}, "sha256": 0}')
  (tmp_path / '3.corrupt').mkdir()
  state, _ = checkpoints.Checkpoints(tmp_path).restore(abstract_of(make_state()))
  assert int(state.step) == 1
  first, second = capfd.readouterr().err.splitlines()
  assert re.search(naming('step 3', 'meta', '3.corrupt1', 'step 1'), first)
  assert re.search(naming('step 2', 'meta', '2.corrupt', 'step 1'), second)
  assert sorted(os.listdir(tmp_path)) == ['1', '2.corrupt', '3.corrupt', '3.corrupt1']
  # The run goes on: those steps are saved again beside the ones set aside.
  write(tmp_path, steps=(2, 3))
  assert steps_in(tmp_path) == [1, 2, 3]


def test_all_damaged_is_an_error_and_nothing_moves(tmp_path, capfd):
  saved = write(tmp_path)
  for step in (1, 2, 3):
    os.truncate(tmp_path / str(step) / 'meta' / 'metadata', 10)
  for _ in range(2):  # a restart says the same: it never starts from 0 by itself
    with pytest.raises(errors.NoUsableCheckpoint) as caught:
      checkpoints.Checkpoints(tmp_path).restore(abstract_of(make_state()))
    text = str(caught.value)
    assert re.search(naming(tmp_path, 'step 1', 'step 2', 'step 3', 'workdir'), text)
    assert '\n' not in text
    assert sorted(os.listdir(tmp_path)) == ['1', '2', '3']
  with pytest.raises(errors.NoUsableCheckpoint):
    saved.meta()
  with pytest.raises(errors.NoUsableCheckpoint, match=naming('step 2')):
    saved.restore_params(abstract_of(make_state()).params, step=2)
  assert capfd.readouterr().err == ''


def test_only_set_aside_steps_left_is_an_error_too(tmp_path):
  (tmp_path / '4.corrupt').mkdir()
  with pytest.raises(errors.NoUsableCheckpoint, match=naming('4.corrupt')):
    checkpoints.Checkpoints(tmp_path).restore(abstract_of(make_state()))


def test_restore_params_reports_damage_but_moves_nothing(tmp_path, capfd):
  saved = write(tmp_path)
  shutil.rmtree(tmp_path / '3' / 'params')
  params, _ = saved.restore_params(abstract_of(make_state()).params)
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
    with pytest.raises(errors.UserError, match=message):
      saved.restore(dataclasses.replace(abstract, params=params))
    with pytest.raises(errors.UserError, match=message):
      saved.restore_params(params)
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


def test_a_newer_format_is_refused_not_set_aside(tmp_path, monkeypatch):
  monkeypatch.setattr(manifest, 'FORMAT', 2)
  saved = write(tmp_path, steps=(1, 2))
  monkeypatch.undo()
  with pytest.raises(errors.UserError, match=naming('format 2', 1)):
    saved.restore(abstract_of(make_state()))
  assert steps_in(tmp_path) == [1, 2]


# -- disk ---------------------------------------------------------------------------


def test_no_room_is_found_before_writing(tmp_path, monkeypatch):
  saved = write(tmp_path, steps=(1, 2))
  size = sum(x.nbytes for x in jax.tree.leaves(make_state()))
  usage = types.SimpleNamespace(free=int(size * 1.05))
  monkeypatch.setattr(storage.shutil, 'disk_usage', lambda _: usage)
  with pytest.raises(errors.DiskFull) as caught:
    saved.save(make_state(3), {})
  assert caught.value.exit_code == 74
  facts = (tmp_path, 'step 3', 2, 'MB', 'checkpoint.keep_latest')
  assert re.search(naming(*facts), str(caught.value))
  assert steps_in(tmp_path) == [1, 2]
  usage.free = int(size * 1.2)
  assert saved.save(make_state(3), {})
  saved.close()
  assert steps_in(tmp_path) == [1, 2, 3]


@pytest.fixture
def small_disk(tmp_path):
  path = tmp_path / 'disk'
  path.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(path)]
  try:
    subprocess.run(mount, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f'mounting a small tmpfs is not permitted here: {error}')
  yield path
  subprocess.run(['umount', '-l', str(path)], check=True)


def test_a_disk_that_fills_up_while_saving(small_disk, monkeypatch, capfd):
  plenty = types.SimpleNamespace(free=2**40)
  saved = checkpoints.Checkpoints(small_disk, keep_latest=9)
  assert saved.save(make_state(1), {'position': 10})
  saved.wait()
  rng = np.random.default_rng(0)
  big = {'w': jnp.asarray(rng.integers(0, 2**32, (2**21,), np.uint32))}  # 8 MB
  state = dataclasses.replace(make_state(2), opt_state=big)
  with monkeypatch.context() as patch:  # room when it was asked for, then none
    patch.setattr(storage.shutil, 'disk_usage', lambda _: plenty)
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


def test_meta_that_is_no_json_is_refused_before_writing(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  with pytest.raises(TypeError, match='JSON'):
    saved.save(make_state(1), {'x': object()})
  saved.close()
  assert steps_in(tmp_path) == []
