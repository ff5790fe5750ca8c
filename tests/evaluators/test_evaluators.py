"""Classification over every example of a split, against NumPy; label sets of a file."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from vit_jax import evaluators, sharding
from vit_jax.errors import Preempted, UserError
from vit_jax.evaluators.labels import LabelSets

SHAPE = (2, 3, 3)  # shape of an image: 18 numbers in [-1, 1] after pp


def mesh_of(devices: int):
  return sharding.make_mesh(devices=jax.devices()[:devices])


def write(path, labels, seed=0):
  """Writes an .npz of random images; returns (source, the images in [-1, 1])."""
  images = np.random.default_rng(seed).integers(0, 256, (len(labels), *SHAPE), np.uint8)
  np.savez(path, images=images, labels=labels)
  return f'arrays:{path}', images.reshape(len(labels), -1) / 127.5 - 1


def params_of(num_classes, seed=1):
  return np.random.default_rng(seed).normal(size=(18, num_classes)).astype(np.float32)


def predict(params, batch):
  x = batch['image'].reshape(len(batch['image']), -1)
  # NaN where an image is all zeros, the padding: what a norm layer might give there.
  nan = jnp.where((x == 0).all(-1), jnp.nan, 0)[:, None]
  return {'logits': x @ params + nan, 'pre_logits': x}


def classification(
  source, devices=1, batch_size=8, check_stop=None, split='train', **kw
):
  data = dict(
    source=source, split=split, pp='value_range(-1, 1)', batch_size=batch_size
  )
  data |= kw.pop('data', {})
  return evaluators.build(
    'classification', mesh_of(devices), check_stop, data=data, **kw
  )


def reference(x, targets, params, loss='softmax'):
  """Metrics in numpy, float64; targets multi-hot [N, K]."""
  logits = x @ params.astype(np.float64)
  keep = targets.any(-1)
  logits, targets = logits[keep], targets[keep]
  order = np.argsort(-logits, axis=-1)
  right = np.take_along_axis(targets, order, -1)
  if loss == 'softmax':
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -(targets * log_p).sum(-1)  # as big_vision's softmax_xent
  else:
    log_p, log_not_p = -np.log1p(np.exp(-logits)), -np.log1p(np.exp(logits))
    losses = -np.where(targets, log_p, log_not_p).sum(-1)
  return {
    'top1': right[:, 0].mean(),
    'top5': right[:, :5].any(-1).mean(),
    'loss': losses.mean(),
    'examples': keep.sum(),
  }


def check(metrics, expected):
  assert set(metrics) <= set(evaluators.EVALUATORS['classification'].METRICS)
  # Counts are exact; a float32 loss of ~5 summed over 53 rows is good to 1e-5.
  assert metrics == {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()}


def check_predictions(rows, x, targets, params, loss='softmax'):
  """Compares the stored rows of an evaluator with NumPy's answers, in the order of the split."""
  logits = x @ params.astype(np.float64)
  if loss == 'softmax':
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  else:
    probability = 1 / (1 + np.exp(-logits))
  keep = np.flatnonzero(targets.any(-1))
  top = np.argsort(-logits, axis=-1)[keep, :5]
  labels = np.where(targets.sum(-1) == 1, targets.argmax(-1), -1)
  np.testing.assert_array_equal(rows['index'], keep)
  np.testing.assert_array_equal(rows['label'], labels[keep])
  np.testing.assert_array_equal(rows['top'], top)
  right = np.take_along_axis(targets[keep], top, -1)
  np.testing.assert_array_equal(rows['right'], right)
  expected = np.take_along_axis(probability[keep], top, -1)
  np.testing.assert_allclose(rows['probability'], expected, rtol=1e-5)  # float32


@pytest.mark.parametrize(('devices', 'batch_size'), [(1, 7), (4, 16), (8, 16), (8, 64)])
def test_every_example_counts_once(tmp_path, devices, batch_size):
  labels = np.random.default_rng(3).integers(0, 10, 53)
  source, x = write(tmp_path / 'x.npz', labels)
  params, targets = params_of(10), np.eye(10, dtype=bool)[labels]
  evaluator = classification(source, devices, batch_size)
  check(evaluator.run(predict, params), reference(x, targets, params))
  check_predictions(evaluator.predictions, x, targets, params)


def test_options_of_the_compiler_reach_each_program(tmp_path, monkeypatch):
  source, _ = write(tmp_path / 'x.npz', np.arange(16) % 2)
  options = lambda mesh: {'xla_of_mesh': str(mesh.size)}
  monkeypatch.setattr(sharding, 'compiler_options', options)
  splits = dict(source=source, train='train', test='train')
  section = dict(datasets={'x': splits}, pp='value_range(-1, 1)', batch_size=8, k=[1])
  probe = evaluators.build('knn', mesh_of(4), **section)
  for evaluator in (classification(source, devices=4), probe):
    with pytest.raises(jax.errors.JaxRuntimeError, match='xla_of_mesh'):
      evaluator.run(predict, params_of(2))


