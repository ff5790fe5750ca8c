"""Accuracy on the classes of a test set: the numbers, by the evaluator and commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.support import GOLDEN, naming
from vit_jax import cli, evaluators, imagenet, sharding
from vit_jax.errors import UserError
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools import evaluate
from vit_jax.train import evaluations

IDS = imagenet.wordnet_ids('imagenet1k')
IMAGENET = Classes(imagenet.class_names('imagenet1k'), 1000)


def predict(logits, batch):
  """The image says which row of the logits is the model's answer."""
  row = jnp.round((batch['image'].reshape(len(batch['image']), -1)[:, 0] + 1) * 127.5)
  return {'logits': logits[row.astype(jnp.int32)]}


@pytest.fixture
def evaluated(tmp_path):
  """Returns a function: names, labels, logits [N, K] -> (evaluator, its numbers)."""

  def run(names, truth, logits, model, **options):
    images = np.arange(len(truth), dtype=np.uint8)[:, None, None, None]
    images = np.broadcast_to(images, (len(truth), 2, 2, 1))
    np.savez(tmp_path / 'a.npz', images=images, labels=truth, class_names=names)
    evaluator = evaluators.build(
      'classification',
      sharding.make_mesh(devices=jax.devices()[:1]),
      model=model,
      data=dict(source=f'arrays:{tmp_path}/a.npz', split='train', batch_size=8)
      | {'pp': 'value_range(-1, 1)'},
      **options,
    )
    return evaluator, evaluator.run(predict, jnp.asarray(logits, jnp.float32))

  return run


def test_restricted_to_the_datas_classes(evaluated):
  rng = np.random.default_rng(0)
  ids = imagenet.wordnet_ids('imagenet_a')[:9]
  labels = rng.integers(0, 9, 20)
  logits = rng.normal(size=(20, 1000))
  places = np.array([IDS.index(x) for x in ids])
  logits[:12, places[labels[:12]]] += 2
  own = logits[:, places]
  log_p = own - np.log(np.exp(own).sum(1, keepdims=True))
  evaluator, got = evaluated(ids, labels, logits, IMAGENET, confusion=True)
  order = np.argsort(-own, 1)
  assert got['top1'] == pytest.approx(np.mean(order[:, 0] == labels))
  assert got['top5'] == pytest.approx((order[:, :5] == labels[:, None]).any(1).mean())
  # A float32 loss of about 2.
  assert got['loss'] == pytest.approx(-log_p[np.arange(20), labels].mean(), rel=1e-5)
  matrix = np.zeros((9, 9), int)
  np.add.at(matrix, (labels, order[:, 0]), 1)
  np.testing.assert_array_equal(evaluator.confusion, matrix)
  # Kept by the model's numbers, as its names are.
  kept = evaluator.predictions
  np.testing.assert_array_equal(kept['label'], places[labels])
  np.testing.assert_array_equal(kept['top'], places[order[:, :5]])
  _, free = evaluated(ids, labels, logits, IMAGENET, among='all')
  assert free['top1'] == pytest.approx(np.mean(logits.argmax(1) == places[labels]))
  assert free['top1'] < got['top1']


def test_sets_of_classes_and_classes_that_are_left_out(evaluated, tmp_path):
  table = {'pet': ['cat', 'dog'], 'car': [], 'fish': ['eel']}
  (tmp_path / 'map.json').write_text(json.dumps(table))
  model = Classes(['cat', 'dog', 'eel', 'owl', 'ant', 'bee', 'fox'], 7)
  labels = np.array([0, 0, 0, 1, 2, 2])
  answers = np.array([0, 1, 3, 0, 2, 1])  # right, right, other, left out, right, wrong
  logits = 5.0 * np.eye(7)[answers]
  options = dict(class_map=f'{tmp_path}/map.json')
  evaluator, got = evaluated(['pet', 'car', 'fish'], labels, logits, model, **options)
  assert got['examples'] == 5
  assert got['top1'] == pytest.approx(3 / 5)
  assert 'bad_images' not in got
  assert evaluator.predictions['label'].tolist() == [-1, -1, -1, 2, 2]
  # Without owls the third is the first of the classes with equal logits, a cat: right.
  _, only = evaluated(
    ['pet', 'car', 'fish'], labels, logits, model, among='data', **options
  )
  assert only['top1'] == pytest.approx(4 / 5)


