"""Round trips through every format, bit for bit, and what a format cannot express."""

import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.random_source import logits_of, random_source
from vit_jax import cli, models, trees, weights
from vit_jax.errors import UserError
from vit_jax.tools import convert
from vit_jax.weights.families import bit


def run(*args):
  return cli.run(convert.main, [str(a) for a in args])


# golden -> format that it goes through and back from.
TRIPS = [
  ('vit_google_token', 'timm'),
  ('vit_google_token', 'hf'),
  ('vit_google_token', 'google'),
  ('vit_google_prelogits', 'google'),
  ('hybrid_google', 'google'),
  ('mixer_google', 'google'),
]


@pytest.mark.parametrize('suffix', ['', '.safetensors'])
@pytest.mark.parametrize(('name', 'to'), TRIPS)
def test_there_and_back_is_the_same_file(tmp_path, name, to, suffix):
  original = GOLDEN / f'{name}.npz'
  there = tmp_path / f'there{suffix if to != "google" else ".npz"}'
  assert run(original, there, '--to', to) == 0
  assert run(there, tmp_path / 'back.npz') == 0
  assert (tmp_path / 'back.npz').read_bytes() == original.read_bytes()


@pytest.mark.parametrize('name', ['vit_timm', 'vit_hf'])
def test_through_google_a_torch_model_keeps_its_gelu(tmp_path, name):
  to = name.split('_')[1]
  assert run(GOLDEN / name, tmp_path / 'a.npz') == 0
  assert run(tmp_path / 'a.npz', tmp_path / 'b', '--to', to) == 0
  expected = np.load(GOLDEN / f'{name}.expected.npz')
  for path in ('a.npz', 'b'):
    model, params = vit_jax.load(tmp_path / path)
    assert model.act == 'gelu_erf'
    logits, _ = jax.jit(model.apply)({'params': params}, expected['image'])
    np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=5e-6)


def test_a_map_head_goes_through_timm(tmp_path):
  assert run(GOLDEN / 'vit_bigvision_map.npz', tmp_path / 'b', '--to', 'timm') == 0
  _, old = vit_jax.load(GOLDEN / 'vit_bigvision_map.npz')
  _, new = vit_jax.load(tmp_path / 'b')
  old, new = (trees.flatten(tree) for tree in (old, new))
  assert old.keys() == new.keys()
  assert all(np.array_equal(old[n], new[n]) for n in old)


# (golden, or fields of a random ViT; format; words of the error)
REFUSED = [
  ('vit_google_prelogits', 'timm', ('timm', 'representation_size=40', 'None')),
  ('vit_bigvision_map', 'hf', ('hf', "classifier='map'")),
  ('hybrid_google', 'timm', ('timm', 'stem_blocks=(1,)', '(3, 4, 9)')),
  ('mixer_google', 'timm', ('timm', "act='gelu_tanh'", "'gelu_erf'")),
  ('mixer_google', 'hf', ('hf', "'mixer'", "'google'", "'timm'")),
  (dict(classifier='none'), 'hf', ('hf', "classifier='none'")),
  (dict(posemb='none'), 'hf', ("posemb='none'", "'learn'")),
  (dict(classifier='none'), 'timm', ("classifier='none'", "'map'")),
  (dict(norm_eps=2e-5), 'timm', ('norm_eps=2e-05', '1e-06')),
]


@pytest.mark.parametrize(('source', 'to', 'words'), REFUSED)
def test_weights_that_a_format_cannot_express(tmp_path, source, to, words):
  if isinstance(source, str):
    source = weights.read(GOLDEN / f'{source}.npz')
  else:
    source = random_source(**source)
  with pytest.raises(UserError, match=naming(*words)):
    weights.write(source, tmp_path / 'out', to)
  assert list(tmp_path.iterdir()) == []


def test_the_record_lists_the_files(tmp_path, capsys):
  source = GOLDEN / 'vit_google_token.npz'
  dest = tmp_path / 'new' / 'b.safetensors'
  dest.parent.mkdir()
  assert run(source, dest, '--to', 'timm', '--json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['files'] == [str(dest), str(dest.parent / 'config.json')]


@pytest.mark.parametrize(
  ('to', 'fields'),
  [
    ('timm', dict(classifier='gap', scan=True)),
    ('hf', dict(classifier='token')),
    ('google', dict(classifier='none')),
  ],
)
def test_sine_cosine_positions_leave_the_library(tmp_path, to, fields):
  source = random_source(posemb='sincos2d', **fields)
  dest = tmp_path / ('a.npz' if to == 'google' else 'a')
  weights.write(source, dest, to)
  loaded = vit_jax.load(dest)
  assert loaded.model.posemb == ('sincos2d' if to == 'google' else 'learn')
  assert loaded.model.classifier == fields['classifier']
  assert loaded.class_names == source.class_names
  np.testing.assert_array_equal(*logits_of(source, loaded))  # the same numbers


def test_the_config_of_a_published_bit():
  written = next(f for f in bit.FORMATS if f.name == 'timm').writer.config
  model = models.build('bit', 'R50x1', num_classes=10)
  config = written(model.fields(), (224, 224), None)
  assert config['architecture'] == 'resnetv2_50x1_bit'
  other = model.clone(zero_pad_pool=False).fields()
  with pytest.raises(ValueError, match=naming('zero_pad_pool=False', 'timm')):
    written(other, (224, 224), None)
