"""Kinds of position embeddings against the formulas of their papers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.abstract import abstract_params, count
from tests.support.scanned import stacked
from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.nn import positions
from vit_jax.nn.layers import MultiHeadDotProductAttention
from vit_jax.nn.positions import Rope

D, L, N, DH = 768, 12, 14 * 14 + 1, 64  # B/16 at 224 px, with a class token

# Parameters besides those of a model without positions: section D.4 of the ViT paper.
PARAMETERS = {
  ('learn', 'stem'): N * D,
  ('learn', 'every'): L * N * D,
  ('learn', 'shared'): N * D,
  ('learn2d', 'stem'): 14 * D + D,  # two halves of 14 rows, and the class token's
  ('learn2d', 'every'): L * 15 * D,
  ('learn2d', 'shared'): 15 * D,
  ('sincos2d', 'every'): 0,
  ('relative', 'stem'): L * (2 * N - 1) * DH,
  ('rotary', 'stem'): 0,
}


def test_parameters_are_those_of_the_paper():
  model = vit_jax.create_model('vit', 'B/16')
  without = count(model.clone(posemb='none'))
  for (kind, where), number in PARAMETERS.items():
    added = count(model.clone(posemb=kind, posemb_where=where)) - without
    assert added == number, (kind, where)


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    (dict(posemb='relative', posemb_where='every'), ('every', 'relative', 'learn2d')),
    (dict(posemb='rotary', rope='dinov3'), ('rotary', 'rope')),
    (dict(attention='axial', classifier='gap', rope='axial'), ('rope', 'full')),
    (dict(attention='axial', classifier='gap', relpos='layer'), ('relpos', 'full')),
    (dict(posemb='none', posemb_where='shared'), ('shared', 'none', 'learn')),
    (dict(posemb='rotary', num_heads=16), ('rotary', '4', 'num_heads')),
    (dict(posemb='learn2d', width=33, num_heads=3), ('learn2d', '33')),
    (dict(attention='axial'), ('axial', 'classifier', 'gap')),
    (
      dict(attention='axial', classifier='gap', posemb='rotary'),
      ('rotary', 'axial', 'learn2d'),
    ),
  ],
)
def test_what_does_not_go_together_is_refused(fields, words):
  model = vit_jax.create_model('vit', 'mu/8', **fields)
  with pytest.raises(UserError, match=naming(*words)):
    abstract_params(model, 16)


def tiny(**fields):
  fields = dict(depth=2, num_classes=3, classifier='token') | fields
  return vit_jax.create_model('vit', 'mu/8', **fields)


def images(h=16, w=24):
  return jax.random.normal(jax.random.key(0), (2, h, w, 3))


def perturbed(model, x=None, seed=2):
  """Returns params with noise on every leaf, from shapes alone: nothing is compiled."""
  init = jax.eval_shape(model.init, jax.random.key(1), images() if x is None else x)
  rng = np.random.default_rng(seed)

  def values(path, x):
    mean = 1.0 if path[-1].key == 'scale' else 0.0
    return (mean + 0.3 * rng.standard_normal(x.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(values, init['params'])


def pre_logits(model, params):
  return np.asarray(model.apply({'params': params}, images())[1]['pre_logits'])


def test_one_table_is_added_before_every_block():
  shared, every = (tiny(posemb_where=where) for where in ('shared', 'every'))
  params = perturbed(shared)
  flat = trees.flatten(params)
  table = flat.pop('Transformer/posembed_input/pos_embedding')
  for i in range(2):
    flat[f'Transformer/encoderblock_{i}/posembed_input/pos_embedding'] = table
  expected = pre_logits(every, trees.unflatten(flat))
  np.testing.assert_allclose(pre_logits(shared, params), expected, atol=1e-5)
  stem = pre_logits(tiny(posemb_where='stem'), params)
  assert np.abs(stem - expected).max() > 1e-2


def test_a_table_of_two_axes_is_one_table_of_their_pairs():
  model = tiny(posemb='learn2d')
  params = perturbed(model)
  flat = trees.flatten(params)
  stem = 'Transformer/posembed_input/pos_embedding'
  y, x, cls = (np.asarray(flat.pop(f'{stem}_{name}'))[0] for name in ('y', 'x', 'cls'))
  pairs = [np.concatenate([y[i], x[j]]) for i in range(2) for j in range(3)]
  flat[stem] = jnp.stack([cls[0], *pairs])[None]
  expected = pre_logits(tiny(), trees.unflatten(flat))
  np.testing.assert_allclose(pre_logits(model, params), expected, atol=1e-6)


KINDS = [('learn', 'every'), ('learn2d', 'shared'), ('relative', 'stem')]


@pytest.mark.parametrize(('kind', 'where'), KINDS)
def test_scanned_blocks_compute_the_same(kind, where):
  fields = dict(posemb=kind, posemb_where=where)
  params = perturbed(tiny(**fields))
  expected = pre_logits(tiny(**fields), params)
  scanned = tiny(scan=True, remat='full', **fields)
  result = pre_logits(scanned, stacked(params, 2))
  np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize('kind', ['learn2d', 'relative', 'rotary'])
def test_the_class_token_alone_has_the_same_logits(kind):
  model = tiny(posemb=kind)
  params = perturbed(model)
  run = lambda features: model.apply({'params': params}, images(), features=features)
  np.testing.assert_allclose(run(False)[0], run(True)[0], atol=1e-5)


def attention_weights(function, query, key):
  """Returns the softmax [B, M, N, S] of scores that function(b, m, n, s) gives."""
  B, N, M, _ = query.shape
  shape = (B, M, N, key.shape[1])
  scores = np.reshape([function(*at) for at in np.ndindex(*shape)], shape)
  scores = np.exp(scores - scores.max(-1, keepdims=True))
  return scores / scores.sum(-1, keepdims=True)


def project(params, x, name):
  return np.einsum('bnd,dmh->bnmh', x, params[name]['kernel']) + params[name]['bias']


def test_relative_positions_are_in_the_scores():
  x = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)
  attention = MultiHeadDotProductAttention(num_heads=2)
  module = positions.RelativePositions((2, 2), 1.0)
  run = lambda p, y: attention.apply(
    p, y, positions=lambda q, k: module.apply(table, q, k), mutable=['intermediates']
  )
  q = jnp.zeros((1, 5, 2, 4))
  table = module.init(jax.random.key(0), q, q)
  variables = attention.init(jax.random.key(1), x)
  result = run(variables, x)[1]['intermediates']['attention_weights'][0]
  params = jax.tree.map(np.asarray, variables['params'])
  q, k = project(params, x, 'query'), project(params, x, 'key')
  rows = np.asarray(table['params']['pos_embedding'])

  def score(b, m, i, j):
    return q[b, i, m] @ (k[b, j, m] + rows[i - j + 4]) / 2

  np.testing.assert_allclose(result, attention_weights(score, q, k), atol=1e-6)


def test_rotary_positions_rotate_pairs_as_complex_numbers():
  h, w, head = 2, 3, 16
  x = np.random.default_rng(0).standard_normal((1, 7, 1, head)).astype(np.float32)
  result = np.asarray(Rope('rotary', (h, w)).apply({}, x, x)[1])
  np.testing.assert_array_equal(result[0, 0], x[0, 0])  # the class token stays
  pairs = x[..., :8] + 1j * x[..., 8:]
  for n in range(6):
    for i in range(8):
      position = n // w if i < 4 else n % w  # the row, then the column
      rotated = pairs[0, 1 + n, 0, i] * np.exp(1j * position * 100 ** (-(i % 4) / 4))
      expected = [rotated.real, rotated.imag]
      np.testing.assert_allclose(result[0, 1 + n, 0, [i, i + 8]], expected, atol=1e-6)


def test_rotary_scores_depend_on_where_patches_are_to_each_other():
  rng = np.random.default_rng(0)
  q, k = (
    np.tile(rng.standard_normal((1, 1, 1, 8)), (1, 12, 1, 1)).astype(np.float32)
    for _ in range(2)
  )
  q, k, _ = Rope('rotary', (3, 4)).apply({}, q, k)
  scores = np.einsum('bnmd,bsmd->ns', q, k).reshape(3, 4, 3, 4)
  for dy in range(3):
    for dx in range(4):
      same = [
        scores[y, x, y + dy, x + dx] for y in range(3 - dy) for x in range(4 - dx)
      ]
      np.testing.assert_allclose(same, same[0], atol=1e-5)
  assert np.ptp(scores) > 0.1


@pytest.mark.parametrize(
  ('kind', 'way'),
  [('learn', 'image_size'), ('learn2d', 'image_size'), ('relative', 'another posemb')],
)
def test_images_of_another_size_are_refused(kind, way):
  model = tiny(posemb=kind)
  params = perturbed(model)
  with pytest.raises(UserError, match=naming('2x2', way)):
    jax.eval_shape(lambda: model.apply({'params': params}, images(16, 16)))


# -- today's models --------------------------------------------------------------------

# Tables of sines and cosines made with timm and the authors' code; reference grid 4 x 4.
KINDS = {
  'eva02': dict(kind='eva', reference=(4, 4)),
  'naver_axial': dict(kind='axial'),
  'pe': dict(kind='pe', reference=(4, 4), first=1),
  'dinov3': dict(kind='dinov3'),
  'dinov3_authors_separate': dict(kind='dinov3'),
  'dinov3_authors_max': dict(kind='dinov3_max'),
  'dinov3_authors_min': dict(kind='dinov3_min'),
}


@pytest.fixture(scope='module')
def published():
  with np.load(GOLDEN / 'positions.npz') as file:
    return dict(file)


@pytest.mark.parametrize('grid', [(4, 4), (6, 3), (7, 7)])
@pytest.mark.parametrize('name', KINDS)
def test_rotary_positions_are_those_of_the_published_code(published, name, grid):
  h, w = grid
  sin, cos = (published[f'rope_{name}_{wave}_{h}x{w}'] for wave in ('sin', 'cos'))
  x = np.random.default_rng(0).standard_normal((1, 2 + h * w, 3, 16), np.float32)
  query, key, _ = Rope(grid=grid, **KINDS[name]).apply({}, x[:, :5], x)
  patches = x[:, 2:]
  if 'dinov3' in name:
    other = np.concatenate([-patches[..., 8:], patches[..., :8]], axis=-1)
  else:
    pairs = patches.reshape(*patches.shape[:-1], 8, 2)
    other = np.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(patches.shape)
  expected = patches * cos[:, None] + other * sin[:, None]
  np.testing.assert_allclose(key[:, 2:], expected, atol=5e-6)  # angles of up to 16 rad
  np.testing.assert_array_equal(key[:, :2], x[:, :2])
  np.testing.assert_array_equal(query, key[:, :5])


def test_periods_of_a_file_replace_the_formula(published):
  sin = published['rope_dinov3_authors_bf16_periods_sin_7x7']
  periods = 100 ** (np.arange(4) / 4)
  periods = tuple(jnp.asarray(periods, jnp.bfloat16).astype(float).tolist())
  x = np.zeros((1, 49, 1, 16), np.float32)
  x[..., :8] = 1  # (1, 0) becomes (cos, sin)
  for base, error in ((periods, 1e-6), (None, 0.02)):
    _, key, _ = Rope('dinov3', (7, 7), base).apply({}, x, x)
    worst = np.abs(key[0, :, 0, 8:] - sin[:, :8]).max()
    assert (worst < error) if base else (1e-4 < worst < error)


def test_places_are_augmented_in_training_alone():
  x = np.random.default_rng(0).standard_normal((1, 6, 1, 8), np.float32)

  def run(augment, seed=0, train=True):
    rope = Rope('dinov3', (2, 3), augment=augment, train=train)
    return rope.apply({}, x, x, rngs={'dropout': jax.random.key(seed)})[1]

  plain = run(None)
  np.testing.assert_allclose(run((0.0, 1.0, 1.0)), plain, atol=1e-6)
  np.testing.assert_array_equal(run((0.5, 2.0, 2.0), train=False), plain)
  some = [run(augment) for augment in ((0.5, 1, 1), (0, 2, 1), (0, 1, 2))]
  some.append(run((0.5, 1, 1), seed=1))
  for i, a in enumerate(some):
    assert all(np.abs(a - b).max() > 1e-2 for b in (plain, *some[:i]))
  # A shift of all places turns all patches alike: scores stay.
  scores = lambda y: np.einsum('bnmd,bsmd->ns', y, y)
  np.testing.assert_allclose(scores(some[0]), scores(plain), atol=1e-5)


@pytest.mark.parametrize('grid', [(4, 4), (6, 3)])
def test_a_table_of_offsets_has_the_rows_of_beit(published, grid):
  index = published['beit_index_{}x{}'.format(*grid)]
  table = np.random.default_rng(0).standard_normal((index.max() + 1, 2), np.float32)
  module = positions.TableOfOffsets(2, grid)
  bias = module.apply({'params': {'table': table}}, len(index))
  np.testing.assert_array_equal(bias[0], table[index].transpose(2, 0, 1))
  # Without a token before the patches, the last three rows are not there.
  bias = module.apply({'params': {'table': table[:-3]}}, len(index) - 1)
  np.testing.assert_array_equal(bias[0], table[index[1:, 1:]].transpose(2, 0, 1))


@pytest.mark.parametrize('fields', [dict(rope='mixed'), dict(posemb='relative')])
def test_two_attentions_of_a_block_have_the_same_positions(fields):
  model = vit_jax.create_model('vit', 'mu/8', block='branches', depth=1, **fields)
  names = trees.flatten(abstract_params(model, 16))
  assert sum(bool(re.search('/(rope|posembed_relative)/', name)) for name in names) == 1
