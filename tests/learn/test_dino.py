"""DINO and DINOv2: the parts and whole steps of the authors' code, and runs."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vit_jax
from tests.support import golden, naming, runs
from vit_jax import config, models, optim, sharding, tasks, trees, weights
from vit_jax.errors import Diverged, UserError
from vit_jax.learn import dino
from vit_jax.learn.block_masks import count_groups, draw_mask, draw_masks
from vit_jax.learn.branches import skip_branches
from vit_jax.learn.files import dino as rules_of
from vit_jax.nn.stack import StochasticDepth
from vit_jax.optim.schedules import half_cosine
from vit_jax.train.step import State, gradients, init_state, make_step
from vit_jax.weights import rename

KEY = jax.random.key(4)


# -- parts ------------------------------------------------------------------------------


def test_targets_are_those_of_the_authors():
  reference = golden('dinov2_parts')
  # Centering: the center moves after each use.
  center, T = reference['centers_used'][0, 0], 0.05
  for i, teacher in enumerate(reference['teacher']):
    np.testing.assert_allclose(center, reference['centers_used'][i, 0], atol=1e-7)
    targets = jax.nn.softmax((teacher - center) / T)
    np.testing.assert_allclose(targets, reference['centred'][i], atol=3e-7)
    center = center + 0.1 * (teacher - center).mean(0)
  mask = np.ones(8, bool)
  for name, i, rounds in (('1', 0, 1), ('3', 0, 3), ('10', 0, 10), ('patch_3', 1, 3)):
    logits = reference['teacher'][i] / (0.05 if i == 0 else 0.06)
    added = dino.sinkhorn(logits, mask, rounds)
    targets = jax.nn.softmax(logits + added)
    expected = reference[f'sinkhorn_{name}']
    # Logits are up to 20, so that their rounding alone is 1e-6 of a target.
    np.testing.assert_allclose(targets, expected, rtol=5e-6, atol=1e-7, err_msg=name)


def test_koleo_is_that_of_the_authors():
  reference = golden('dinov2_parts')
  x = reference['koleo_x']
  mask = np.ones(len(x), bool)
  value = lambda x, group=16: dino.koleo(x, mask, group).mean()
  loss, grad = jax.value_and_grad(value)(x)
  np.testing.assert_allclose(loss, reference['koleo'], rtol=1e-5)
  # Two points are 1e-3 apart, so that gradients reach 30.
  np.testing.assert_allclose(grad, reference['koleo_grad'], atol=1e-4 * 31)
  # Groups are strided, so that micro-batches keep them.
  pairs = x.reshape(2, 8, -1).swapaxes(0, 1).reshape(16, -1)
  of_groups = dino.koleo(pairs, mask, 8).reshape(8, 2).mean(0)
  np.testing.assert_allclose(of_groups, reference['koleo_of_groups'], rtol=1e-5)
  # A masked example is nobody's neighbour.
  twice = np.concatenate([x, x[:1]])
  losses = dino.koleo(twice, np.arange(17) < 16, 17)
  np.testing.assert_allclose(losses[:16].mean(), reference['koleo'], rtol=1e-5)


def test_losses_are_those_of_the_authors():
  reference = golden('dino_losses')
  crops = lambda x: x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1)  # [B, n, K]
  center = np.zeros(24, np.float32)
  for i, epoch in enumerate(reference['epochs']):
    T = reference['teacher_temps'][epoch]
    teacher = crops(reference['teacher'][i]) - center

    def loss(student, teacher=teacher, T=T):
      log_p = dino.log_student(crops(student))
      return dino.cross_entropy(jax.nn.softmax(teacher / T), log_p).mean()

    value, grad = jax.value_and_grad(loss)(reference['student'][i])
    np.testing.assert_allclose(value, reference['dino_losses'][i], rtol=1e-6)
    np.testing.assert_allclose(grad, reference['dino_grads'][i], atol=1e-6)
    center = center + 0.1 * teacher.mean((0, 1))
    np.testing.assert_allclose(center, reference['dino_centers'][i, 0], atol=1e-7)
    # The patches of iBOT.
    before = reference['ibot_patch_centers'][i - 1, 0, 0] if i else 0
    patches = lambda x: crops(x.reshape(8, -1)).reshape(4, 2, 12, 16)
    T = reference['ibot_patch_temps'][epoch]
    targets = jax.nn.softmax((patches(reference['ibot_teacher_patch'][i]) - before) / T)
    log_p = dino.log_student(patches(reference['ibot_student_patch'][i]))
    weights = dino.hidden_weights(crops(reference['ibot_mask'][i].reshape(8, -1)))
    value = -(weights * (targets * log_p).sum(-1)).sum((1, 2)).mean()
    np.testing.assert_allclose(value, reference['ibot_patch_losses'][i], rtol=1e-6)


# -- whole steps ------------------------------------------------------------------------

SMALL = dict(patch_size=(8, 8), width=24, depth=2, mlp_dim=96, num_heads=2)
SMALL |= dict(act='gelu_erf', num_classes=None)
HEAD = dict(outputs=20, hidden=32, bottleneck=12, lengths=True)
PATCH_HEAD = dict(outputs=28, hidden=28, bottleneck=10, lengths=True)
V2 = dict(koleo=0.1, koleo_group=4, temperature=0.06, temperature_start=0.05)
V2 |= dict(temperature_warmup=2)
# {golden: (recipe, fields of the model, task)}.
STEPS = {
  'dino_step': ('dino_i1k', {}, dict(head=HEAD | dict(lengths=False))),
  'dinov2_step_centering': (
    'dinov2_i1k',
    dict(layer_scale=1.0),
    dict(V2, head=HEAD, patch_head='shared'),
  ),
  'dinov2_step_sinkhorn': (
    'dinov2_i1k',
    dict(layer_scale=1.0, registers=2, posemb_tokens='cls'),
    dict(V2, head=HEAD, patch_head=PATCH_HEAD, centering='sinkhorn'),
  ),
}


def part(name: str, prefix: str) -> dict:
  """Returns {our name: array} of those arrays of a golden that have a prefix."""
  arrays = golden(name).items()
  theirs = {n.removeprefix(prefix): x for n, x in arrays if n.startswith(prefix)}
  flat, unknown = rename.to_ours(theirs, rules_of(2))
  assert not unknown
  if name == 'dino_step':
    # They are 1, and not trained.
    flat.pop('dino/head/lengths', None)
  return flat


def crops_of(name: str) -> dict:
  """Returns a batch with the crops of a golden, 'image' and 'local'."""
  d = golden(name)
  if name == 'dino_step':
    crops = [d[f'crop_{i}'] for i in range(5)]
    image, local = np.stack(crops[:2], 1), np.stack(crops[2:], 1)
  else:
    by_image = lambda x: x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1)
    image, local = by_image(d['global_crops']), by_image(d['local_crops'])
  return {'image': image, 'local': local, 'mask': np.ones(4, np.float32)}


# A transformation whose state is the last gradients.
keep_grads = optax.GradientTransformation(
  lambda params: params, lambda grads, state, params=None: (grads, grads)
)


def make(name: str):
  """Returns (task, optimizer, state before the first step, batch) of a golden."""
  d = golden(name)
  recipe, fields, task = STEPS[name]
  batch = crops_of(name)
  shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
  model = models.build('vit', **SMALL | fields)
  task = tasks.build('dino', model, shapes, **task)
  options = config.load(f'{runs.ROOT}/configs/{recipe}.py')['optim']
  # The recipe's rules, with the numbers of the golden.
  numbers = {k: float(d[k]) for k in ('lr', 'clip')}
  numbers |= dict(wd=float(d['weight_decay']), ema=float(d['momentum']))
  numbers |= dict(schedule=dict(decay='constant'), wd_end=None, ema_end=None)
  numbers['lr_starts'] = []
  if recipe == 'dinov2_i1k':
    numbers['lr_starts'] = [(options['lr_starts'][0][0], 1)]
    rules = dict(options['lr_rules']) | {'dino/mask': options['layer_decay'] ** 3}
    numbers['lr_rules'] = list(rules.items())
  optimizer = optim.build(**options | numbers, total_steps=10, family=model.family)
  optimizer = dataclasses.replace(optimizer, tx=optax.chain(keep_grads, optimizer.tx))
  params = trees.unflatten(part(name, 'student/'))
  stats = {'collapsed': np.float32(0)}
  if task.centers:
    stats['center'] = d['center'][0]
    if task.patch_head:
      stats['patch_center'] = d['patch_center'][0, 0]
  stats = {'dino': stats}
  state = State(
    step=np.int32(0),
    params=params,
    frozen={},
    batch_stats=stats,
    opt_state=optimizer.tx.init(params),
    ema=trees.unflatten(part(name, 'teacher/')) | {trees.STATS: stats},
    counters=dict.fromkeys(('skipped', 'skipped_in_a_row', 'masked'), np.int32(0)),
  )
  return task, optimizer, state, batch


@pytest.mark.parametrize('name', STEPS)
def test_a_step_of_the_authors_code(name, monkeypatch):
  d = golden(name)
  if name != 'dino_step':
    masks = d['masks'].reshape(2, 4, -1).swapaxes(0, 1).reshape(8, -1)
    monkeypatch.setattr(dino, 'draw_masks', lambda *_: masks)
  task, optimizer, state, batch = make(name)
  if name == 'dino_step':
    monkeypatch.setattr(task, 'temperature', float(d['teacher_temp']))
  step = jax.jit(make_step(task, optimizer, lambda batch: batch, KEY))
  expected = part(name, 'grads/')
  fresh = jax.eval_shape(task.init, KEY, batch)
  shapes = lambda params: {n: x.shape for n, x in trees.flatten(params).items()}
  assert shapes(fresh['params']) == shapes(state.params)
  state, metrics = step(state, batch)
  for n, x in trees.flatten(state.opt_state[0]).items():
    np.testing.assert_allclose(x, expected[n], rtol=0, atol=1e-5, err_msg=n)
  assert_terms(name, metrics, 'step1/')
  after = part(name, 'student_after/')
  for n, x in trees.flatten(state.params).items():
    seen = np.abs(expected[n]) > 1e-6
    np.testing.assert_allclose(np.where(seen, x - after[n], 0), 0, atol=1e-5, err_msg=n)
  cls = d.get('teacher_after_cls_token', d.get('teacher_after/backbone.cls_token'))
  np.testing.assert_allclose(state.ema['cls'], cls, atol=1e-6)
  if name == 'dino_step':
    np.testing.assert_allclose(
      state.batch_stats['dino']['center'], d['center_after'][0], atol=1e-7
    )
    return
  state, metrics = step(state, batch)
  assert_terms(name, metrics, 'step2/')
  if task.centers:
    own = state.batch_stats['dino']
    np.testing.assert_allclose(own['center'], d['center_after_2'][0], atol=1e-6)
    np.testing.assert_allclose(
      own['patch_center'], d['patch_center_after_2'][0, 0], atol=1e-6
    )


def assert_terms(name: str, metrics: dict, prefix: str):
  d = golden(name)
  if name == 'dino_step':
    np.testing.assert_allclose(metrics['loss'], d['loss'], rtol=1e-6)
    return
  # The authors log halves of two terms.
  pairs = {
    'loss_dino': d[f'{prefix}dino_local_crops_loss']
    + d[f'{prefix}dino_global_crops_loss'],
    'loss_koleo': d[f'{prefix}koleo_loss'] * 2 / 0.1,
    'loss_ibot': d[f'{prefix}ibot_loss'] * 2,
    'loss': d[f'{prefix}total'],
  }
  for key, value in pairs.items():
    np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)


# -- masks and schedules ----------------------------------------------------------------


@pytest.mark.parametrize('side', [14, 16])
def test_masks_are_distributed_as_those_of_the_authors(side):
  d = golden('ibot_masks')
  wanted, n = d[f'wanted_{side}'], 400
  keys = jax.random.split(KEY, (len(wanted), n))
  draw = jax.vmap(jax.vmap(draw_mask, (0, None, None)), (0, 0, None))
  masks = np.asarray(jax.jit(draw, static_argnums=2)(keys, wanted, (side, side)))
  counts = masks.sum(-1)
  # Four standard errors of the difference of two means of 400.
  error = lambda deviation: 4 * deviation * (2 / n) ** 0.5
  std = np.maximum(d[f'count_std_{side}'], 0.3)
  assert (abs(counts.mean(1) - d[f'count_mean_{side}']) < error(std)).all()
  reached = (counts == wanted[:, None]).mean(1)
  assert (abs(reached - d[f'reached_{side}']) < error(0.3)).all()
  rows = masks.reshape(*counts.shape, side, side)
  # The shares of a row that are masked differ by about a quarter.
  assert (abs(rows.mean((1, 3)) - d[f'per_row_{side}']) < error(0.25)).all()
  both = (rows[..., :-1] & rows[..., 1:]).sum((1, 2, 3))
  share = both / np.maximum(rows[..., :-1].sum((1, 2, 3)), 1)
  np.testing.assert_allclose(share, d[f'neighbour_{side}'], atol=0.03)


def test_half_of_the_crops_are_masked():
  d = golden('ibot_masks')
  draw = jax.jit(jax.vmap(lambda key: draw_masks(key, 64, (16, 16)).sum(-1)))
  counts = np.sort(draw(jax.random.split(KEY, 100)), axis=-1)
  assert ((counts == 0).sum(-1) >= 32).all()
  expected = d['batch_sorted_counts_mean']
  np.testing.assert_allclose(counts.mean(0), expected, atol=0.7)
  assert counts.max() <= 128
  groups, most = count_groups(256, 256)
  assert counts.sum(1).max() <= most < 64 * 256 * 0.16
  # More crops are groups with shares of their own, whose order differs.
  counts = draw_masks(KEY, 256, (16, 16)).sum(-1).reshape(groups, -1)
  assert ((counts == 0).sum(1) >= 32).all()
  assert (counts[0] != counts[1]).any()
  assert (counts.sum(1) <= most).all()


SCHEDULES = {
  'dinov2_l16': ('dinov2_i1k', 125_000),
  'dinov2_g14': ('dinov2_i1k:recipe=large', 625_000),
  'dino_s': ('dino_i1k', 100_000),
}


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedules_are_those_of_the_authors(name):
  d = {k.removeprefix(f'{name}_'): x for k, x in golden('ssl_schedules').items()}
  recipe, total = SCHEDULES[name]
  file, _, arg = recipe.partition(':')
  c = config.load(f'{runs.ROOT}/configs/{file}.py:{arg}')
  if file == 'dinov2_i1k':
    assert c['steps'] == total
  # Plain steps, whose size is the rate.
  options = c['optim'] | dict(name='sgd', momentum=0.0, clip=None, clip_by=None)
  options |= dict(lr_rules=[], layer_decay=None, wd=0.0, wd_end=None)
  if name == 'dino_s':
    options |= dict(
      lr=2e-3, lr_starts=[], schedule=options['schedule'] | dict(end=1e-6 / 2e-3)
    )
  optimizer = optim.build(**options, total_steps=total)
  one = {'cls': jnp.ones(()), 'dino': {'head': {'prototypes': jnp.ones(())}}}
  wd = half_cosine(c['optim']['wd'], c['optim']['wd_end'], total)
  for i, step in enumerate(d.get('steps', golden('ssl_schedules')['dino_steps'])):
    updates, _ = optimizer.tx.update(
      one, optimizer.tx.init(one), one, rate=optimizer.rate(step), step=step
    )
    # Float32 has 24 bits, of which progress loses some.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-9)
    close(-updates['cls'], d['lr64'][i])
    if 'last_layer_lr64' in d:
      close(-updates['dino']['head']['prototypes'], d['last_layer_lr64'][i])
    close(wd(step), d['weight_decay64'][i])
    close(1 - optimizer.average(0.0, 1.0, step), d['momentum64'][i], rtol=1e-6)
    if 'teacher_temp64' in d:
      close(temperature(c, step), d['teacher_temp64'][i], rtol=1e-6)


def temperature(c: dict, step):
  keys = ('temperature', 'temperature_start', 'temperature_warmup')
  batch = {'image': jax.ShapeDtypeStruct((2, 2, 16, 16, 3), jnp.float32)}
  own = {key: c['task'][key] for key in keys}
  task = tasks.build('dino', models.build('vit', **SMALL), batch, **own)
  return task.temperature_at(step)


# -- devices, micro-batches, collapse -----------------------------------------------------


@pytest.mark.parametrize('centering', ['mean', 'sinkhorn'])
def test_devices_and_micro_batches_change_nothing(centering):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=(16, *shape, 3)).astype(np.float32)
  weight = np.arange(16, dtype=np.float32) / 120  # the first counts nothing
  batch = {'image': draw(2, 16, 16), 'local': draw(1, 8, 8), 'weight': weight}
  head = dict(outputs=6, hidden=8, bottleneck=4)
  own = dict(head=head, patch_head='shared', koleo=0.1, koleo_group=2)
  model = models.build('vit', **SMALL | dict(depth=1, patch_size=(4, 4)))
  # Micro-batches draw other images to skip.
  share = 0.3 if centering == 'sinkhorn' else 0.0
  own |= dict(centering=centering, skip_branches=share)
  task = tasks.build('dino', model, batch, **own)
  state = jax.jit(
    lambda: init_state(task, optim.build('sgd', 1.0, 9, ema=0.5), batch, KEY, {})
  )()
  state = jax.device_get(state)
  average = state.average().variables()['params']
  loss = lambda params, stats, *args: task.loss(
    {'params': params, trees.STATS: stats, 'average': average}, *args
  )
  results = []
  # The targets of Sinkhorn are made before a batch is cut.
  for devices, accum in ((1, 1), (8, 2 if centering == 'mean' else 1)):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    def step(state, batch, accum=accum):
      prepared = task.prepare(batch, KEY, state)
      args = state.params, state.batch_stats, prepared, KEY, accum
      return gradients(loss, *args)

    with jax.set_mesh(mesh):
      compiled = jax.jit(step, out_shardings=sharding.replicated_sharding(mesh))
      on_mesh = sharding.global_batch(batch, mesh)
      results.append(jax.device_get(compiled(state, on_mesh)))
  assert results[0][0]['loss_ibot'] > 0
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    # Gradients of a random start are up to 15.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(a).max()))


def test_alarms_tell_collapse_from_learning():
  weight = np.full(6, 1 / 6, np.float32)
  own = np.repeat(np.eye(6)[:, None], 2, axis=1)
  for targets, nats in ((own, np.log(6)), (own[:1].repeat(6, 0), 0)):
    assert dino.information(targets, weight) == pytest.approx(nats, abs=1e-6)
  nats = dino.information(np.full((6, 2, 6), 1 / 6), weight)
  assert nats == pytest.approx(0, abs=1e-6)
  assert dino.rank(np.eye(6), weight) == pytest.approx(5, rel=1e-5)
  assert dino.rank(np.ones((6, 6)), weight) == pytest.approx(0, abs=1e-3)


# -- runs -------------------------------------------------------------------------------

DATA = dict(source='shapes', source_options=dict(size=16, num_examples=64))
CROPS = 'multi_crop(16, 8, 2)|color_jitter(0.4, 0.4, 0.2, 0.1)|value_range(-1, 1)'
TRAIN = dict(DATA, split='train', batch_size=8, pp=CROPS)
SETS = dict(DATA, train='train[:32]', test='train[32:]')
KNN = dict(type='knn', datasets=dict(kinds=SETS), k=[5], batch_size=32, use_ema=True)
EVALS = {'knn': KNN | dict(pp='value_range(-1, 1)')}
TASK = dict(name='dino', patch_head='shared', koleo=0.1, koleo_group=8)
TASK |= dict(head=dict(outputs=16, hidden=16, bottleneck=8, lengths=True))
CHANGES = (*runs.SHORT, 'checkpoint.best=knn/kinds_5nn', 'model.patch_size=(4,4)')
CHANGES += ('optim.ema_end=1.0', "optim.clip_by='(dino/head/|).*'")


@pytest.fixture(scope='module')
def dino_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('dino') / 'run'
  status, rows = runs.run_on_one_device(
    folder, *CHANGES, task=TASK, evals=EVALS, data=TRAIN
  )
  runs.assert_finished(status, rows, EVALS)
  return folder


def test_a_killed_run_ends_as_if_it_had_not_been(dino_run, tmp_path):
  folder = runs.killed(dino_run, tmp_path / 'run')
  runs.run_on_one_device(folder, *CHANGES, task=TASK, evals=EVALS, data=TRAIN)
  runs.assert_same(dino_run, folder)


def test_the_teacher_of_a_run_is_loaded(dino_run):
  student, teacher = (vit_jax.load(str(dino_run), ema=ema) for ema in (False, True))
  assert trees.flatten(teacher.params).keys() == trees.flatten(student.params).keys()
  assert not any(n.startswith('dino/') for n in trees.flatten(student.params))
  kernels = [x.params['embedding']['kernel'] for x in (student, teacher)]
  assert np.abs(kernels[0] - kernels[1]).max() > 0


def test_a_collapsed_run_stops_and_says_so(dino_run, tmp_path, monkeypatch):
  # Black images, which a teacher can only assign alike. The program is that of `dino_run`.
  monkeypatch.setattr(dino, 'PATIENCE', 3)
  data = TRAIN | dict(pp=f'random_affine(scale=(1e-3, 1e-3))|{CROPS}')
  changes = (*CHANGES, 'checkpoint.best=None')
  with pytest.raises(Diverged, match=naming('collapsed', 'temperature')):
    runs.run_on_one_device(tmp_path, *changes, task=TASK, evals={}, data=data)
  assert runs.status(tmp_path)['exit'] == 76


@pytest.mark.parametrize(
  ('kind', 'rates'), [('linear', [0, 0.15, 0.3]), ('uniform', [0.3] * 3)]
)
def test_stochastic_depth_may_be_uniform(kind, rates):
  size = dict(patch_size=(4, 4), width=8, depth=3, mlp_dim=8, num_heads=2)
  model = models.build(
    'vit', **size, num_classes=None, stochastic_depth=0.3, depth_rates=kind
  )
  used = []

  def note(call, args, kwargs, context):
    if isinstance(context.module, StochasticDepth):
      used.append(args[1])
    return call(*args, **kwargs)

  with nn.intercept_methods(note):
    model.shapes((8, 8, 3))
  assert used[::2] == pytest.approx(rates)


def test_branches_skip_images():
  model = models.build('vit', **SMALL | dict(depth=1, patch_size=(4, 4)))
  images = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)
  variables = model.init(KEY, images)

  def branches(share):
    outputs = []

    def note(call, args, kwargs, context):
      y = call(*args, **kwargs)
      if isinstance(context.module, StochasticDepth):
        outputs.append(y)
      return y

    with nn.intercept_methods(note), skip_branches(share):
      model.apply(variables, images, train=True, rngs={'dropout': KEY})
    return outputs

  whole, skipped = branches(0.0)[0], branches(0.3)
  is_computed = [np.abs(y).max((1, 2)) > 0 for y in skipped]
  assert [x.sum() for x in is_computed] == [5, 5]
  assert (is_computed[0] != is_computed[1]).any()
  expected = whole * is_computed[0][:, None, None] * 8 / 5
  np.testing.assert_allclose(skipped[0], expected, rtol=1e-6, atol=1e-7)


REFUSED = [
  (dict(skip_branches=0.3, block='post'), ('skip_branches', 'stochastic_depth')),
  (dict(patch_head=None, num_classes=10), ('num_classes', '10')),
  (dict(image=(16, 16)), ('multi_crop',)),
  (dict(temperature_start=0.04), ('temperature_warmup',)),
]


@pytest.mark.parametrize(('changes', 'words'), REFUSED)
def test_models_and_data_without_a_task_are_refused(changes, words):
  changes = dict(changes)
  size = changes.pop('image', (2, 16, 16))
  fields = {k: changes.pop(k) for k in ('num_classes', 'block') if k in changes}
  batch = {'image': jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)}
  with pytest.raises(ValueError, match=naming(*words)):
    tasks.build('dino', models.build('vit', **SMALL | fields), batch, **changes)


def test_a_run_without_an_average_is_refused(tmp_path):
  changes = (*CHANGES, 'optim.ema=None', 'optim.ema_end=None', 'checkpoint.best=None')
  with pytest.raises(UserError, match=naming('config.optim.ema')):
    runs.run_on_one_device(tmp_path, *changes, task=TASK, evals={}, data=TRAIN)


@pytest.mark.parametrize('name', STEPS)
def test_files_of_training_runs_bring_their_heads(name, tmp_path):
  arrays = {
    n.removeprefix('teacher/'): x
    for n, x in golden(name).items()
    if n.startswith('teacher/')
  }
  np.savez(tmp_path / 'checkpoint.npz', **arrays)
  source = weights.read(tmp_path / 'checkpoint.npz', num_heads=2)
  assert source.fields.get('registers', 0) == STEPS[name][1].get('registers', 0)
  task, _, state, _ = make(name)
  shapes = {n: x.shape for n, x in trees.flatten(state.params).items()}
  own = {n: shape for n, shape in shapes.items() if n.startswith('dino/')}
  # DINO's prototypes have the length 1.
  skip = {'skip': ['dino/head/lengths']} if name == 'dino_step' else {}
  taken, report = weights.fit_section(source, skip, task.model, (32, 32), own)
  assert f'{len(shapes)} parameters taken' in report
  for n, x in part(name, 'teacher/').items():
    np.testing.assert_array_equal(taken[n], x, err_msg=n)
