"""Images and texts: the losses of big_vision, runs, and towers that were published."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, golden, naming, runs
from tests.support import pairs as support
from vit_jax import config, evaluators, models, sharding, tasks, trees
from vit_jax.errors import UserError
from vit_jax.learn import image_text, pairs
from vit_jax.optim import multipliers
from vit_jax.train import schema
from vit_jax.weights.image_text import ImageText

# The goldens' own code in float64 is 1e-6 away from them.
LOSS, GRADIENT = 1e-6, 5e-6
CASES = [
  (f'{loss}_{name}', chunk)
  for loss in pairs.LOSSES
  for name in ('init', 'later', 'lit_coco')
  for chunk in (2, pairs.CHUNK)
]


def normed(x):
  return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)


def loss_of(name: str, weight, chunk: int):
  """Returns a function of (images, texts, t', b)."""
  loss = pairs.LOSSES[name.partition('_')[0]]
  return lambda x, y, t, b: loss(normed(x), normed(y), jnp.exp(t), b, weight, chunk)


@pytest.mark.parametrize(('case', 'chunk'), CASES)
def test_losses_are_those_of_big_vision(case, chunk):
  z, start = golden('pairs'), f'sigmoid_{case.partition("_")[2]}'
  vectors, weight = (z['image_raw'], z['text_raw']), np.full(8, 1 / 8, np.float32)
  loss = jax.value_and_grad(loss_of(case, weight, chunk), (0, 1, 2, 3))
  # Small chunks on eight devices, which have one pair each.
  mesh = sharding.make_mesh(devices=jax.devices()[: 8 if chunk == 2 else 1])
  loss = jax.jit(loss, out_shardings=sharding.replicated_sharding(mesh))
  with jax.set_mesh(mesh):
    vectors = jax.device_put(vectors, sharding.batch_sharding(mesh))
    loss, grads = loss(*vectors, z[f'{start}/t'], z[f'{start}/b'])
  np.testing.assert_allclose(loss, z[f'{case}/loss'], rtol=LOSS)
  for name, x in zip(('image', 'text', 't', 'b'), grads, strict=True):
    expected = z.get(f'{case}/grad_{name}', 0.0)  # softmax has no b
    np.testing.assert_allclose(x, expected, rtol=LOSS, atol=GRADIENT, err_msg=name)


@pytest.mark.parametrize('name', pairs.LOSSES)
@pytest.mark.parametrize('chunk', [2, pairs.CHUNK])
def test_a_masked_pair_counts_nothing(name, chunk):
  z, mask = golden('pairs'), golden('pairs')['mask']
  t, b = z['sigmoid_init/t'], z['sigmoid_init/b']
  weight = mask / mask.sum(dtype=np.float32)
  args = z['image_raw'], z['text_raw'], t, b
  loss, grads = jax.value_and_grad(loss_of(name, weight, chunk), (0, 1))(*args)
  small = np.full(mask.sum(), 1 / mask.sum(), np.float32)
  rest = (*(x[mask] for x in args[:2]), t, b)
  np.testing.assert_allclose(loss, loss_of(name, small, chunk)(*rest), rtol=LOSS)
  if name == 'softmax':
    np.testing.assert_allclose(loss, z['softmax_masked_loss'], rtol=LOSS)
  for x in grads:
    assert np.isfinite(x).all()
    assert not x[~mask].any()


def test_prototypes_and_recall_are_those_of_the_reference():
  z = golden('pairs')
  vectors = normed(z['zeroshot_text'])
  np.testing.assert_allclose(
    image_text.prototypes(np.asarray(vectors)), z['zeroshot_prototypes'], atol=1e-6
  )
  prediction = (z['zeroshot_image'] @ z['zeroshot_prototypes'].T).argmax(-1)
  np.testing.assert_array_equal(prediction, z['zeroshot_prediction'])
  mesh = sharding.make_mesh()
  args = z['image_raw'], z['retrieval_text'], z['retrieval_owner']
  numbers = image_text.recall(*args, mesh)
  for name in ('image_to_text', 'text_to_image'):
    np.testing.assert_allclose(
      [numbers[f'{name}_{k}'] for k in (1, 5)], z[f'recall_{name}'], rtol=1e-6
    )
  unknown = image_text.recall(args[0] * np.nan, *args[1:], mesh)
  assert np.isnan([*unknown.values()]).all()


# -- the task -----------------------------------------------------------------------------


TEXT = dict(vocab=257, width=16, depth=1, mlp_dim=32, num_heads=2, pooling='last')
TEXT |= dict(mask='none')
IMAGE = dict(patch_size=(8, 8), width=24, depth=1, mlp_dim=48, num_heads=2)
KEY = jax.random.key(3)


def spec(batch=16, length=8):
  return {
    'image': jax.ShapeDtypeStruct((batch, 16, 16, 3), jnp.float32),
    'text': jax.ShapeDtypeStruct((batch, length), jnp.int32),
  }


def build(num_classes=None, text=TEXT, data=None, **options):
  model = models.build('vit', **IMAGE, num_classes=num_classes)
  return tasks.build('pairs', model, data or spec(), text=text, **options)


def batch(size=16):
  rng = np.random.default_rng(0)
  return {
    'image': rng.normal(size=(size, 16, 16, 3)).astype(np.float32),
    'text': rng.integers(0, 257, (size, 8)).astype(np.int32),
    'weight': np.arange(size, dtype=np.float32) / 120,
  }


@pytest.mark.parametrize('loss', pairs.LOSSES)
def test_devices_chunks_and_parts_change_nothing(loss, monkeypatch):
  variables = jax.jit(lambda: build(loss=loss).init(KEY, spec()))()
  variables, results = jax.device_get(variables), []
  for devices, parts, chunk in ((1, 1, 1024), (8, 2, 8)):
    function = functools.partial(pairs.LOSSES[loss], chunk=chunk)
    monkeypatch.setitem(pairs.LOSSES, loss, function)
    task = build(loss=loss, parts=parts)
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    @functools.partial(jax.jit, out_shardings=sharding.replicated_sharding(mesh))
    def step(params, batch, task=task):
      prepared = task.prepare(batch, KEY, None)
      loss = lambda params: task.loss({'params': params}, prepared, KEY)[0]
      return jax.value_and_grad(loss)(params)

    with jax.set_mesh(mesh):
      on_mesh = sharding.global_batch(batch(), mesh)
      results.append(jax.device_get(step(variables['params'], on_mesh)))
  value, grads = results[0]
  assert abs(grads['pairs']['logit_scale']) > 1e-3
  for other, others in results[1:]:
    np.testing.assert_allclose(other, value, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (grads, others)), strict=True):
      # Small entries are differences of large terms: rounding goes by an array's largest.
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6 * np.abs(b).max() + 1e-6)


