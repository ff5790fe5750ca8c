"""Weights from a bucket: one file, or a folder as on a hub."""

import pytest

import vit_jax
from tests.support import GOLDEN, emulator, naming
from vit_jax import errors, files

pytestmark = pytest.mark.usefixtures('gcs_without_tensorflow')


def test_a_file_of_weights_comes_from_the_bucket(
  gcs_proxy, gcs_folder, tmp_path, monkeypatch
):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  source = f'{gcs_folder}/vit.npz'
  with pytest.raises(errors.UserError, match=naming(source)):
    vit_jax.load(source)
  files.replace(source, (GOLDEN / 'vit_google_token.npz').read_bytes())
  emulator.fails(gcs_proxy, 2)
  assert vit_jax.load(source).params['cls'].shape == (1, 1, 48)
  gcs_proxy.fault = lambda *_: '403'  # whatever is asked again
  vit_jax.load(source)


@pytest.mark.slow
def test_a_folder_as_on_a_hub_comes_from_the_bucket(gcs_folder, tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  for path in (GOLDEN / 'vit_timm').iterdir():
    files.replace(f'{gcs_folder}/timm/{path.name}', path.read_bytes())
  found = vit_jax.load(f'{gcs_folder}/timm')
  assert found.format == 'timm'
  expected = vit_jax.load(GOLDEN / 'vit_timm')
  assert found.params['cls'].tolist() == expected.params['cls'].tolist()
  with pytest.raises(errors.UserError, match=naming(gcs_folder / 'none')):
    vit_jax.load(f'{gcs_folder}/none')
  assert not [p for p in tmp_path.rglob('*') if p.name.startswith('tmp')]
