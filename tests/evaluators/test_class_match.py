"""Test sets of ImageNet and others: which of a model's classes are right for theirs."""

import json
import types

import numpy as np
import pytest

from tests.support import naming
from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match
from vit_jax.evaluators.class_match import Classes

IDS = imagenet.wordnet_ids('imagenet1k')
IMAGENET = Classes(imagenet.class_names('imagenet1k'), 1000)
IMAGENET21K = Classes(imagenet.class_names('imagenet21k'), 21_843)


def data(names, name='folder:x', number=None):
  """Stands in for a source: what of it is matched."""
  number = len(names) if names else number
  return types.SimpleNamespace(class_names=names, num_classes=number, name=name)


def match(names, model=IMAGENET, name='folder:x', **options):
  found, _ = class_match.match(data(names, name), model, **options)
  return found


# --- ImageNet's other test sets -----------------------------------------------------


@pytest.mark.parametrize('name', ['imagenet_a', 'imagenet_r'])
def test_200_classes_of_1000_are_the_only_ones_predicted(name):
  ids = imagenet.wordnet_ids(name)
  found, note = class_match.match(data(ids), IMAGENET)
  assert [IDS[i] for i in found.columns] == ids
  assert found.one_to_one
  assert '200' in note
  assert '1,000' in note
  everything = match(ids, among='all')
  np.testing.assert_array_equal(everything.columns, np.arange(1000))
  assert [IDS[i] for i in everything.right.argmax(1)] == ids
  assert np.all(everything.right.sum(1) == 1)


@pytest.mark.parametrize('name', ['imagenet_a', 'imagenet_r'])
def test_tfds_declares_1000_classes_for_200(name):
  found, note = class_match.match(data(IDS, f'tfds:{name}:0.1.0'), IMAGENET)
  assert 'same' in note
  assert '200' in note
  again = match(IDS, name=f'tfds:/data/{name}/0.1.0')
  np.testing.assert_array_equal(again.columns, found.columns)
  assert [IDS[i] for i in found.columns] == imagenet.wordnet_ids(name)
  np.testing.assert_array_equal(found.right, found.columns == np.arange(1000)[:, None])
  assert match(IDS, name='tfds:imagenet_sketch') is None
  assert match(IDS, name=f'tfds:{name}', among='all') is None


def test_folders_named_by_number_are_not_sorted_as_text():
  names = sorted(str(i) for i in range(1000))  # '0', '1', '10', '100', ...
  for model in (IMAGENET, Classes(None, 1000), Classes(IDS, 1000)):
    found = match(names, model)
    assert found.one_to_one
    np.testing.assert_array_equal(found.columns, [int(name) for name in names])
  # Of a model that was trained on such folders they are simply its names.
  assert match(names, Classes(names, 1000)) is None
  told = match(names, Classes(None, 1000), class_map='imagenet1k')
  np.testing.assert_array_equal(told.columns, found.columns)
  # Ten are in the order of their numbers.
  assert class_match.match(data(list('0123456789')), Classes(None, 10)) == (None, '')
  # '7' of ten is not ImageNet's class 7.
  with pytest.raises(UserError, match=naming('10', '1000')):
    match([str(i) for i in range(10)])


def test_sketch_and_others_with_all_ids_are_the_same_classes():
  assert match(IDS) is None
  assert match(IDS, Classes(IDS, 1000)) is None
  assert match(IMAGENET.names, Classes(IDS, 1000)) is None
  backwards = match(IDS[::-1])
  np.testing.assert_array_equal(backwards.columns, np.arange(1000)[::-1])


def test_a_head_of_imagenet21k_answers_for_imagenet1k():
  known = {x: i for i, x in enumerate(imagenet.wordnet_ids('imagenet21k'))}
  # All but one of them are in it.
  with pytest.raises(UserError, match=naming("'n04399382'", 'teddy', '1', 'known')):
    match(IDS, IMAGENET21K)
  there = [x for x in IDS if x != 'n04399382']
  found, note = class_match.match(data(IDS), IMAGENET21K, 'known')
  assert "'n04399382'" in note
  assert {int(c) for c in found.columns} == {known[x] for x in there}
  assert np.flatnonzero(~found.right.any(1)).tolist() == [IDS.index('n04399382')]
  for name, right in zip(IDS, found.right, strict=True):
    assert name not in known or found.columns[right.argmax()] == known[name]
  # ImageNet-A has it, too.
  found = match(IDS, IMAGENET21K, 'tfds:imagenet_a', class_map='known')
  assert len(found.columns) == found.right.any(1).sum() == 199
  exact = match(there, IMAGENET21K)
  np.testing.assert_array_equal(exact.columns, [known[x] for x in there])
  assert exact.one_to_one


def test_a_head_without_names_can_be_told_its_list():
  ids = imagenet.wordnet_ids('imagenet_a')
  for names, number in ((ids, 1000), (IDS, 21_843)):
    with pytest.raises(UserError, match=naming(str(number), 'class_map')):
      match(names, Classes(None, number))
  found = match(ids, Classes(None, 1000), class_map='imagenet1k')
  assert [IDS[i] for i in found.columns] == ids
  with pytest.raises(UserError, match=naming('imagenet1k', '1,000', '10')):
    match(ids, Classes(None, 10), class_map='imagenet1k')


