"""Round trips through every format, bit for bit, and what a format cannot express."""

import json

import jax
import numpy as np
import pytest
from conftest import GOLDEN, naming

import vit_jax
from vit_jax import cli, pretrained, trees
from vit_jax.errors import UserError
from vit_jax.tools import convert


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


@pytest.mark.parametrize('name', ['vit_timm', 'mixer_timm', 'vit_hf'])
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


def test_json_says_what_was_written(tmp_path, capsys):
  dest = tmp_path / 'b.safetensors'
  assert run(GOLDEN / 'vit_google_token.npz', dest, '--to', 'timm', '--json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['files'] == [str(dest), str(tmp_path / 'config.json')]
  assert record['params'] == 67594
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['model_args']['act_layer'] == 'gelu_tanh'


REFUSED = [
  ('vit_google_prelogits', 'timm', ('timm', 'representation_size=40', 'None')),
  ('vit_google_prelogits', 'hf', ('representation_size=40', 'None')),
  ('vit_bigvision_map', 'hf', ("classifier='map'", "'token'")),
  ('hybrid_google', 'timm', ('timm', 'stem_blocks=(1,)', '(3, 4, 9)')),
  ('hybrid_google', 'hf', ('stem_blocks=(1,)', 'None')),
  ('mixer_google', 'timm', ('timm', "act='gelu_tanh'", "'gelu_erf'")),
  ('mixer_google', 'hf', ('hf', "'mixer'", "'google'", "'timm'")),
]


@pytest.mark.parametrize(('name', 'to', 'facts'), REFUSED)
def test_what_a_format_cannot_express_is_refused(tmp_path, name, to, facts):
  origin = pretrained.read_source(GOLDEN / f'{name}.npz')
  with pytest.raises(UserError, match=naming(*facts)):
    convert.export(origin, tmp_path / 'out', to)
  assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_places_are_checked(tmp_path, capsys):
  source = GOLDEN / 'vit_google_token.npz'
  (tmp_path / 'config.json').write_text('mine')
  assert run(source, tmp_path / 'b.safetensors', '--to', 'timm') == 2
  assert f'{tmp_path}/config.json' in capsys.readouterr().err
  assert (tmp_path / 'config.json').read_text() == 'mine'
  assert not (tmp_path / 'b.safetensors').exists()
  assert run(source, tmp_path / 'no' / 'b.npz') == 2
  assert f'{tmp_path}/no' in capsys.readouterr().err
  assert run(source, tmp_path / 'b.npz', '--to', 'timm') == 2
  assert run(source, tmp_path / 'b') == 2
  assert '--to' in capsys.readouterr().err
