"""Test sets of ImageNet and others: which of a model's classes are right for theirs."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.support import GOLDEN, naming
from vit_jax import cli, evaluators, imagenet, sharding
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools import evaluate
from vit_jax.train import evaluations

IDS = imagenet.wordnet_ids('imagenet1k')
IDS_A = imagenet.wordnet_ids('imagenet_a')
IMAGENET = Classes(imagenet.class_names('imagenet1k'), 1000)
IMAGENET21K = Classes(imagenet.class_names('imagenet21k'), 21_843)


def data(names, name='folder:x', number=None):
  """Stands in for a source."""
  number = len(names) if names else number
  return types.SimpleNamespace(class_names=names, num_classes=number, name=name)


def match(names, model=IMAGENET, name='folder:x', **options):
  return class_match.match(data(names, name), model, **options)[0]


# --- ImageNet's other test sets -----------------------------------------------------


@pytest.mark.parametrize('name', ['imagenet_a', 'imagenet_r'])
def test_200_classes_of_1000_are_the_only_ones_predicted(name):
  ids = imagenet.wordnet_ids(name)
  result = match(ids)
  assert [IDS[i] for i in result.columns] == ids
  assert result.one_to_one
  everything = match(ids, among='all')
  np.testing.assert_array_equal(everything.columns, np.arange(1000))
  assert [IDS[i] for i in everything.right.argmax(1)] == ids
  assert np.all(everything.right.sum(1) == 1)
  # TFDS declares 1,000 classes for them.
  for source in (f'tfds:{name}:0.1.0', f'tfds:/data/{name}/0.1.0'):
    result = match(IDS, name=source)
    assert [IDS[i] for i in result.columns] == ids
    places = np.arange(1000)[:, None]
    np.testing.assert_array_equal(result.right, result.columns == places)
  assert match(IDS, name='tfds:imagenet_sketch') is None
  assert match(IDS, name=f'tfds:{name}', among='all') is None


def test_folders_named_by_number_are_not_sorted_as_text():
  names = sorted(str(i) for i in range(1000))  # '0', '1', '10', '100', ...
  numbers = [int(name) for name in names]
  for model in (IMAGENET, Classes(None, 1000), Classes(IDS, 1000)):
    result = match(names, model)
    assert result.one_to_one
    np.testing.assert_array_equal(result.columns, numbers)
  # A model that was trained on such folders has the same names.
  assert match(names, Classes(names, 1000)) is None
  result = match(names, Classes(None, 1000), class_map='imagenet1k')
  np.testing.assert_array_equal(result.columns, numbers)
  # Ten are in the order of their numbers.
  assert match(list('0123456789'), Classes(None, 10)).one_to_one
  assert match(
    list('0123456789'), Classes([f'class {i}' for i in range(10)], 10)
  ).one_to_one


def test_data_with_all_ids_has_the_same_classes():
  for names, model in ((IDS, IMAGENET), (IMAGENET.names, Classes(IDS, 1000))):
    assert match(names, model) is None
  np.testing.assert_array_equal(match(IDS[::-1]).columns, np.arange(1000)[::-1])


def test_a_head_of_imagenet21k_answers_for_imagenet1k():
  places = {x: i for i, x in enumerate(imagenet.wordnet_ids('imagenet21k'))}
  # All but one of them are in it.
  shared = [x for x in IDS if x != 'n04399382']
  result = match(IDS, IMAGENET21K, class_map='known')
  assert {int(c) for c in result.columns} == {places[x] for x in shared}
  assert np.flatnonzero(~result.right.any(1)).tolist() == [IDS.index('n04399382')]
  for name, right in zip(IDS, result.right, strict=True):
    assert name not in places or result.columns[right.argmax()] == places[name]
  # ImageNet-A has it, too.
  result = match(IDS, IMAGENET21K, 'tfds:imagenet_a', class_map='known')
  assert len(result.columns) == result.right.any(1).sum() == 199
  exact = match(shared, IMAGENET21K)
  np.testing.assert_array_equal(exact.columns, [places[x] for x in shared])


def test_a_head_without_names_takes_those_of_a_list():
  result = match(IDS_A, Classes(None, 1000), class_map='imagenet1k')
  assert [IDS[i] for i in result.columns] == IDS_A


def test_the_validation_set_on_the_classes_of_another():
  result = match(IDS, among='imagenet_a')
  assert len(result.columns) == 200
  assert result.right.any(1).sum() == 200  # images of the other 800 are left out


def test_a_name_of_imagenet_is_the_class_of_its_id():
  # Of two cranes, only ids tell which is meant.
  names = ['tench, Tinca tinca', 'zebra', 'n02012849']
  result = match(names, Classes([IDS[340], 'n02012849', IDS[0], 'cat'], 4))
  np.testing.assert_array_equal(result.right.argmax(1), [2, 0, 1])
  with pytest.raises(UserError, match=naming("'crane'")):
    match(['zebra', 'crane'], IMAGENET)


# --- any classes --------------------------------------------------------------------

ANIMALS = Classes(['cat', 'dog', 'eel'], 3)


def test_names_of_a_part_are_matched_and_all_can_be_predicted():
  result = match(['eel', 'cat'], ANIMALS)
  np.testing.assert_array_equal(result.columns, np.arange(3))
  np.testing.assert_array_equal(result.right, [[0, 0, 1], [1, 0, 0]])
  only = match(['eel', 'cat'], ANIMALS, among='data')
  np.testing.assert_array_equal(only.columns, [2, 0])
  # A head that is larger than its training data.
  assert match(['cat', 'dog'], Classes(['cat', 'dog', '', ''], 4)) is None


@pytest.mark.parametrize(
  ('names', 'number', 'model', 'options', 'remark'),
  [
    (['a', 'b', 'c'], 3, ANIMALS, {'class_map': 'number'}, ''),
    (None, 3, ANIMALS, {}, ''),
    (['a', 'b', 'c'], 3, Classes(None, 3), {}, ''),
    (None, 2, ANIMALS, {}, 'first'),
    (['a', 'b'], 2, ANIMALS, {'class_map': 'number'}, 'first'),
  ],
)
def test_a_comparison_by_number(names, number, model, options, remark):
  result, text = class_match.match(data(names, number=number), model, **options)
  assert result is None
  assert remark in text
  assert bool(text) == bool(remark)


# Names of the data's classes, the model's classes, options, and the words of the error.
REFUSED = [
  (['cat', 'cow', 'eel'], ANIMALS, {}, ('1 of its 3', "'cow'", 'class_map')),
  (['cat', 'dgo', 'eel'], ANIMALS, {}, ('"dog"',)),
  (['n01440764', 'n00000001'], IMAGENET, {}, ("'n00000001'",)),
  (['n01440764', 'n00007846'], IMAGENET, {}, ("'n00007846'", 'person')),
  (list('0123456789'), IMAGENET, {}, ("'0'", '1,000')),  # '7' is not ImageNet's class 7
  (IDS, IMAGENET21K, {}, ("'n04399382'", 'teddy', '1', 'known')),
  (IDS_A, Classes(None, 1000), {}, ('1000', 'class_map')),
  (IDS, Classes(None, 21_843), {}, ('21843', 'class_map')),
  (IDS[:2], Classes(IDS[2:4], 2), {}, (IDS[0], 'tench')),
  (['a', 'b'], ANIMALS, {}, ('2', '3')),
  (['a', 'b', 'c'], ANIMALS, {}, ("'a'", "'number'")),  # no guess by number
  (['a', 'b', 'c', 'd'], ANIMALS, {}, ('4', '3')),
  (['a', 'b', 'c'], ANIMALS, {'class_map': 'name'}, ("'a'",)),
  (None, ANIMALS, {'class_map': 'name'}, ('name its classes',)),
  (['a', 'b', 'c'], ANIMALS, {'class_map': 'known'}, ("'a'",)),
  (
    IDS_A,
    Classes(None, 10),
    {'class_map': 'imagenet1k'},
    ('imagenet1k', '1,000', '10'),
  ),
  (['cat'], ANIMALS, {'class_map': 'nmae'}, ("'nmae'", '"name"')),
  (['a', 'b', 'c'], ANIMALS, {'among': 'data'}, ("'a'", "'number'")),
  (None, ANIMALS, {'among': 'data'}, ('data', 'number')),
  (['cat'], ANIMALS, {'among': 'imagenet_b'}, ("'imagenet_b'", '"imagenet_r"')),
  (['x'], Classes(['x'], 1), {'among': 'imagenet_a'}, ('imagenet_a', 'n01498041')),
]


@pytest.mark.parametrize(('names', 'model', 'options', 'words'), REFUSED)
def test_classes_that_cannot_be_matched_are_refused(names, model, options, words):
  with pytest.raises(UserError, match=naming(*words)):
    match(names, model, **options)


def test_a_file_of_ones_own(tmp_path):
  path = tmp_path / 'map.json'

  def mapped(table, model=ANIMALS):
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return match(['pet', 'fish', 'car'], model, class_map=str(path))

  # Several of ImageNet's classes are right for one of ObjectNet's; all compete.
  result = mapped({'pet': ['cat', 'dog'], 'fish': [2], 'car': [], 'other': ['eel']})
  np.testing.assert_array_equal(result.right, [[1, 1, 0], [0, 0, 1], [0, 0, 0]])
  np.testing.assert_array_equal(result.columns, np.arange(3))
  model = Classes([*IDS[:999], 'cat'], 1000)
  result = mapped({'pet': ['n02123045', 'cat'], 'fish': [], 'car': []}, model)
  assert np.flatnonzero(result.right[0]).tolist() == [281, 999]
  for table, facts in {
    '{"pet": ["cat"]}': ("'fish'", '2'),
    '{"pet": ["cow"], "fish": [], "car": []}': ("'cow'",),
    '{"pet": "cat"}': ('map.json.pet', "'cat'"),
    '{"pet": [], "fish": [], "car": []}': ('leaves out',),
    '{"pet": [true], "fish": [], "car": []}': ('map.json.pet', 'True'),
    '[' * 100_000: ('map.json', 'JSON'),
  }.items():
    with pytest.raises(UserError, match=naming(*facts)):
      mapped(table)


# --- the numbers, by the evaluator and commands --------------------------------------


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
  ids = IDS_A[:9]
  labels = rng.integers(0, 9, 20)
  logits = rng.normal(size=(20, 1000))
  places = np.array([IDS.index(x) for x in ids])
  logits[:12, places[labels[:12]]] += 2
  own = logits[:, places]
  log_p = own - np.log(np.exp(own).sum(1, keepdims=True))
  evaluator, metrics = evaluated(ids, labels, logits, IMAGENET, confusion=True)
  order = np.argsort(-own, 1)
  assert metrics['top1'] == pytest.approx(np.mean(order[:, 0] == labels))
  right = (order[:, :5] == labels[:, None]).any(1)
  assert metrics['top5'] == pytest.approx(right.mean())
  # A float32 loss of about 2.
  loss = -log_p[np.arange(20), labels].mean()
  assert metrics['loss'] == pytest.approx(loss, rel=1e-5)
  matrix = np.zeros((9, 9), int)
  np.add.at(matrix, (labels, order[:, 0]), 1)
  np.testing.assert_array_equal(evaluator.confusion, matrix)
  # Stored by the model's numbers, as its names are.
  rows = evaluator.predictions
  np.testing.assert_array_equal(rows['label'], places[labels])
  np.testing.assert_array_equal(rows['top'], places[order[:, :5]])
  _, free = evaluated(ids, labels, logits, IMAGENET, among='all')
  assert free['top1'] == pytest.approx(np.mean(logits.argmax(1) == places[labels]))
  assert free['top1'] < metrics['top1']


def test_sets_of_classes_and_classes_that_are_left_out(evaluated, tmp_path):
  table = {'pet': ['cat', 'dog'], 'car': [], 'fish': ['eel']}
  (tmp_path / 'map.json').write_text(json.dumps(table))
  model = Classes(['cat', 'dog', 'eel', 'owl', 'ant', 'bee', 'fox'], 7)
  labels = np.array([0, 0, 0, 1, 2, 2])
  answers = np.array([0, 1, 3, 0, 2, 1])  # right, right, other, left out, right, wrong
  logits = 5.0 * np.eye(7)[answers]
  options = dict(class_map=f'{tmp_path}/map.json')
  names = ['pet', 'car', 'fish']
  evaluator, metrics = evaluated(names, labels, logits, model, **options)
  assert metrics['examples'] == 5
  assert metrics['top1'] == pytest.approx(3 / 5)
  # Cats and dogs share the target of a pet: 2.5, 2.5, 0, 5 and 0 less than log(sum).
  assert metrics['loss'] == pytest.approx(np.log(np.exp(5) + 6) - 10 / 5)
  assert 'bad_images' not in metrics
  assert evaluator.predictions['label'].tolist() == [-1, -1, -1, 2, 2]
  # Without owls the third is the first of the classes with equal logits, a cat: right.
  _, only = evaluated(names, labels, logits, model, among='data', **options)
  assert only['top1'] == pytest.approx(4 / 5)


def test_classes_that_label_sets_number(evaluated, tmp_path):
  (tmp_path / 'real.json').write_text('[[0, 1], [], [3], [9]]')
  options = dict(labels=f'{tmp_path}/real.json')
  # Those of the data, where it has all of ImageNet's.
  backwards = Classes(IDS[::-1], 1000)
  logits = np.eye(1000)[[999 - 1, 0, 999 - 3, 999]]  # right, left out, right, wrong
  _, metrics = evaluated(IDS, np.arange(4), logits, backwards, **options)
  assert metrics['examples'] == 3
  assert metrics['top1'] == pytest.approx(2 / 3)
  # Those of the model, where it has some of them, or images lie in any folder.
  logits = np.eye(1000)[[1, 0, 3, 0]]
  for names in (IDS[500:510], ['val']):
    truth = np.arange(4) % len(names)
    evaluator, metrics = evaluated(names, truth, logits, IMAGENET, **options)
    assert evaluator.match is None
    assert metrics['top1'] == pytest.approx(2 / 3)
  with pytest.raises(UserError, match=naming("among='data'", 'needs class_map')):
    evaluated(names, truth, logits, IMAGENET, among='data', **options)
  with pytest.raises(UserError, match=naming("among='data'", 'without the classes')):
    evaluated(names, truth, logits, None, among='data')


# --- commands -----------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
  """A head of 1,000 classes, named after a published file, with the same answer always."""
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


def test_a_run_tells_its_evaluations_the_classes(tmp_path):
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
    return evaluations.build(config, tmp_path, mesh, None)

  assert build('a')['test'].evaluator.match is None
  right = build('b')['test'].evaluator.match.right
  np.testing.assert_array_equal(right, [[0, 0, 1, 0], [1, 0, 0, 0]])
  lines = evaluations.describe(build('b'))
  assert any(line.startswith('test: Classes are matched by name') for line in lines)
  with pytest.raises(UserError, match=naming("'w'", 'class_map')):
    build('c')
