"""Figures of models: each is drawn, its table has the numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.figures import draw, run, small_figures  # noqa: F401
from vit_jax import explain, weights
from vit_jax.explain.parameters import filters_pca, posemb_similarity
from vit_jax.tools.figures import maps, parameters

TOKEN = GOLDEN / 'vit_google_token.npz'


def arrays(rows, *key):
  """Returns the arrays of a table of `grids`, one for each key: [n, h, w]."""
  groups = {}
  for row in rows:
    cells = [v for k, v in row.items() if k.isdigit() and v]
    groups.setdefault(tuple(row[k] for k in key), []).append(np.array(cells, float))
  return list(groups.values())


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
  """Two smooth images, like photographs, in sizes that differ from the model's."""
  folder = tmp_path_factory.mktemp('photos')
  rng = np.random.default_rng(0)
  for name, size in (('a.png', (50, 40)), ('b.jpg', (64, 64))):
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    small.resize(size, Image.Resampling.BICUBIC).save(folder / name)
  return folder


@pytest.mark.parametrize(
  ('kind', 'flags', 'options'),
  [
    ('rollout', (), {}),
    ('attention', ('--layer', '0', '--head', '1'), dict(layer=0, head=1)),
    ('class_rollout', ('--class', '3'), dict(classes=3)),
    ('gradient', (), {}),
    ('integrated', ('--class', '1'), dict(classes=1)),
  ],
)
def test_maps(photos, tmp_path, monkeypatch, kind, flags, options):
  call = {}

  def spy(loaded, images, kind, **options):
    call.update(kind=kind, options=options, images=images)
    call['maps'] = attention_maps(loaded, images, kind, **options)
    return call['maps']

  attention_maps = explain.attention_maps
  monkeypatch.setattr(explain, 'attention_maps', spy)
  rows = draw(kind, TOKEN, photos, *flags, out=tmp_path)
  paths = [str(photos / 'a.png'), str(photos / 'b.jpg')]
  assert list(dict.fromkeys(row['image'] for row in rows)) == call['images'] == paths
  assert call['kind'] == kind
  for name, value in options.items():
    assert np.all(call['options'][name] == value)
  np.testing.assert_allclose(arrays(rows, 'image'), call['maps'], rtol=1e-6)
  if 'classes' in options:
    assert {row['class'] for row in rows} == {f'class {options["classes"]}'}


def test_pooling_of_a_map_head_and_of_a_hybrid(photos, tmp_path):
  flags = ('--layer', 'pooling', '--overlay', 'heat')
  source = GOLDEN / 'vit_bigvision_map.npz'
  rows = draw('attention', source, photos / 'a.png', *flags, out=tmp_path)
  assert np.sum(arrays(rows, 'image')) == pytest.approx(1, rel=1e-5)
  rows = draw('rollout', GOLDEN / 'hybrid_google.npz', photos / 'a.png', out=tmp_path)
  assert 0 < np.sum(arrays(rows, 'image')) <= 1


def test_images_are_shown_as_the_model_has_them(photos):
  # Standardised by mean and deviation, or to [-1, 1]: the same colours.
  for pp in ('value_range(-1, 1)', 'value_range(-2.1, 2.6)'):
    loaded = weights.load(str(TOKEN))
    pp = f'decode|resize(32)|{pp}'
    loaded = dataclasses.replace(loaded, pp=pp)
    image = photos / 'b.jpg'
    colours = maps.to_colours(loaded, loaded.preprocess([image]))[0]
    expected = np.asarray(
      vit_jax.preprocess([image], pp='decode|resize(32)|value_range(0, 1)')
    )
    np.testing.assert_allclose(colours, expected[0], atol=1e-5)


def test_images_that_are_not_resized_are_shown():
  # As those of configs/shapes.py, all of one size: no other fits the model.
  loaded = weights.load(str(TOKEN))
  loaded = dataclasses.replace(loaded, pp='decode|value_range(-1, 1)')
  image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
  colours = maps.to_colours(loaded, loaded.preprocess([image]))[0]
  np.testing.assert_allclose(colours, image / 255, atol=1e-5)
  # Nor can an image of the model's size be cropped to a larger one.
  crop = 'decode|central_crop(48)|resize(32)|value_range(-1, 1)'
  loaded = dataclasses.replace(loaded, pp=crop)
  colours = maps.to_colours(loaded, np.full((1, 32, 32, 3), 1, np.float32))
  np.testing.assert_allclose(colours, 1, atol=1e-5)


