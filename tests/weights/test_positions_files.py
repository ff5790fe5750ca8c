"""Files keep every kind of position embedding, or say that they cannot."""

import numpy as np
import pytest

import vit_jax
from tests.nn.test_positions import images, perturbed, tiny
from tests.support import naming
from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.models import fields_of
from vit_jax.weights import export, formats


def write(tmp_path, **fields):
  """Returns (a file of weights, with images of 16x24 px, what they compute)."""
  model = tiny(**fields)
  params = perturbed(model)
  flat = {n: np.asarray(x) for n, x in trees.flatten(params).items()}
  google = formats.writer('vit', 'google')
  arrays, config = google.write(flat, fields_of(model), (16, 24), None)
  export.save(tmp_path / 'model.npz', arrays, config)
  return (
    tmp_path / 'model.npz',
    flat,
    np.asarray(model.apply({'params': params}, images())[0]),
  )


@pytest.mark.parametrize(
  'fields',
  [
    pytest.param(dict(posemb='learn', posemb_where='every'), marks=pytest.mark.slow),
    pytest.param(dict(posemb='learn2d', posemb_where='shared'), marks=pytest.mark.slow),
    pytest.param(dict(posemb='relative'), marks=pytest.mark.slow),
    pytest.param(dict(posemb='rotary'), marks=pytest.mark.slow),
    pytest.param(dict(posemb='sincos2d', posemb_where='every'), marks=pytest.mark.slow),
    dict(attention='axial', classifier='gap', posemb='learn2d', posemb_where='every'),
  ],
  ids=lambda f: '-'.join(map(str, f.values())),
)
def test_files_keep_them(tmp_path, fields):
  path, _, expected = write(tmp_path, **fields)
  loaded = vit_jax.load(path)
  assert {k: getattr(loaded.model, k) for k in fields} == fields
  found = loaded.model.apply(loaded.variables, images())[0]
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('scan', [False, True])
def test_tables_of_every_block_are_resized(tmp_path, scan):
  path, flat, _ = write(tmp_path, posemb='learn2d', posemb_where='every')
  loaded = vit_jax.load(path, image_size=(40, 24), scan=scan)
  params = trees.flatten(loaded.params)
  for i in range(2):
    block = f'Transformer/encoderblock_{i}/posembed_input/pos_embedding_'
    found = {
      name: np.asarray(
        params[block.replace(f'_{i}/', '/') + name][i] if scan else params[block + name]
      )
      for name in ('x', 'y', 'cls')
    }
    for name in ('x', 'cls'):
      np.testing.assert_array_equal(found[name], flat[block + name])
    a, b = flat[block + 'y'][0]  # corners on corners: five rows between the two
    expected = [a + (b - a) * t for t in np.linspace(0, 1, 5)]
    np.testing.assert_allclose(found['y'][0], expected, atol=1e-6)


def test_relative_positions_are_not_resized(tmp_path):
  path, *_ = write(tmp_path, posemb='relative')
  with pytest.raises(UserError, match=naming('posembed_relative')):
    vit_jax.load(path, image_size=(40, 24))


@pytest.mark.parametrize('to', ['timm', 'hf'])
@pytest.mark.parametrize(
  ('fields', 'word'),
  [
    (dict(posemb_where='shared'), 'posemb_where'),
    (dict(posemb='sincos2d', posemb_where='every'), 'posemb'),
    (dict(posemb='rotary'), 'posemb'),
    (dict(attention='axial', posemb='none', classifier='gap'), 'attention'),
  ],
)
def test_other_libraries_cannot_express_them(to, fields, word):
  if to == 'hf' and word == 'attention':
    word = 'classifier'  # refused for its pooling before
  library = {'timm': 'timm', 'hf': 'transformers'}[to]
  with pytest.raises(ValueError, match=naming(library, word)):
    formats.writer('vit', to).config(fields_of(tiny(**fields)), (16, 24), None)