@pytest.mark.parametrize('loss', pairs.LOSSES)
def test_a_device_holds_the_logits_of_one_chunk(loss):
  mesh, B = sharding.make_mesh(), 4096
  split, whole = sharding.batch_sharding(mesh), sharding.replicated_sharding(mesh)
  vectors = jax.ShapeDtypeStruct((B, 16), jnp.float32, sharding=split)
  weight = jax.ShapeDtypeStruct((B,), jnp.float32, sharding=split)
  number = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

  def temporaries(chunk: int) -> int:
    function = functools.partial(pairs.LOSSES[loss], chunk=chunk)
    grad = jax.jit(jax.grad(function, (0, 1)), out_shardings=split)
    with jax.set_mesh(mesh):
      lowered = grad.lower(vectors, vectors, number, number, weight)
    options = {'xla_backend_optimization_level': 0}
    return lowered.compile(options).memory_analysis().temp_size_in_bytes

  # A chunk's logits, their comparisons and a copy for the derivative.
  assert temporaries(256) < 5 * 4 * 256 * B / 8
  assert temporaries(B) > 4 * B * B / 8


def test_weight_decay_leaves_temperature_and_bias_alone():
  params = jax.eval_shape(build().init, KEY, spec())['params']
  factors = trees.flatten(trees.select(multipliers.WD_RULES, params))
  assert factors['pairs/text/head/kernel'] == factors['embedding/kernel'] == 1
  assert not factors['pairs/logit_scale']
  assert not factors['pairs/logit_bias']