def test_distance(photos, tmp_path, capsys, monkeypatch):
  results, of = [], explain.attention_distances
  spy = lambda *args, **options: results.append(of(*args, **options)) or results[-1]
  monkeypatch.setattr(explain, 'attention_distances', spy)
  rows = draw('distance', TOKEN, photos, '--json', out=tmp_path)
  record = json.loads(capsys.readouterr().out)
  assert record['files'] == [str(tmp_path / f'distance.{s}') for s in ('csv', 'png')]
  each = np.concatenate(results)
  for key, expected in (('pixels', each.mean(0)), ('std_over_images', each.std(0))):
    drawn = np.reshape([float(row[key]) for row in rows], expected.shape)
    np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-5)


def test_similarity_of_positions(tmp_path):
  loaded = vit_jax.load(TOKEN)
  learned = loaded.params['Transformer']['posembed_input']['pos_embedding'][0, 1:]
  expected = np.asarray(posemb_similarity(learned, (4, 4)))
  rows = draw('posemb', TOKEN, out=tmp_path)
  drawn = np.reshape(arrays(rows, 'patch_row', 'patch_column'), (4, 4, 4, 4))
  np.testing.assert_allclose(drawn, expected, atol=1e-5)


def test_fixed_positions(tmp_path):
  from vit_jax.nn.positions import sincos2d

  loaded = model(posemb='sincos2d', classifier='gap')
  positions, grid = parameters._positions(loaded)
  assert grid == (4, 4)
  np.testing.assert_allclose(
    positions, sincos2d(4, 4, loaded.model.width)[0], atol=1e-6
  )
  with pytest.raises(ValueError, match=naming('none', 'filters')):
    parameters._positions(model(posemb='none', classifier='gap'))


def model(**fields):
  module = vit_jax.create_model('vit', 'mu/8', depth=1, num_classes=3, **fields)
  x = jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  variables = jax.tree.map(lambda s: np.full(s.shape, 0.1, np.float32), shapes)
  return weights.Loaded(
    model=module,
    variables=variables,
    image_size=(32, 32),
    channels=3,
    pp='',
    class_names=None,
    source='x',
    format='x',
    report='',
  )


def test_filters(tmp_path):
  rows = draw('filters', TOKEN, out=tmp_path)
  kernel = vit_jax.load(TOKEN).params['embedding']['kernel']
  drawn = np.array([[float(r[c]) for c in ('red', 'green', 'blue')] for r in rows])
  expected = filters_pca(kernel, 28)
  np.testing.assert_allclose(drawn.reshape(28, 8, 8, 3), expected.filters, atol=1e-6)
  assert float(rows[0]['explained']) == pytest.approx(expected.explained[0])
  # The root of a hybrid: its own filters, not components.
  hybrid = GOLDEN / 'hybrid_google.npz'
  rows = draw('filters', hybrid, out=tmp_path)
  kernel = vit_jax.load(hybrid).params['conv_root']['kernel']
  drawn = [float(r['green']) for r in rows if r['filter'] == '2']
  np.testing.assert_allclose(drawn, kernel[:, :, 1, 2].ravel(), rtol=1e-5, atol=1e-7)
  assert rows[0]['explained'] == ''
  for source, components in (('mixer_google.npz', True), ('bit_timm.npz', False)):
    rows = draw('filters', GOLDEN / source, out=tmp_path)
    assert (rows[0]['explained'] != '') == components


def test_formats_and_equal_files(tmp_path):
  for out in ('one', 'two'):
    assert run('data', '--out', tmp_path / out, '--format', 'pdf,svg') == 0
  for suffix in ('pdf', 'svg', 'csv'):
    one, two = (tmp_path / out / f'data.{suffix}' for out in ('one', 'two'))
    assert one.read_bytes() == two.read_bytes()
  assert not (tmp_path / 'one' / 'data.png').exists()
