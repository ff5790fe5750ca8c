"""Masked patch prediction: the corruption, the targets and the loss."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from vit_jax import evaluators, models, sharding, tasks, tune
from vit_jax.learn import masked_patches
from vit_jax.train.step import gradients

SPEC = {'image': jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)}  # 16 patches each
KEY = jax.random.key(4)  # For dropout, which is off.


@functools.cache
def plain():
  return build()


def build(variant='mu/8', task=None, **fields):
  fields = dict(num_classes=None, depth=1, width=16, mlp_dim=16) | fields
  model = models.build('vit', variant, **fields)
  return tasks.build('masked_patches', model, SPEC, **(task or {}))


def batch(size=8, seed=0):
  rng = np.random.default_rng(seed)
  return {
    'image': rng.uniform(-1, 1, (size, 32, 32, 3)).astype(np.float32),
    'weight': np.full(size, 1 / size, np.float32),
    'index': np.arange(size, dtype=np.int32),
  }


@functools.cache
def started(task):
  """Returns variables under which predictions differ from patch to patch."""
  variables = jax.jit(lambda: task.init(jax.random.key(0), SPEC))()
  head = variables['params']['masked_patches']['head']
  head['kernel'] = jax.random.normal(jax.random.key(1), head['kernel'].shape)
  return variables


# -- corruption -----------------------------------------------------------------------


def test_corruption_has_the_shares_of_the_paper():
  images, N, k = 1024, 98, 49
  drawn = jax.jit(masked_patches.draw, static_argnums=(1, 2))(
    jax.random.key(0), k, (images, N)
  )
  positions, masked, source = map(np.asarray, drawn)
  swapped = source != np.arange(N)
  chosen = np.zeros((images, N), bool)
  np.put_along_axis(chosen, positions, True, axis=1)
  assert (chosen.sum(1) == k).all(), 'the same number in each image, none twice'
  assert not (masked & swapped).any()
  assert not ((masked | swapped) & ~chosen).any()
  total = chosen.size  # 1e5 patches: a standard deviation is 0.2 % of the corrupted
  assert chosen.sum() / total == 0.5
  assert abs(masked.sum() / chosen.sum() - 0.8) < 0.01
  assert abs(swapped.sum() / chosen.sum() - 0.1) < 0.01
  rest = chosen & ~masked & ~swapped
  assert abs(rest.sum() / chosen.sum() - 0.1) < 0.01
  # Each patch is chosen as often as another, and each of the others stands in for it.
  assert np.abs(chosen.mean(0) - 0.5).max() < 0.08  # 5 deviations of 1,024 images
  distance = (source - np.arange(N))[swapped] % N
  assert set(distance) == set(range(1, N))


def test_an_evaluation_corrupts_an_example_alike_in_any_batch():
  index = jnp.array([5, 0, 7])
  of_examples = jax.jit(masked_patches.draw_for_examples, static_argnums=(1, 2))
  together = of_examples(index, 8, 16)
  for i, one in enumerate(index):
    alone = of_examples(one[None], 8, 16)
    for a, b in zip(together, alone, strict=True):
      np.testing.assert_array_equal(a[i], b[0])
  assert (together.masked[0] != together.masked[1]).any()


@pytest.mark.parametrize(
  ('variant', 'fields'),
  [
    ('mu/8', dict(classifier='gap', scan=True, remat='full', depth=2)),
    ('R50+mu/16', dict(stem_blocks=(1,), stem_width=32)),
  ],
)
def test_models_of_patches_see_corrupted_embeddings(variant, fields):
  task = build(variant, **fields)
  mask = jnp.arange(16.0)

  def stems(images):
    params = task.model.init(jax.random.key(0), images)
    drawn = masked_patches.draw(KEY, task.corrupted, (8, task.patches))
    with masked_patches.corrupt(task.layer, mask, drawn):
      _, out = task.model.apply(params, images)
    return out['stem'], task.model.apply(params, images)[1]['stem'], drawn

  stem, clean, drawn = jax.jit(stems)(batch()['image'])
  clean = np.asarray(clean).reshape(8, task.patches, -1)
  expected = np.take_along_axis(clean, np.asarray(drawn.source)[..., None], 1)
  expected[np.asarray(drawn.masked)] = mask
  np.testing.assert_allclose(stem.reshape(expected.shape), expected, atol=1e-6)


# -- the loss -------------------------------------------------------------------------


def test_only_corrupted_patches_are_learned_from():
  task = plain()
  variables = started(task)
  prepared = task.prepare(batch(), jax.random.key(3), None)

  def loss(shift):
    def add(call, args, kwargs, context):
      out = call(*args, **kwargs)
      return out + shift if context.module.name == 'encoder_norm' else out

    with nn.intercept_methods(add):
      return task.loss(variables, prepared, KEY)[0]

  grads = jax.jit(jax.grad(loss))(jnp.zeros((8, 17, 16)))
  learned = np.abs(grads).max(-1) > 0
  assert not learned[:, 0].any(), 'the class token is learned from'
  expected = np.zeros((8, 16), bool)
  np.put_along_axis(expected, np.asarray(prepared['positions']), True, axis=1)
  np.testing.assert_array_equal(learned[:, 1:], expected)


def test_micro_batches_add_up_to_the_batch_by_the_weights_of_examples():
  task = plain()
  prepared = task.prepare(batch(), jax.random.key(3), None)
  prepared['weight'] = np.arange(8, dtype=np.float32) / 28  # the first counts nothing
  loss = lambda params, stats, *args: task.loss({'params': params}, *args)
  params, fn = started(task)['params'], jax.jit(gradients, static_argnums=(0, 5))
  whole, grads, _ = fn(loss, params, {}, prepared, jax.random.key(1), 1)
  parts, sums, _ = fn(loss, params, {}, prepared, jax.random.key(1), 4)
  prepared['image'] = prepared['image'] * (np.arange(8) > 0)[:, None, None, None]
  for other in (parts, fn(loss, params, {}, prepared, jax.random.key(1), 1)[0]):
    for name, value in whole.items():
      np.testing.assert_allclose(other[name], value, rtol=1e-5)
  scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(sums), strict=True):
    # float32 sums over examples, regrouped, through a block.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)
  assert np.abs(grads['masked_patches']['mask']).max() > 0


def test_meshes_corrupt_and_learn_alike():
  task = plain()
  variables = jax.device_get(started(task))
  results = []

  def step(variables, batch):
    drawn = task.prepare(batch, jax.random.key(3), None)
    fields = {key: drawn[key] for key in masked_patches.Corruption._fields}
    return task.loss(variables, drawn, KEY)[0], fields

  for devices in (1, 8):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
      compiled = jax.jit(step, out_shardings=sharding.replicated_sharding(mesh))
      results.append(compiled(variables, sharding.global_batch(batch(), mesh)))
  (loss, drawn), (other_loss, other_drawn) = jax.device_get(results)
  for name, x in drawn.items():
    np.testing.assert_array_equal(x, other_drawn[name], err_msg=name)
  np.testing.assert_allclose(loss, other_loss, rtol=1e-6)  # a sum over 8 devices


def test_evaluation_is_of_clean_features_and_fixed_masks():
  task = plain()
  variables = started(task)
  predict = jax.jit(task.predict)
  out = predict(variables, batch())
  _, clean = jax.jit(task.model.apply)(
    {'params': task._encoder(variables['params'])}, batch()['image']
  )
  for name, x in clean.items():
    np.testing.assert_allclose(out[name], x, atol=1e-5, err_msg=name)
  assert out['masked_loss'].shape == out['masked_accuracy'].shape == (8,)
  # Another image is another loss, as is the same image with other patches corrupted.
  other = predict(variables, batch() | {'index': np.arange(8, dtype=np.int32) + 8})
  assert (out['masked_loss'] != other['masked_loss']).all()


@pytest.mark.parametrize('devices', [1, 8])
def test_the_evaluator_is_exact(tmp_path, devices):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (13, 2, 3, 3), np.uint8)
  np.savez(tmp_path / 'x.npz', images=images, labels=np.arange(13) % 3)
  data = dict(source=f'arrays:{tmp_path}/x.npz', split='train', batch_size=8)
  evaluator = evaluators.build(
    'masked_patches',
    sharding.make_mesh(devices=jax.devices()[:devices]),
    data=data | dict(pp='value_range(-1, 1)'),
  )

  def predict(scale, batch):
    x = batch['image'].mean((1, 2, 3))
    nan = jnp.where((batch['image'] == 0).all((1, 2, 3)), jnp.nan, 0)  # padding
    return {'masked_loss': scale * (x + 2) + nan, 'masked_accuracy': x > 0}

  means = images.mean((1, 2, 3)) / 127.5 - 1
  expected = {
    'loss': 3 * means.mean() + 6,
    'accuracy': (means > 0).mean(),
    'examples': 13,
  }
  assert evaluator.run(predict, 3.0) == pytest.approx(expected, rel=1e-5)
  of_pixels = lambda scale, batch: {'masked_loss': predict(scale, batch)['masked_loss']}
  assert set(evaluator.run(of_pixels, 3.0)) == {'loss', 'examples'}


# -- refusals -------------------------------------------------------------------------


def other(model):
  return tasks.build('masked_patches', model, SPEC)


def lora(model):
  return tune.attach(model, models.family('vit'), (32, 32, 3), 'lora')[0]


WIDE = dict(patch_size=(2, 16), task=dict(target='downsized'))
# What makes the task, and the words of the error.
REFUSED = [
  (lambda: build(num_classes=10), ('num_classes', '10')),
  (lambda: build(representation_size=8), ('representation_size', '8')),
  (lambda: build(classifier='map'), ('classifier', 'map')),
  (lambda: build(task=dict(rate=0.01)), ('rate=0.01', '16 patches')),
  (lambda: build(**WIDE), ('downsized', '2 x 16')),
  (lambda: other(models.build('convnext', 'T')), ('ConvNeXt', 'vit')),
  (lambda: other(lora(plain().model)), ('masked_patches', 'config.tune.method')),
]


@pytest.mark.parametrize(('make', 'words'), REFUSED)
def test_models_and_rates_without_a_task_are_refused(make, words):
  with pytest.raises(ValueError, match=naming(*words)):
    make()


# -- targets --------------------------------------------------------------------------


def test_colors_have_three_bits_a_channel():
  levels = np.array([[0, 0, 0], [1, 1, 1], [0.124, 0.126, 0.5], [0.999, 0.25, 0.874]])
  codes = masked_patches.color_code(jnp.float32(levels * 2 - 1))
  code = lambda r, g, b: r + 8 * g + 64 * b
  assert codes.tolist() == [0, 511, code(0, 1, 4), code(7, 2, 6)]
  gray = masked_patches.color_code(jnp.float32([[-1], [0], [1]]))
  assert gray.tolist() == [0, 4, 7]
  beyond = masked_patches.color_code(jnp.float32([[-1.2] * 3, [1.2] * 3]))
  assert beyond.tolist() == [0, 511]


def test_targets_are_those_of_a_loop():
  images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32)
  targets = {
    name: np.asarray(masked_patches.Target(name, (8, 8), 3).compute(images))
    for name in masked_patches.TARGETS
  }
  assert {k: x.shape for k, x in targets.items()} == {
    'mean_color': (2, 6, 1),
    'downsized': (2, 6, 16),
    'pixels': (2, 6, 192),
  }
  code = lambda x: sum(
    min(int(8 * (x[..., c].mean(dtype=np.float64) + 1) / 2), 7) << 3 * c
    for c in range(3)
  )
  for b in range(2):
    for n in range(6):
      y, x = 8 * (n // 3), 8 * (n % 3)
      patch = images[b, y : y + 8, x : x + 8]
      assert targets['mean_color'][b, n] == [code(patch)]
      cells = [patch[i : i + 2, j : j + 2] for i in (0, 2, 4, 6) for j in (0, 2, 4, 6)]
      assert targets['downsized'][b, n].tolist() == [code(cell) for cell in cells]
      np.testing.assert_array_equal(targets['pixels'][b, n], patch.ravel())


@pytest.mark.parametrize('name', masked_patches.TARGETS)
def test_the_loss_is_its_formula(name):
  target = masked_patches.Target(name, (8, 8), 3)
  rng = np.random.default_rng(0)
  goal = np.asarray(
    target.compute(rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32))
  )
  predicted = rng.normal(size=(2, 4, target.outputs)).astype(np.float32)
  measured = target.measure(jnp.asarray(predicted), jnp.asarray(goal))
  if name == 'pixels':
    expected = {'loss': ((predicted - goal) ** 2).mean(-1)}
  else:
    logits = predicted.reshape(*goal.shape, 512).astype(np.float64)
    of_goal = np.take_along_axis(logits, goal[..., None], -1)[..., 0]
    loss = (np.log(np.exp(logits).sum(-1)) - of_goal).mean(-1)
    expected = {'loss': loss, 'accuracy': (logits.argmax(-1) == goal).mean(-1)}
  assert measured.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_allclose(measured[key], value, rtol=1e-5)