def test_the_validation_set_on_the_classes_of_another():
  found = match(IDS, among='imagenet_a')
  assert len(found.columns) == 200
  assert found.right.any(1).sum() == 200  # images of the other 800 are left out
  with pytest.raises(UserError, match=naming('imagenet_a', 'n01498041')):
    match(['x', 'y'], Classes(['x', 'y'], 2), among='imagenet_a')


# --- any classes --------------------------------------------------------------------

ANIMALS = Classes(['cat', 'dog', 'eel'], 3)


def test_names_of_a_part_are_matched_and_all_can_be_predicted():
  found, note = class_match.match(data(['eel', 'cat']), ANIMALS)
  np.testing.assert_array_equal(found.columns, np.arange(3))
  np.testing.assert_array_equal(found.right, [[0, 0, 1], [1, 0, 0]])
  assert 'name' in note
  only = match(['eel', 'cat'], ANIMALS, among='data')
  np.testing.assert_array_equal(only.columns, [2, 0])
  # A head that is larger than its training data.
  assert match(['cat', 'dog'], Classes(['cat', 'dog', '', ''], 4)) is None


def test_what_is_compared_by_number_is_said():
  found, note = class_match.match(data(['a', 'b', 'c']), ANIMALS)
  assert found is None
  assert 'number' in note
  assert class_match.match(data(None, number=3), ANIMALS) == (None, '')
  assert class_match.match(data(['a', 'b', 'c']), Classes(None, 3)) == (None, '')
  found, note = class_match.match(data(None, number=2), ANIMALS)
  assert found is None
  assert 'first' in note
  found, note = class_match.match(data(['a', 'b']), ANIMALS, class_map='number')
  assert found is None
  assert 'first' in note


REFUSED = [
  (['cat', 'cow', 'eel'], ANIMALS, {}, ("'cow'", 'class_map')),
  (['cat', 'dgo', 'eel'], ANIMALS, {}, ('"dog"',)),
  (['n01440764', 'n00000001'], IMAGENET, {}, ("'n00000001'",)),
  (['n01440764', 'n00007846'], IMAGENET, {}, ("'n00007846'", 'person')),
  (IDS[:2], Classes(IDS[2:4], 2), {}, (IDS[0], 'tench')),
  (['a', 'b'], ANIMALS, {}, ('2', '3')),
  (['a', 'b', 'c', 'd'], ANIMALS, {}, ('4', '3')),
  (['a', 'b', 'c'], ANIMALS, {'class_map': 'name'}, ("'a'",)),
  (None, ANIMALS, {'class_map': 'name'}, ('name its classes',)),
  (['a', 'b', 'c'], ANIMALS, {'class_map': 'known'}, ("'a'",)),
  (['a', 'b', 'c'], ANIMALS, {'among': 'data'}, ('data', 'number')),
  (['cat'], ANIMALS, {'class_map': 'nmae'}, ("'nmae'", '"name"')),
  (['cat'], ANIMALS, {'among': 'imagenet_b'}, ("'imagenet_b'", '"imagenet_r"')),
]  # fmt: skip


@pytest.mark.parametrize(('names', 'model', 'options', 'facts'), REFUSED)
def test_classes_that_cannot_be_matched_are_refused(names, model, options, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    match(names, model, **options)


def test_a_file_of_ones_own(tmp_path):
  path = tmp_path / 'map.json'

  def found(table, names=('pet', 'fish', 'car'), model=ANIMALS):
    path.write_text(json.dumps(table))
    return match(list(names), model, class_map=str(path))

  # Of a class of ObjectNet several of ImageNet's are right; predictions of all compete.
  right = found({'pet': ['cat', 'dog'], 'fish': [2], 'car': [], 'not here': ['eel']})
  np.testing.assert_array_equal(right.right, [[1, 1, 0], [0, 0, 1], [0, 0, 0]])
  np.testing.assert_array_equal(right.columns, np.arange(3))
  many = found({'pet': ['n02123045', 'cat'], 'fish': [], 'car': []}, model=Classes(
    [*IDS[:999], 'cat'], 1000))  # fmt: skip
  assert np.flatnonzero(many.right[0]).tolist() == [281, 999]
  for table, facts in {
    '{"pet": ["cat"]}': ("'fish'", '2'),
    '{"pet": ["cow"], "fish": [], "car": []}': ("'cow'",),
    '{"pet": [3], "fish": [], "car": []}': ("'3'",),
    '{"pet": "cat"}': ('map.json.pet', "'cat'"),
    '{"pet": [], "fish": [], "car": []}': ('leaves out',),
    '[]': ('map.json',),
    '[' * 100_000: ('map.json', 'JSON'),
    '{"pet": [true], "fish": [], "car": []}': ('map.json.pet', 'True'),
    '{': ('map.json', 'JSON'),
  }.items():
    path.write_text(table)
    with pytest.raises(UserError, match=naming(*facts)):
      match(['pet', 'fish', 'car'], ANIMALS, class_map=str(path))