def test_the_scale_of_softmax_stays_below_100():
  task = build(loss='softmax')
  variables = jax.jit(lambda: task.init(KEY, spec()))()

  def scale(log):
    own = {**variables['params']['pairs'], 'logit_scale': log}
    params = {**variables['params'], 'pairs': own}
    return task.predict({'params': params}, {'text': batch()['text']})['scale']

  value, grad = jax.jit(jax.value_and_grad(scale))(5.0)
  assert value == pytest.approx(100)
  assert grad == pytest.approx(100)  # so that it can come back
  assert scale(4.0) == pytest.approx(np.exp(4))


REFUSED = [
  (lambda: build(text=None), ('text tower', 'lit')),
  (lambda: build(text=TEXT | dict(outputs=7)), ('7', '24')),
  (lambda: build(text=TEXT | dict(length=4)), ('8 tokens', '4')),
  (lambda: build(parts=3), ('parts=3', '16')),
  (lambda: build(data={'image': spec()['image']}), ('captions', 'tokenize')),
]


@pytest.mark.parametrize(('make', 'words'), REFUSED)
def test_towers_that_do_not_fit_are_refused(make, words):
  with pytest.raises(ValueError, match=naming(*words)):
    make()


def test_micro_batches_are_refused():
  c = config.load(f'{runs.ROOT}/configs/siglip.py:debug')
  c['optim']['accum'] = 2
  with pytest.raises(UserError, match=naming('accum=2', 'config.task.parts=2')):
    schema.check(c)


# -- a run ------------------------------------------------------------------------------------


TOKENS = "tokenize('bytes', 8)"
DATA = dict(source='shapes', source_options=dict(size=8, num_examples=40), batch_size=8)
TRAIN = dict(DATA, split='train', pp=f'{TOKENS}|value_range(-1, 1)')
VAL = dict(DATA, split='val[:20]', pp='value_range(-1, 1)')
EVALS = {
  'names': dict(type='zero_shot', data=VAL, tokens=TOKENS, templates='a {}'),
  'val': dict(
    type='retrieval',
    data=VAL | dict(pp="tokenize('bytes', 8, captions=3)|value_range(-1, 1)"),
  ),
}
CHANGES = (*runs.SHORT, 'checkpoint.best=names/top1', 'data.classes=None')
TASK = dict(name='pairs', text=TEXT)


def train(folder, *changes, **sections):
  sections = dict(task=TASK, data=TRAIN, evals=EVALS) | sections
  return runs.run_on_one_device(folder, *CHANGES, *changes, **sections)


@pytest.fixture(scope='module')
def pairs_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('pairs') / 'run'
  status, rows = train(folder)
  runs.assert_finished(status, rows, EVALS)
  last = {key: x for row in rows for key, x in row.items()}
  assert {'names/top5', 'val/image_to_text_1', 'val/text_to_image_10'} <= last.keys()
  assert last['val/texts'] == 60
  return folder


def test_a_killed_run_ends_as_if_it_had_not_been(pairs_run, tmp_path):
  folder = runs.killed(pairs_run, tmp_path / 'run')
  train(folder)
  runs.assert_same(pairs_run, folder)


def test_a_run_is_an_image_and_a_text_tower(pairs_run):
  loaded = vit_jax.load(str(pairs_run))
  assert isinstance(loaded, ImageText)
  texts, images = ['a red circle', 'a blue ring'], batch(2)['image'][:, :8, :8]
  vectors = loaded.text(texts)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
  c = config.read(pairs_run)
  data = {**spec(8), 'image': jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32)}
  task = tasks.build(model=loaded.model, spec=data, **c['task'])
  variables = {'params': {**loaded.params, 'pairs': loaded.beside}}
  out = task.predict(variables, {'image': images, 'text': loaded.tokenizer(texts)})
  np.testing.assert_allclose(out['text'], vectors, atol=1e-6)
  np.testing.assert_allclose(out['image'], loaded.image(images), atol=1e-6)
  classifier = loaded.classifier(texts)
  assert classifier.model.num_classes == 2