def test_logits_that_are_not_finite_are_counted_and_wrong(tmp_path):
  labels = np.arange(20) % 6
  source, x = write(tmp_path / 'x.npz', labels)
  params, targets = params_of(6), np.eye(6, dtype=bool)[labels]
  good = (x @ params)[:, 0] > 0
  broken = lambda params, batch: {
    'logits': (y := predict(params, batch)['logits'])
    + jnp.where(y[:, :1] > 0, 0, jnp.nan)
  }
  metrics = classification(source, confusion=True).run(broken, params)
  right = reference(x[good], targets[good], params)
  assert metrics['bad_logits'] == (~good).sum() > 0
  for name in ('top1', 'top5'):
    assert metrics[name] == pytest.approx(right[name] * good.sum() / 20)
  assert np.isnan(metrics['loss'])


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_several_labels_and_images_without_any(tmp_path, loss):
  targets = np.random.default_rng(4).random((53, 10)) < 0.15
  assert 0 < (~targets.any(-1)).sum() < 53
  source, x = write(tmp_path / 'x.npz', targets)
  evaluator, traced = classification(source, 4, 12, loss=loss), []

  def counted(params, batch):
    traced.append(1)
    return predict(params, batch)

  for seed in (2, 1):  # one compilation for all runs
    params = params_of(10, seed)
    metrics = evaluator.run(counted, params)
    check(metrics, reference(x, targets, params, loss))
  check_predictions(evaluator.predictions, x, targets, params, loss)
  assert len(traced) == 1


def test_a_model_with_more_classes_than_the_data(tmp_path):
  labels = np.arange(20) % 6
  params = params_of(9)
  for form in (labels, np.eye(6, dtype=bool)[labels]):
    source, x = write(tmp_path / 'x.npz', form)
    expected = reference(x, np.eye(9, dtype=bool)[labels], params)
    check(classification(source).run(predict, params), expected)


@pytest.mark.parametrize('form', ['list', 'names'])
def test_label_sets_of_a_file(tmp_path, form):
  source, x = write(tmp_path / 'x.npz', np.arange(21) % 10)
  rng = np.random.default_rng(5)
  targets = rng.random((21, 10)) < 0.15
  sets = [np.flatnonzero(row).tolist() for row in targets]
  evaluator = classification(source)
  name_of = evaluator.batches.source.name_of
  sets = sets if form == 'list' else {name_of(i): s for i, s in enumerate(sets)}
  (tmp_path / 'real.json').write_text(json.dumps(sets))
  evaluator = classification(source, 4, labels=str(tmp_path / 'real.json'))
  params = params_of(10)
  check(evaluator.run(predict, params), reference(x, targets, params))


def test_a_numbered_file_finds_its_label_set_in_any_order(tmp_path):
  path = tmp_path / 'real.json'
  path.write_text(json.dumps([[0], [1], [2, 3]]))
  names = ['b/ILSVRC2012_val_00000003.JPEG', 'c/ILSVRC2012_val_00000001.JPEG']
  rows = LabelSets(str(path), 4, names.__getitem__).multi_hot(np.arange(2))
  np.testing.assert_array_equal(rows, [[0, 0, 1, 1], [1, 0, 0, 0]])
  # TFDS shuffles: its fifth example is not the fifth file.
  sets = LabelSets(str(path), 4, 'tfds:imagenet2012 #{}'.format, in_order=False)
  with pytest.raises(UserError, match=naming('#1', 'real.json', 'imagenet2012_real')):
    sets.multi_hot(np.array([1]))


DIGITS = np.arange(20) % 10
# Labels of the data, a file of label sets, options, and the words of the error.
REFUSED = [
  (DIGITS, '[[1], [2', {}, ('real.json', 'labels', 'column 9')),
  (DIGITS, '[1, 2]', {}, ('real.json', 'labels', 'list of list of int')),
  (DIGITS, '[[10]]', {}, ('real.json', 'class 10', 'num_classes=10')),
  (DIGITS, '[[1], [2]]', {}, ('real.json', 2, 'x.npz#2')),
  (np.zeros((8, 4), bool), None, {}, ('label', 8)),
  (np.arange(20) % 16, None, {}, (16, 10, 'num_classes')),
  (np.eye(16, dtype=bool)[np.arange(20) % 16], None, {}, (16, 10, 'num_classes')),
  (DIGITS, None, {'devices': 4, 'batch_size': 7}, ('batch_size=7', 4, 8)),
]


@pytest.mark.parametrize(('labels', 'sets', 'options', 'words'), REFUSED)
def test_mistakes(tmp_path, labels, sets, options, words):
  source, _ = write(tmp_path / 'x.npz', labels)
  if sets:
    (tmp_path / 'real.json').write_text(sets)
    options = options | {'labels': str(tmp_path / 'real.json')}
  with pytest.raises(UserError, match=naming(*words)):
    classification(source, **options).run(predict, params_of(10))


def test_a_misspelt_evaluator():
  with pytest.raises(UserError, match=naming('few_shot', 'fewshot')):
    evaluators.build('few_shot', mesh_of(1))


def test_broken_images_are_reported_and_left_out(tmp_path):
  from PIL import Image

  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (9, 8, 8, 3), np.uint8)
  for i, image in enumerate(pixels):
    folder = tmp_path / 'images' / 'test' / f'class{i % 3}'
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(folder / f'{i}.png')
  (tmp_path / 'images' / 'test' / 'class1' / '4.png').write_bytes(b'no image')
  params = rng.normal(size=(192, 3)).astype(np.float32)
  evaluator = classification(
    f'folder:{tmp_path}/images',
    4,
    split='test',
    data=dict(pp='decode|resize(8)|value_range(-1, 1)', max_bad_fraction=0.5),
  )
  good = np.arange(9) != 4
  x = (pixels.reshape(9, -1) / 127.5 - 1)[good]
  expected = reference(x, np.eye(3, dtype=bool)[np.arange(9) % 3][good], params)
  del expected['top5']  # of three classes
  check(evaluator.run(predict, params), {**expected, 'bad_images': 1})


def test_a_stop_leaves_at_the_next_batch(tmp_path):
  source, _ = write(tmp_path / 'x.npz', np.arange(40) % 10)
  check_stop = mock.Mock(side_effect=[None, None, Preempted('stop')])
  with pytest.raises(Preempted):
    classification(source, check_stop=check_stop).run(predict, params_of(10))
