"""What tuned models compute: reference outputs, and what prompts must amount to."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from tests.support.tuning import (
  SECTIONS,
  attach,
  of_reference,
  plain,
  random,
  reference,
  run,
  vit,
)
from vit_jax import models, trees, tune
from vit_jax.nn.layers import MultiHeadDotProductAttention


def random_params(model) -> dict:
  return trees.unflatten(random(model.shapes((32, 32, 3))['params']))


# -- against references ---------------------------------------------------------------


@pytest.mark.parametrize('method', SECTIONS)
def test_outputs_agree_with_the_reference(method):
  logits, out = run(SECTIONS[method], of_reference(method))
  # float32 of other libraries through three blocks: the README of the references.
  np.testing.assert_allclose(logits, reference()[f'{method}_logits'], atol=1e-5)
  np.testing.assert_allclose(out['encoded'], reference()[f'{method}_tokens'], atol=1e-5)


@pytest.mark.parametrize('method', ['adapter', 'lora'])
def test_models_start_as_they_were(method):
  tuned = attach(**SECTIONS[method])
  init = lambda key: tuned.init(key, jnp.zeros((1, 32, 32, 3)))['params']['tune']
  added = trees.flatten({'tune': jax.jit(init)(jax.random.key(0))})
  logits, _ = run(SECTIONS[method], added)
  np.testing.assert_allclose(logits, plain()[0], atol=1e-6)  # compiled otherwise


def test_merged_lora_is_unmerged_lora():
  added, section = of_reference('lora'), SECTIONS['lora']
  folded = tune.build(**section).merge_added(trees.flatten(vit().params) | added)
  assert folded.keys() == trees.flatten(vit().params).keys()
  params = trees.unflatten(folded)
  logits, _ = vit().model.apply({'params': params}, reference()['image'])
  # One product with the sum, or the sum of two products.
  np.testing.assert_allclose(logits, run(section, added)[0], atol=1e-5)


def test_merged_lora_of_convolutions_is_unmerged_lora():
  model = models.build('convnext', depths=(1,), widths=(8,), num_classes=None)
  section = dict(method='lora', rank=2, alpha=6)
  tuned, _ = tune.attach(model, models.family('convnext'), (8, 8, 3), **section)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  images = draw(1, 8, 8, 3)
  shapes = jax.eval_shape(tuned.init, jax.random.key(0), images)['params']
  params = {name: draw(*x.shape) for name, x in trees.flatten(shapes).items()}
  folded = tune.build(**section).merge_added(params)
  assert any(
    x.ndim == 4 and not np.array_equal(x, params[n]) for n, x in folded.items()
  )
  apply = lambda m, flat: m.apply({'params': trees.unflatten(flat)}, images)[0]
  # One product with the sum, or the sum of two products.
  np.testing.assert_allclose(apply(model, folded), apply(tuned, params), atol=1e-5)


def test_other_methods_cannot_be_merged():
  added = trees.flatten(vit().params) | of_reference('adapter')
  with pytest.raises(ValueError, match=naming('MlpBlock_0', '--tuned_only')):
    tune.build(**SECTIONS['adapter']).merge_added(added)


# -- identities of prompts ------------------------------------------------------------


def prompts():
  rng = np.random.default_rng(0)
  return {'tune/prompts': rng.normal(size=(1, 4, 48)).astype(np.float32)}


def vpt(**options):
  return run(dict(method='vpt', number=4, **options), prompts())[0]


def hidden():
  """Returns the context in which nothing attends to four tokens behind the first."""

  def hide(call, args, kwargs, context):
    if isinstance(context.module, MultiHeadDotProductAttention):
      keys = np.arange(args[1].shape[1])
      kwargs = {**kwargs, 'mask': ((keys < 1) | (keys > 4))[None, None, None]}
    return call(*args, **kwargs)

  return nn.intercept_methods(hide)


def test_no_prompts_are_linear_probing():
  assert attach(method='vpt', number=0) == attach(method='linear')


def test_prompts_that_nothing_attends_to_are_none():
  with hidden():
    hid = vpt()
  np.testing.assert_allclose(hid, plain()[0], atol=1e-5)
  assert np.abs(vpt() - hid).max() > 1e-2  # and they are attended to


@pytest.mark.parametrize(
  ('options', 'change', 'same'),
  [
    ({}, lambda x: x[:, ::-1], {}),  # their order does not matter
    (dict(deep=True), lambda x: x.repeat(3, 0), dict(deep=True, shared=True)),
    (dict(deep=True, layers=[0]), lambda x: x, {}),  # shallow
    ({}, lambda x: x + class_position(), dict(where='before_positions')),
  ],
  ids=['order', 'shared', 'shallow', 'before_positions'],
)
def test_prompts_are_equal_to_others(options, change, same):
  added = {'tune/prompts': change(prompts()['tune/prompts'])}
  logits, _ = run(dict(method='vpt', number=4, **options), added)
  np.testing.assert_allclose(logits, vpt(**same), atol=1e-5)  # sums in another order


def class_position():
  return vit().params['Transformer']['posembed_input']['pos_embedding'][0, 0]


def test_layers_without_prompts_are_those_of_the_backbone():
  section = dict(method='vpt', number=4, deep=True, layers=[2])
  _, out = run(section, prompts())
  expected = plain()[1]
  np.testing.assert_array_equal(out['block01'], expected['block01'])
  assert out['block02'].shape[1] == expected['block02'].shape[1] + 4


def test_prompts_of_zeros_that_are_added_are_none():
  section = dict(method='vpt', where='add', number=16)
  zeros = {'tune/prompts': np.zeros((1, 16, 48), np.float32)}
  np.testing.assert_allclose(run(section, zeros)[0], plain()[0], atol=1e-6)
  one = {'tune/prompts': np.full((1, 1, 48), 0.5, np.float32)}
  each = {'tune/prompts': np.full((1, 16, 48), 0.5, np.float32)}
  logits, _ = run(section | {'number': 1}, one)
  np.testing.assert_array_equal(logits, run(section, each)[0])


@pytest.mark.parametrize('pool', [None, 'image', 'prompts', 'both'])
def test_pooling_takes_the_tokens_that_are_named(pool):
  added = prompts()
  _, token = run(dict(method='vpt', number=4), added)
  every = np.asarray(token['encoded'])
  parts = {'image': every[:, 5:], 'prompts': every[:, 1:5], 'both': every[:, 1:]}
  section = dict(method='vpt', number=4, pool=pool)
  pooled = run(section, added)[1]['pre_logits']
  expected = every[:, 0] if pool is None else parts[pool].mean(1)
  np.testing.assert_allclose(pooled, expected, atol=1e-5)


@pytest.mark.parametrize('pool', [None, 'both'])
def test_a_mean_of_tokens_leaves_prompts_out_by_default(pool):
  fields = dict(patch_size=(8, 8), width=32, depth=1, mlp_dim=32, num_heads=2)
  model = models.build('vit', classifier='gap', num_classes=3, **fields)
  tuned = attach(model, method='vpt', number=4, pool=pool)
  params = random_params(tuned)
  _, out = jax.jit(tuned.apply)({'params': params}, reference()['image'])
  assert out['encoded'].shape[1] == (16 if pool is None else 20)
  np.testing.assert_allclose(out['pre_logits'], out['encoded'].mean(1), atol=1e-6)


def test_prompts_are_dropped_image_by_image():
  tuned = attach(method='vpt', number=4, deep=True, dropout=0.5)
  image = reference()['image'][:1].repeat(2, axis=0)
  params = vit().params | {'tune': {'prompts': np.ones((3, 4, 48), np.float32)}}

  @jax.jit
  def run(params, image):
    rngs = {'dropout': jax.random.key(1)}
    return tuned.apply({'params': params}, image, train=True, rngs=rngs)[0]

  one, other = run(params, image)
  assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize(
  'fields', [dict(posemb='sincos2d', posemb_where='every'), dict(posemb='rotary')]
)
def test_positions_of_patches_are_as_without_prompts(fields):
  small = dict(patch_size=(8, 8), width=32, depth=2, mlp_dim=32, num_heads=2)
  model = models.build('vit', num_classes=3, **small, **fields)
  tuned = attach(model, method='vpt', number=4)
  images = reference()['image']
  params = random_params(model)
  rng = np.random.default_rng(0)
  head = {'kernel': rng.normal(size=(32, 3)), 'bias': np.zeros(3)}
  added = {'prompts': rng.normal(size=(1, 4, 32))}

  with hidden():
    variables = {'params': {**params, 'head': head, 'tune': added}}
    logits, _ = jax.jit(tuned.apply)(variables, images)
  expected, _ = jax.jit(model.apply)({'params': {**params, 'head': head}}, images)
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_frame_surrounds_the_image():
  model = models.build('bit', num_classes=3, blocks=(1,), width=32)
  tuned = attach(model, method='vpt', number=3)
  x = reference()['image']
  params = random_params(tuned)
  added = params['tune']
  assert sum(a.size for a in added.values()) == 3 * 6 * (32 + 6) + 3 * 32 * 6
  framed = np.full((2, 38, 38, 3), np.nan, np.float32)
  framed[:, 3:-3, 3:-3] = x
  framed[:, :3], framed[:, -3:] = added['rows'][:3], added['rows'][3:]
  framed[:, 3:-3, :3], framed[:, 3:-3, -3:] = np.split(added['columns'], 2, 1)
  own = {name: p for name, p in params.items() if name != 'tune'}
  stem = lambda model: jax.jit(lambda v, x: model.apply(v, x)[1]['stem'])
  expected = stem(model)({'params': own}, framed)
  np.testing.assert_array_equal(stem(tuned)({'params': params}, x), expected)


@pytest.mark.parametrize('method', ['vpt', 'adapter', 'lora', 'mlp'])
def test_tuned_models_take_batches_of_any_length(method):
  options = dict(deep=True) if method == 'vpt' else {}
  tuned = attach(method=method, **options)
  variables = jax.eval_shape(tuned.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
  (batch,) = jax.export.symbolic_shape('batch')
  images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
  logits, _ = jax.eval_shape(tuned.apply, variables, images)
  assert logits.shape == (batch, *plain()[0].shape[1:])