LOCKED = {'image': ('pairs/.*', ['pairs/.*']), 'text': ('(?!pairs/text/).*', [])}


@pytest.mark.parametrize('locked', LOCKED)
def test_a_locked_tower_stays(pairs_run, tmp_path, locked):
  trained, skip = LOCKED[locked]
  folder, weights = tmp_path / 'run', dict(source=str(pairs_run), skip=skip)
  tune = dict(method='rules', train=[trained])
  train(
    folder, tune=tune, weights=weights, model={}, task=dict(name='pairs', text=TEXT)
  )
  loaded = [vit_jax.load(str(folder)) for folder in (pairs_run, folder)]
  towers = {
    'image': [trees.flatten(x.params) for x in loaded],
    'text': [trees.flatten(x.beside['text']) for x in loaded],
  }
  for name, (before, after) in towers.items():
    same = [np.array_equal(x, after[key]) for key, x in before.items()]
    assert all(same) == (name == locked), name


def test_lit_starts_from_a_run(pairs_run, tmp_path, monkeypatch):
  args = f'weights={pairs_run},data=shapes,batch=16,train=train[:64],val=val[:20%]'
  c = config.load(f'{runs.ROOT}/configs/lit.py:{args}')
  runs.on_one_device(monkeypatch)
  runs.until_the_first_step(monkeypatch, c, tmp_path / 'run')


# -- published towers -----------------------------------------------------------------------


def siglip(tmp_path):
  return str(support.siglip(tmp_path / 'siglip') / 'w.npz')


def clip(tmp_path):
  folder = shutil.copytree(GOLDEN / 'clip_hf', tmp_path / 'clip')
  vocab = {'a': 0, 'red': 1, '<|endoftext|>': 63}
  (folder / 'tokenizer.json').write_bytes(support.tokenizer_json(vocab))
  return str(folder)


@pytest.mark.parametrize('make', [siglip, clip])
def test_published_towers_go_on(make, tmp_path):
  source = make(tmp_path)
  pp = 'tokenize|resize_as_weights(24)|value_range'
  data = dict(TRAIN, pp=pp, source_options=dict(size=24, num_examples=40))
  names = dict(EVALS['names'], tokens='tokenize')
  names['data'] = dict(data, pp='resize(24)|value_range', split='val[:8]')
  evals = {'names': names}
  sections = dict(data=data, evals=evals, task={'name': 'pairs'}, model={})
  # A rule without moments: towers of many parameters compile in half the time.
  optim = dict(name='sgd', momentum=0.0, lr=1e-30)
  sections |= dict(weights={'source': source}, optim=optim)
  folder = tmp_path / 'run'
  train(folder, **sections)
  c, published = config.read(folder), vit_jax.load(source)
  assert c['task']['loss'] == ('sigmoid' if make is siglip else 'softmax')
  ours = vit_jax.load(str(folder))
  for part in ('beside', 'params'):
    theirs, mine = (trees.flatten(getattr(x, part)) for x in (published, ours))
    assert theirs.keys() == mine.keys()
    for name, x in theirs.items():
      if 'posembed' not in name:
        np.testing.assert_array_equal(mine[name], x, err_msg=name)
  np.testing.assert_array_equal(ours.text(['a red']), published.text(['a red']))
  again = runs.killed(folder, tmp_path / 'again')
  train(again, **sections)
  runs.assert_same(folder, again)


def test_evaluations_say_what_they_need(tmp_path):
  (tmp_path / 'a.csv').write_text('image,text\na.png,red\n')
  (tmp_path / 'a.png').write_bytes(b'')
  data = dict(source=f'captions:{tmp_path}', split='train', batch_size=8)
  data |= dict(pp='decode|resize(8)|value_range')
  mesh = sharding.make_mesh()
  build = functools.partial(evaluators.build, mesh=mesh, data=data)
  with pytest.raises(UserError, match=naming('captions', 'no label')):
    build('zero_shot', tokens=TOKENS, names='a,b')
  with pytest.raises(UserError, match=naming('captions', 'no label')):
    build('classification')
  with pytest.raises(UserError, match=naming('tokenize(captions=5)')):
    build('retrieval')
