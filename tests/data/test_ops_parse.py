"""The string of a pipeline: how it is parsed, and the mistakes in it."""

import subprocess
import sys

import pytest

from tests.support import naming
from vit_jax.data.ops import registry
from vit_jax.errors import UserError


def test_parse():
  parsed = registry.parse(
    ' decode(1) | resize((8, 4), method="bicubic")|flip_lr |value_range(-1,1) '
  )
  assert [op.name for op in parsed] == ['decode', 'resize', 'flip_lr', 'value_range']
  assert [op.draws for op in parsed] == [0, 0, 1, 0]
  assert registry.parse('') == ()
  assert registry.parse('flip_lr') is registry.parse('flip_lr')


def test_bars_inside_quotes_and_brackets_separate_nothing():
  pieces = registry._pieces("a(\"x|y\")|b([1|2])|c('\\'|')")
  assert [text for text, _ in pieces] == ['a("x|y")', 'b([1|2])', "c('\\'|')"]


@pytest.mark.parametrize(
  ('pp', 'facts'),
  [
    ('decode|reszie(8)', ("'reszie'", 'resize')),
    ('resize(8, methd="area")', ("'methd'", 'resize(size', 'method')),
    ('resize', ("'size'", 'resize(size')),
    ('resize(8, 9, 10, 11, 12)', ('resize(8, 9, 10, 11, 12)', 'resize(size')),
    ('resize_small(8, rounding="nearset")', ("rounding 'nearset'", 'nearest')),
    ('resize(-8)', ('size=-8', 'positive')),
    ('resize((8, 8, 8))', ('size=(8, 8, 8)', '(height, width)')),
    ('resize(8, "bilinaer")', ("method 'bilinaer'", 'bilinear')),
    ('decode(4)', ('channels 4', '[1, 3]')),
    ('inception_crop(8, area_min=0)', ('area_min=0', '(0, 100]')),
    ('inception_crop(8, ratio=(2, 1))', ('ratio=(2, 1)', '(low, high)')),
    ('random_crop(8, padding=-1)', ('padding=-1', 0)),
    ('random_affine(degrees=200)', ('degrees=200', 180)),
    ('random_affine(translate=4)', ('translate=4', 1)),
    ('random_affine(scale=0.5)', ('scale=0.5', '(low, high)')),
    ('value_range(1, -1)', ('value_range(1, -1)', 'lo < hi')),
    ('value_range(x, 1)', ("'value_range(x, 1)'",)),
    ('resize(__import__("os"))', ('\'resize(__import__("os"))\'',)),
    ('a.b(1)', ("'a.b(1)'",)),
    ('resize(8', ("'resize(8'",)),
    ('decode||flip_lr', ("'decode||flip_lr'",)),
    ('onehot(0)', ('num_classes=0',)),
    (7, ('data.pp', 7)),
  ],
)
def test_wrong_pipelines(pp, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    registry.parse(pp)


def test_a_mistake_is_found_without_tensorflow():
  code = (
    'import sys\n'
    'from vit_jax.data import pipeline\n'
    'try: pipeline.train("digits", "train", "reszie(8)", 8)\n'
    'except ValueError as e: assert "Did you mean" in str(e)\n'
    'pipeline.train("digits", "train", "value_range(-1,1)", 8)\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
