"""A run's folder that version 0.1.0 wrote, half finished: golden/run_of_release_1."""

import json
import tarfile

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax import run_config
from vit_jax.errors import UserError
from vit_jax.nn import dropout
from vit_jax.train import run as train

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def folder(tmp_path):
  with tarfile.open(GOLDEN / 'run_of_release_1.tar.xz') as archive:
    archive.extractall(tmp_path, filter='data')
  return tmp_path / 'run_of_release_1'


@pytest.mark.thorough
def test_it_loads_and_gives_the_same_logits(folder):
  loaded = vit_jax.load(folder)
  with np.load(folder / 'logits.npz') as file:
    logits, _ = jax.jit(loaded.model.apply)(loaded.variables, file['images'])
    # The same float32 model; products may be summed in another order.
    np.testing.assert_allclose(logits, file['logits'], atol=1e-6)
  assert loaded.pp == "decode(1)|resize(4, rounding='nearest')|value_range(-1, 1)"


@pytest.mark.thorough
def test_it_resumes_under_a_config_that_means_the_same(folder, monkeypatch):
  # Its dropout drew masks of Threefry's bits; with those it is the same run, to the digit.
  threefry = lambda key, rate, shape: jax.random.bernoulli(key, 1 - rate, shape)
  monkeypatch.setattr(dropout, 'keep_mask', threefry)
  # What its author's config file gives: all but what the run itself resolved.
  given = json.loads((folder / 'config.json').read_text())
  del given['resolved']
  # The same text means truncated pixels today.
  with pytest.raises(UserError, match=naming('data.pp', "rounding='nearest'")):
    train.train(given, folder)
  given['data']['pp'] = run_config.read(folder)['data']['pp']
  _, rows = train.train({**given, 'evals': {}}, folder)
  losses = [row['train/loss'] for row in rows]
  # Of the first release; rtol: another compilation's sums.
  expected = [2.302584648132324, 2.302584648132324, 2.2987306118, 2.3042244911]
  np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize(
  ('then', 'now'),
  [('bit', 'resnet_gn'), ('bit_paper', 'bit'), ('bit:R50x1', 'resnet_gn:R50x1')],
)
def test_its_models_have_other_names_today(tmp_path, then, now):
  file = tmp_path / 'config.json'
  pp = "decode|inception_crop(8)|resize((4, 4), 'area')|value_range(-1, 1)"
  old = {'model': {'name': then}, 'data': {'pp': pp}}
  old['resolved'] = {'image_shape': [8, 8, 3]}
  old['optim'] = {'schedule': {'stairs': 10, 'hold': 0.8, 'warmup': 2}}
  old['task'] = {'switch': 0.5, 'per': 'batch'}
  file.write_text(json.dumps(old))
  c = run_config.read(tmp_path)
  assert c['model'] == {'name': now}
  assert c['optim']['schedule'] == {'staircase': 10, 'decay_until': 0.8, 'warmup': 2}
  assert c['task'] == {'switch_prob': 0.5, 'mixup_mode': 'batch'}
  assert c['data']['pp'] == (
    "decode|inception_crop(8, rounding='nearest', ratio=(0.75, 1.3333333333333333))|"
    "resize((4, 4), 'area', rounding='nearest')|value_range(-1, 1)"
  )
  c['resolved']['format'] = run_config.FORMAT
  file.write_text(json.dumps(c))
  assert run_config.read(tmp_path) == c
  for bad, facts in (
    (
      {**c, 'resolved': {**c['resolved'], 'format': 9}},
      ('config.json', 9, run_config.FORMAT),
    ),
    ({'a': 1}, ('config.json',)),
  ):
    file.write_text(json.dumps(bad))
    with pytest.raises(UserError, match=naming(*facts)):
      run_config.read(tmp_path)
