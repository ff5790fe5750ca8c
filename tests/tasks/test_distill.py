"""Distances and losses against big_vision and DeiT, and runs with a teacher."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import golden, naming, tuning
from vit_jax import models, sharding, trees
from vit_jax.tasks.distill import Distill, DistillFeatures, kl, soft
from vit_jax.train.trainer import Trainer

FIELDS = dict(patch_size=(4, 4), width=8, depth=1, mlp_dim=8, num_heads=2)
SECTION = {
  'model': dict(name='vit', num_classes=9, **FIELDS),
  'image_size': [8, 8],
  'scale': [2.0, 2.0],
  'shift': [0.5, -0.5],
}
SPEC = {
  'image': jax.ShapeDtypeStruct((6, 8, 8, 2), np.float32),
  'label': jax.ShapeDtypeStruct((6,), np.int32),
}


def student(logits, heads=None, **fields):
  """A student whose logits are given, and a task whose teacher's are the golden's."""
  out = dict(zip(('class_logits', 'distilled_logits'), heads or (), strict=False))
  apply = lambda *_, **__: ((logits, out), {})
  return SimpleNamespace(num_classes=9, apply=apply, fields=lambda: fields)


def loss_of(model, targets, **options):
  task = Distill(model, SPEC, teacher=SECTION, **options)
  task.teacher = lambda params, images: (golden('distill')['teacher'], {})
  weight = np.full(6, 1 / 6, np.float32)
  batch = {'image': None, 'label': golden('distill')['labels'], 'weight': weight}
  loss, (metrics, _) = task.loss({'params': {}}, {**batch, 'target': targets}, None)
  agree = metrics.pop('agreement')
  return loss, agree


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    *((f'kl_t{t}', dict(temperature=t)) for t in (1.0, 2.0, 5.0)),
    ('hard', dict(distance='hard')),
  ],
)
def test_distances_are_those_of_big_vision(name, options):
  measure = lambda logits: loss_of(student(logits), None, **options)
  measure = jax.value_and_grad(measure, has_aux=True)
  (loss, agree), grad = measure(golden('distill')['student'])
  assert loss == pytest.approx(golden('distill')[f'{name}/loss'], rel=1e-5)
  np.testing.assert_allclose(grad, golden('distill')[f'{name}/grad'], atol=1e-6)
  assert agree == pytest.approx(golden('distill')['agree_1'].mean())


@pytest.mark.parametrize(
  ('distance', 'weight', 'temperature'),
  [('soft', 0.1, 3.0), ('soft', 0.5, 1.0), ('hard', 0.5, 1.0)],
)
@pytest.mark.parametrize('labels', ['smooth', 'mixed'])
def test_losses_of_two_heads_are_those_of_deit(distance, weight, temperature, labels):
  targets = golden('distill')['soft_labels']
  if labels == 'smooth':
    targets = np.eye(9)[golden('distill')['labels']] * 0.9 + 0.1 / 9

  def measure(heads):
    model = student(heads[0], heads, classifier='distilled')
    options = dict(distance=distance, weight=weight, temperature=temperature)
    return loss_of(model, targets, **options)[0]

  heads = golden('distill')['cls_logits'], golden('distill')['student']
  loss, grads = jax.value_and_grad(measure)(heads)
  name = f'deit_{distance}_alpha{weight}_tau{temperature}_{labels}'
  assert loss == pytest.approx(golden('distill')[f'{name}/loss'], rel=1e-5)
  for grad, head in zip(grads, ('cls', 'dist'), strict=True):
    expected = golden('distill')[f'{name}/grad_{head}']
    np.testing.assert_allclose(grad, expected, atol=1e-6)


def test_soft_is_kl_over_the_number_of_classes():
  logits = golden('distill')['student'], golden('distill')['teacher']
  np.testing.assert_allclose(9 * soft(*logits, 3.0), kl(*logits, 3.0), rtol=1e-6)


def variables_of(task):
  """Returns the variables of a task whose teacher has random parameters."""
  variables = task.init(jax.random.key(0), SPEC)
  image = jnp.ones((1, *task.teacher.image_size, 2))
  variables['params']['distill']['teacher'] = task.teacher.model.init(
    jax.random.key(1), image
  )['params']
  head = variables['params']['distill']['teacher'].get('head')
  if head:
    head['kernel'] = jax.random.normal(jax.random.key(2), head['kernel'].shape)
  return variables


@pytest.mark.parametrize('size', [8, 4])
def test_the_teacher_sees_the_students_images_in_its_own_pixels(size):
  section = {**SECTION, 'image_size': [size, size]}
  model = models.build('vit', num_classes=9, **FIELDS)
  task = Distill(model, SPEC, teacher=section)
  variables = variables_of(task)
  images = jax.random.normal(jax.random.key(3), SPEC['image'].shape)
  own = images * np.float32([2, 2]) + np.float32([0.5, -0.5])
  own = jax.image.resize(own, (6, size, size, 2), 'bicubic')
  params = {'params': variables['params']['distill']['teacher']}
  expected, _ = task.teacher.model.apply(params, own)
  logits, _ = task.teacher(variables['params'], images)
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_the_teacher_sees_mixed_images():
  model = models.build('vit', num_classes=9, **FIELDS)
  task = Distill(model, SPEC, teacher=SECTION, mixup=1.0)
  variables = variables_of(task)
  batch = {
    'image': jax.random.normal(jax.random.key(3), SPEC['image'].shape),
    'label': jnp.arange(6),
    'weight': jnp.full(6, 1 / 6),
  }
  mixed = task.prepare(batch, jax.random.key(4), None)
  assert not np.array_equal(mixed['image'], batch['image'])
  loss, (metrics, _) = task.loss(variables, mixed, jax.random.key(5))
  ours, _ = model.apply(variables, mixed['image'])
  theirs, _ = task.teacher(variables['params'], mixed['image'])
  assert loss == pytest.approx(float(kl(ours, theirs, 1.0).mean()), rel=1e-5)
  same = np.mean(ours.argmax(-1) == theirs.argmax(-1))
  assert metrics['agreement'] == pytest.approx(float(same))


def test_features_are_compared_by_their_angle():
  model = models.build('vit', num_classes=None, **FIELDS)
  section = {**SECTION, 'model': {**SECTION['model'], 'width': 12}}
  task = DistillFeatures(model, SPEC, teacher=section)
  variables = variables_of(task)
  images = jax.random.normal(jax.random.key(3), SPEC['image'].shape)
  batch = {'image': images, 'weight': jnp.full(6, 1 / 6)}
  loss, (metrics, stats) = task.loss(variables, batch, jax.random.key(5))
  layer = variables['params']['distill']['project']
  x = task.predict(variables, batch)['pre_logits'] @ layer['kernel']
  y = task.teacher(variables['params'], images)[1]['pre_logits']
  assert (x.shape, y.shape) == ((6, 12), (6, 12))
  unit = lambda v: v / np.linalg.norm(v, axis=-1, keepdims=True)
  cosine = float(np.sum(unit(x) * unit(y), -1).mean())
  assert loss == pytest.approx(1 - cosine, rel=1e-5)
  assert (metrics, stats) == ({'loss': loss}, {})


@pytest.mark.parametrize(
  ('fields', 'options', 'facts'),
  [
    ({}, dict(distance='hard', temperature=2.0), ('temperature=2.0', "'hard'")),
    ({}, dict(label_smoothing=0.1), ('label_smoothing=0.1', 'weight=1')),
    (dict(classifier='distilled'), {}, ('weight=1.0', 'weight=0.5')),
    ({}, dict(teacher='a.npz'), ('a.npz', 'not known')),
  ],
)
def test_options_without_effect_are_refused(fields, options, facts):
  with pytest.raises(ValueError, match=naming(*facts)):
    Distill(student(None, **fields), SPEC, **{'teacher': SECTION, **options})


def test_labels_that_the_data_lacks_are_refused():
  with pytest.raises(ValueError, match=naming('weight=0.5', 'labels')):
    Distill(student(None), {'image': SPEC['image']}, teacher=SECTION, weight=0.5)


def test_features_need_a_whole_student():
  model = SimpleNamespace(untuned=None)
  with pytest.raises(ValueError, match=naming('config.tune.method=full')):
    DistillFeatures(model, SPEC, teacher=SECTION)


def step_of(name, mesh, accum):
  """Returns (loss, parameters after a step, sharding of a kernel of the teacher)."""
  teacher = {**SECTION, 'model': {**SECTION['model'], 'mlp_dim': 8192}}
  labels = name == 'distill'
  config = {
    'model': {**SECTION['model'], 'num_classes': 9 if labels else None},
    'optim': dict(name='sgd', lr=0.1, accum=accum),
    'task': dict(name=name, teacher=teacher, **({'mixup': 1.0} if labels else {})),
    'steps': 3,
  }
  shapes = {'image': (16, 8, 8, 2), 'label': (16,), 'mask': (16,)}
  spec = {k: jax.ShapeDtypeStruct(x, np.float32) for k, x in shapes.items()}
  spec['label'] = jax.ShapeDtypeStruct((16,), np.int32)
  trainer = Trainer(config, spec, mesh)
  state = trainer.init(tuning.random(trainer.abstract_params))
  rng = np.random.default_rng(0)
  batch = {key: rng.normal(size=x).astype(np.float32) for key, x in shapes.items()}
  batch |= {'label': np.arange(16, dtype=np.int32) % 9, 'mask': np.ones(16, np.float32)}
  with jax.set_mesh(mesh):
    batch = sharding.global_batch(batch, mesh)
    after, metrics = jax.jit(trainer.step)(state, batch)
  kernel = trees.flatten(after.frozen)[KERNEL]
  return float(metrics['loss']), jax.device_get(after.params), kernel.sharding.spec


KERNEL = 'distill/teacher/Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel'


@pytest.mark.parametrize('name', ['distill', 'distill_features'])
def test_eight_devices_and_micro_batches_give_the_same_step(name):
  loss, params, _ = step_of(name, sharding.make_mesh(devices=jax.devices()[:1]), 1)
  other, others, spec = step_of(name, sharding.make_mesh(2, 4), 2)
  assert other == pytest.approx(loss, rel=1e-5)
  for key, x in trees.flatten(params).items():
    np.testing.assert_allclose(trees.flatten(others)[key], x, atol=1e-5, err_msg=key)
  assert 'fsdp' in spec
  assert not any(key.startswith('distill/teacher') for key in trees.flatten(params))
