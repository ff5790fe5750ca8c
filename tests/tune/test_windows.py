"""Prompts in the windows of Swin: the released code's outputs, and what they amount to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.goldens import path_of
from vit_jax import models, trees, tune, weights
from vit_jax.nn import attention

TINY = [dict(fields, num_classes=5) for fields in models.family('swin').tiny]


def attach(model, size=32, **options):
  section = {'method': 'vpt', **options}
  return tune.attach(model, models.family('swin'), (size, size, 3), **section).model


@functools.cache
def tiny(i=0, **fields):
  """Returns (model, its parameters, at random)."""
  model = models.build('swin', **TINY[i], **fields)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32)
  return model, jax.tree.map(draw, shapes['params'])


def images(size=32):
  rng = np.random.default_rng(1)
  return rng.uniform(-1, 1, (2, size, size, 3)).astype(np.float32)


def added(*sets, number=3):
  """Returns {'stage1': prompts, ...} of so many sets per stage."""
  rng = np.random.default_rng(2)
  shape = lambda s, n: (n, number, 16 << s)
  draw = lambda *size: rng.normal(0, 2, size).astype(np.float32)
  return {f'stage{s + 1}': {'prompts': draw(*shape(s, n))} for s, n in enumerate(sets)}


def run(model, params, x, prompts, **options):
  tuned = attach(model, x.shape[1], number=3, **options)
  return jax.jit(tuned.apply)({'params': params | {'tune': prompts}}, x)


@functools.cache
def plain(i=0):
  model, params = tiny(i)
  return jax.jit(model.apply)({'params': params}, images())


@functools.cache
def shallow(i=0):
  return run(*tiny(i), images(), added(1))[0]


@pytest.mark.parametrize(
  ('kind', 'pool'),
  [('shallow', 'both'), pytest.param('deep', 'image', marks=pytest.mark.slow)],
)
def test_outputs_are_those_of_the_released_code(golden, kind, pool):
  # github.com/KMnP/vpt, 4410440, run image by image on the weights of swin_timm: within a
  # batch its shallow prompts go from one image to the next. It pools prompts as well;
  # 'image': what it returns before that, its prompts left out.
  file, source = golden('swin_vpt'), weights.load(path_of('swin_timm'))
  sets = {n[-6:]: x for n, x in file.items() if n.startswith(f'{kind}_stage')}
  number = sets['stage1'].shape[1]
  tuned = attach(source.model, 64, number=number, deep=kind == 'deep', pool=pool)
  params = source.params | {'tune': {n: {'prompts': x} for n, x in sets.items()}}
  image = golden('swin_timm.expected')['image']
  shapes = jax.eval_shape(tuned.init, jax.random.key(0), image)['params']
  assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  logits, _ = jax.jit(tuned.apply)({'params': params}, image)
  np.testing.assert_allclose(logits, file[f'{kind}_{pool}'], rtol=0, atol=1e-5)


def test_no_prompts_are_linear_probing():
  of = lambda **section: tune.attach(
    tiny()[0], models.family('swin'), (32, 32, 3), **section
  )
  assert of(method='vpt', number=0) == of(method='linear')


@pytest.mark.parametrize('i', [0, 1])
@pytest.mark.slow
def test_prompts_that_nothing_attends_to_are_none(monkeypatch, i):
  def without_prompts(query, key, value, **options):
    if key.shape[1] == model.windows[0] ** 2 + 3:
      options['mask'] = (jnp.arange(key.shape[1]) >= 3)[None, None, None]
    return attend(query, key, value, **options)

  attend, (model, params) = attention.attend, tiny(i)
  seen = shallow(i)
  monkeypatch.setattr(attention, 'attend', without_prompts)
  hidden, out = run(model, params, images(), added(1))
  logits, features = plain(i)
  np.testing.assert_allclose(hidden, logits, rtol=0, atol=1e-5)  # sums of other lengths
  assert np.abs(seen - hidden).max() > 1e-2  # and they are attended to
  for name, x in features.items():
    np.testing.assert_allclose(out[name], x, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_deep_prompts_in_one_layer_are_shallow_ones():
  deep, _ = run(*tiny(), images(), added(1), deep=True, layers=[0])
  np.testing.assert_array_equal(deep, shallow())


@pytest.mark.slow
def test_blocks_before_the_first_prompts_are_those_of_the_backbone():
  _, out = run(
    *tiny(), images(), {'stage2': added(1, 1)['stage2']}, deep=True, layers=[2]
  )
  np.testing.assert_allclose(out['stage1'], plain()[1]['stage1'], rtol=0, atol=1e-6)
  assert np.abs(out['stage2'] - plain()[1]['stage2']).max() > 1e-2


@pytest.mark.slow
def test_blocks_may_be_computed_again_and_maps_may_be_odd():
  model, params = tiny()
  expected, _ = run(model, params, images(27), added(2, 1), deep=True)  # 7 x 7, 4 x 4
  again = model.clone(remat='full')
  found, _ = run(again, params, images(27), added(2, 1), deep=True)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('shared', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_prompt_has_a_gradient(shared):
  model, params = tiny()
  tuned = attach(model, number=3, deep=True, shared=shared, dropout=0.1)
  prompts = added(*((1, 1) if shared else (2, 1)))

  def loss(prompts):
    variables, rngs = (
      {'params': params | {'tune': prompts}},
      {'dropout': jax.random.key(0)},
    )
    return tuned.apply(variables, images(), train=True, rngs=rngs)[0].var()

  for name, x in trees.flatten(jax.jit(jax.grad(loss))(prompts)).items():
    assert (np.abs(x).max((1, 2)) > 0).all(), name