def test_what_label_sets_number(evaluated, tmp_path):
  (tmp_path / 'real.json').write_text('[[0, 1], [], [3], [9]]')
  options = dict(labels=f'{tmp_path}/real.json')
  # Of ImageNet's classes, where the data has them all: those of the data.
  backwards = Classes(IDS[::-1], 1000)
  logits = np.eye(1000)[[999 - 1, 0, 999 - 3, 999]]  # right, left out, right, wrong
  _, got = evaluated(IDS, np.arange(4), logits, backwards, **options)
  assert got['examples'] == 3
  assert got['top1'] == pytest.approx(2 / 3)
  # Of some of them, or images in any folder: those of the model.
  logits = np.eye(1000)[[1, 0, 3, 0]]
  for names in (IDS[500:510], ['val'], ['a', 'b', 'c', 'd']):
    truth = np.arange(4) % len(names)
    evaluator, got = evaluated(names, truth, logits, IMAGENET, **options)
    assert evaluator.match is None
    assert got['top1'] == pytest.approx(2 / 3)


# --- commands -----------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
  """A head of 1,000 classes, known by its file's name, that always says the same."""
  bias = np.random.default_rng(0).permutation(1000).astype(np.float32) / 100
  with np.load(GOLDEN / 'vit_google_token.npz') as file:
    arrays = dict(file)
  width = arrays['head/kernel'].shape[0]
  arrays |= {'head/kernel': np.zeros((width, 1000), np.float32), 'head/bias': bias}
  np.savez(tmp_path / 'ViT-B_16.npz', **arrays)
  return str(tmp_path / 'ViT-B_16.npz'), bias


def run(*args):
  return cli.run(evaluate.main, [*map(str, args), '--json'])


@pytest.mark.usefixtures('one_device')
def test_evaluate_finds_the_classes_by_itself(weights, tmp_path, capsys):
  source, bias = weights
  ids = [IDS[i] for i in (5, 400, 401, 998)]
  for i, name in enumerate(ids):
    (tmp_path / 'a' / name).mkdir(parents=True)
    for j in range(i + 1):
      Image.new('RGB', (32, 32)).save(tmp_path / 'a' / name / f'{j}.png')
  args = (source, '--data', f'folder:{tmp_path}/a', '--split', 'train')
  assert run(*args, '--out', tmp_path / 'out') == 0
  text, note = capsys.readouterr()
  assert 'WordNet' in note
  best = int(np.argmax(bias[[5, 400, 401, 998]]))
  assert json.loads(text)['top1'] == pytest.approx((best + 1) / 10)
  header, *rows = (tmp_path / 'out' / 'confusion.csv').read_text().splitlines()
  assert header.split(',')[1:] == ids
  assert [row.split(',')[0] for row in rows] == ids
  for number, path in enumerate(sorted((tmp_path / 'a').rglob('*.png')), 1):
    path.rename(path.with_name(f'ILSVRC2012_val_{number:08}.png'))
  sets = [[int(bias.argmax())], *[[0]] * 8, []]
  (tmp_path / 'real.json').write_text(json.dumps(sets))
  assert run(*args, '--labels', tmp_path / 'real.json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['examples'] == 9
  assert record['top1'] == pytest.approx(1 / 9)
  (tmp_path / 'a' / ids[0]).rename(tmp_path / 'a' / 'n00007846')
  assert run(*args) == 2
  assert 'n00007846' in capsys.readouterr().err


def test_a_run_tells_its_evaluations_the_classes(tmp_path, capsys):
  images = np.zeros((6, 2, 2, 1), np.uint8)
  names = {'a': ['x', 'y', 'z'], 'b': ['z', 'x'], 'c': ['x', 'w']}
  for name, classes in names.items():
    labels = np.arange(6) % len(classes)
    np.savez(
      tmp_path / f'{name}.npz', images=images, labels=labels, class_names=classes
    )

  def build(name):
    section = dict(source=f'arrays:{tmp_path}/{name}.npz', split='train', batch_size=6)
    section['pp'] = 'value_range(-1, 1)'
    config = {
      'model': {'num_classes': 4},
      'data': {},
      'resolved': {'class_names': names['a']},
      'evals': {'test': {'type': 'classification', 'data': section}},
    }
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    found = evaluations.build(config, tmp_path, mesh, None)
    return found['test'].evaluator.match

  assert build('a') is None
  np.testing.assert_array_equal(build('b').right, [[0, 0, 1, 0], [1, 0, 0, 0]])
  assert 'test: Classes are matched by name' in capsys.readouterr().out
  with pytest.raises(UserError, match=naming("'w'", 'class_map')):
    build('c')
