"""Checkpoints: round trips, saving, retention."""

import dataclasses
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
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
from vit_jax import errors, sharding
from vit_jax.checkpoint import checkpoints

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
  restored, body = checkpoints.Checkpoints(tmp_path / 'c').restore(abstract_of(state))
  assert_same(restored, state)
  assert body['config'] == {'lr': 0.1, 'sizes': [1, 2]}
  assert np.isnan(body['nan'])
  assert body['name'] == 'é'
  body = checkpoints.Checkpoints(tmp_path / 'c').manifest(7)
  assert body['metrics'] == {'accuracy': 0.5}


def test_an_outage_elsewhere_cuts_off_no_save_to_disk(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(make_state(7, width=2048), {})
  with pytest.raises(errors.Unreachable), saved:
    raise errors.Unreachable('gs://data does not answer')
  assert saved.latest() == 7


def test_state_without_ema(tmp_path):
  saved = write(tmp_path, [1], ema=False)
  state = make_state(1, ema=False)
  restored, _ = saved.restore(abstract_of(state))
  assert_same(restored, state)
  with pytest.raises(errors.UserError, match='ema/cls'):
    saved.restore(abstract_of(make_state(1, ema=True)))
  with pytest.raises(errors.UserError, match='ema/cls'):
    restore_params(saved, abstract_of(state).params, ema=True)


def test_restore_onto_another_mesh(tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 8)
  state = make_state(3)
  mesh = sharding.make_mesh(2, 4)
  placed = jax.device_put(state, sharding.state_shardings(state, mesh, 'fsdp'))
  saved = checkpoints.Checkpoints(tmp_path)
  assert saved.save(placed, {})
  saved.close()
  other = sharding.make_mesh(1, 4, devices=jax.devices()[:4])
  abstract = abstract_of(state, other, 'fsdp')
  restored, _ = saved.restore(abstract)
  assert_same(restored, state)
  kernel = restored.params['head']['kernel']
  assert kernel.sharding == abstract.params['head']['kernel'].sharding
  assert len(kernel.sharding.device_set) == 4


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
    params, _ = restore_params(saved, abstract.params, step=step)
    assert_same(params, make_state(step, width=2048).params)


def test_restore_params_reads_nothing_else(tmp_path):
  saved = write(tmp_path)
  shutil.rmtree(tmp_path / '3' / 'train')
  abstract = abstract_of(make_state(3))
  params, meta = restore_params(saved, abstract.params)
  assert_same(params, make_state(3).params)
  assert meta == {'position': 30}
  ema, _ = restore_params(saved, abstract.ema, ema=True)
  assert_same(ema, make_state(3).ema)
  shapes = jax.eval_shape(lambda: make_state(1).params)  # without shardings: one device
  params, meta = restore_params(saved, shapes, step=1)
  assert_same(params, make_state(1).params)
  assert meta == {'position': 10}
  assert saved.meta() == {'position': 30}
  assert saved.meta(2) == {'position': 20}
  with pytest.raises(errors.UserError, match=naming('step 9', [1, 2, 3])):
    restore_params(saved, abstract.params, step=9)


def test_frozen_parameters_are_described_and_not_stored(tmp_path):
  rng = np.random.default_rng(0)
  wide = {'embedding': {'kernel': rng.normal(size=(512, 512)).astype(np.float32)}}
  state = dataclasses.replace(make_state(1), frozen=jax.tree.map(jnp.asarray, wide))
  saved = checkpoints.Checkpoints(tmp_path)
  assert saved.save(state, {})
  saved.close()
  stored = sum(path.stat().st_size for path in files_of(tmp_path))
  assert stored < wide['embedding']['kernel'].nbytes / 4
  assert saved.list_frozen() == ['embedding/kernel']
  frozen = {'embedding/kernel': wide['embedding']['kernel'], 'unused': np.zeros(3)}
  restored, _ = saved.restore(abstract_of(state), frozen)
  assert_same(restored, state)
  both = {**abstract_of(state).params, **abstract_of(state).frozen}
  params, _ = restore_params(saved, both, frozen=frozen)
  assert_same(params, {**state.params, **state.frozen})
  trained, _ = restore_params(saved, abstract_of(state).ema, ema=True)
  assert_same(trained, state.ema)
  other = wide['embedding']['kernel'].copy()
  other[3, 4] += 1e-6
  for wrong in ({}, {'embedding/kernel': other}, {'embedding/kernel': other[:-1]}):
    with pytest.raises(errors.UserError, match=naming('embedding/kernel', 'step 1')):
      saved.restore(abstract_of(state), wrong)
    with pytest.raises(errors.UserError, match=naming('config.weights.source')):
      restore_params(saved, both, frozen=wrong)
  assert steps_in(tmp_path) == [1]


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
    restore_params(saved, abstract_of(make_state()).params)
  with pytest.raises(errors.UserError, match=naming(tmp_path / 'none')):
    saved.meta()
  assert not (tmp_path / 'none').exists()


# -- saving and retention -----------------------------------------------------------


def test_a_step_is_saved_once(tmp_path):
  for first in (True, False):
    saved = checkpoints.Checkpoints(tmp_path)
    assert saved.save(make_state(5), {'first': first})
    assert saved.save(make_state(5), {'first': False})
    saved.close()
    assert saved.meta() == {'first': True}


@pytest.mark.parametrize('field', ['params', 'ema', 'train/opt_state'])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, capfd, field):
  saved = checkpoints.Checkpoints(tmp_path)
  state = make_state(2)
  if field == 'train/opt_state':  # the step after it would spoil the parameters
    state.opt_state = jax.tree.map(lambda x: x / 0, state.opt_state)
  else:
    tree = getattr(state, field)
    tree['pos'] = tree['pos'].at[3, 2].set(np.nan if field == 'ema' else -np.inf)
  assert saved.save(state, {}) is False
  saved.close()
  assert os.listdir(tmp_path) == []
  error = capfd.readouterr().err
  assert re.search(naming('step 2', field), error)
  assert error.count('\n') == 1


@pytest.mark.parametrize(
  ('options', 'steps'),
  [
    (dict(keep_latest=1, keep_every=3), [3, 6]),
    (dict(keep_latest=2, best='accuracy'), [2, 5, 6]),
    (dict(keep_latest=2, best='val_loss', larger_is_better=False), [4, 5, 6]),
    (dict(keep_latest=2, best='absent'), [5, 6]),
  ],
)
def test_retention(tmp_path, options, steps):
  accuracy = {1: 0.1, 2: 0.9, 3: 0.5, 4: np.nan, 5: 0.7}
  loss = {1: 3.0, 2: 2.0, 3: 1.5, 4: 0.5, 5: np.inf}
  # A new manager at every step: it must find the best step after a restart, too.
  for step in range(1, 7):
    metrics = {}
    if step in accuracy:
      metrics = {'accuracy': accuracy[step], 'val_loss': loss[step]}
    saved = checkpoints.Checkpoints(tmp_path, **options)
    assert saved.save(make_state(step), {}, metrics or None)
    saved.close()
  assert steps_in(tmp_path) == steps
  if 'best' in options:
    reader = checkpoints.Checkpoints(tmp_path, **options)
    if options['best'] == 'absent':
      with pytest.raises(errors.UserError, match=naming("'absent'", "step='best'")):
        restore_params(reader, abstract_of(make_state()).params, step='best')
    else:
      params, _ = restore_params(reader, abstract_of(make_state()).params, step='best')
      assert_same(params, make_state(steps[0]).params)
