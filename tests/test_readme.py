"""The Python code of the README runs as written."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax import models, trees

README = (Path(__file__).parents[1] / 'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'^```python\n(.*?)^```', README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Returns a folder with what the README's examples use: a narrow B/16 and a photo."""
  folder = tmp_path_factory.mktemp('readme')
  narrow = dict(width=16, mlp_dim=16, num_heads=1)
  model = models.build('vit', 'B/16', num_classes=1000, **narrow)
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  flat = {
    name: rng.standard_normal(x.shape, np.float32) * np.float32(0.02)
    for name, x in trees.flatten(shapes).items()
  }
  np.savez(folder / 'ViT-B_16.npz', **flat)
  Image.new('RGB', (300, 200), 'red').save(folder / 'photo.jpg')
  return folder


@pytest.mark.parametrize('index', range(len(BLOCKS)))
def test_examples_run(folder, index, monkeypatch):
  monkeypatch.chdir(folder)
  names = {}
  exec(compile(BLOCKS[index], f'README.md, block {index}', 'exec'), names)
  if 'features' in names:
    assert names['features'].shape == (2, 197, 16)


def test_there_are_examples():
  assert len(BLOCKS) >= 4
  lines = [[line for line in block.splitlines() if line.strip()] for block in BLOCKS]
  assert all(len(block) <= 6 for block in lines)
