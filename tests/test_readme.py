"""The Python examples of the README and of docs/ run as written."""

import contextlib

import pytest
from PIL import Image

from tests.support import documents, pairs
from tests.support.random_source import write_narrow_b16
from vit_jax import config
from vit_jax.tools import convert
from vit_jax.train import run as train

BLOCKS = [
  pytest.param(
    block,
    id=f'{documents.name(path)}-{i}',
    # Examples of a run need one, which takes a training.
    marks=[pytest.mark.slow] if "'RUN'" in block or "'runs/" in block else [],
  )
  for path in documents.DOCUMENTS
  for i, block in enumerate(documents.blocks(path, 'python'))
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Returns a folder with what the examples use: a narrow B/16, a SigLIP, a photo."""
  folder = tmp_path_factory.mktemp('readme')
  write_narrow_b16(folder / 'ViT-B_16.npz')
  pairs.siglip(folder / 'siglip')
  Image.new('RGB', (300, 200), 'red').save(folder / 'photo.jpg')
  return folder


@pytest.fixture(scope='module')
def tuned(folder):
  """Adds RUN, the B/16 tuned by LoRA, and its tuned.safetensors to the folder."""
  source = f'weights={folder}/ViT-B_16.npz,data=digits,channels=3,res=32'
  c = config.load(f'configs/finetune.py:{source},batch=8,steps=2,final=True')
  train.train({**c, 'tune': {'method': 'lora', 'rank': 2}}, folder / 'RUN')
  file = folder / 'tuned.safetensors'
  assert convert.main([str(folder / 'RUN'), str(file), '--tuned_only']) == 0


@pytest.fixture(scope='module')
def detector(folder):
  """Adds the images and the run of the tutorial on detectors, cut short, to the folder."""
  path = documents.DOCS / 'tutorials' / 'detect.md'
  c = config.load('configs/detect.py:data=yolo:things,res=160,steps=2')
  with contextlib.chdir(folder):
    exec(compile(documents.blocks(path, 'python')[0], 'images', 'exec'), {})
    train.train(c, folder / 'runs' / 'things')


@pytest.mark.parametrize('block', BLOCKS)
def test_examples_run(folder, block, monkeypatch, request):
  if "'RUN'" in block:
    request.getfixturevalue('tuned')
  if "'runs/things" in block:
    request.getfixturevalue('detector')
  monkeypatch.chdir(folder)
  names = {}
  exec(compile(block, 'example', 'exec'), names)
  if 'features' in names:
    assert names['features'].shape == (2, 197, 16)


def test_there_are_examples():
  assert len(BLOCKS) >= 6
  for block in BLOCKS:
    lines = [line for line in block.values[0].splitlines() if line.strip()]
    # A tutorial may make its data.
    assert len(lines) <= (40 if 'tutorials' in block.id else 10)
